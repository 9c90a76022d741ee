"""Second stage: a store of hidden states → an EAGLE-3 drafter.

python train.py                                     the quickstart, on the store of extract.py
python train.py -m optimizer.lr=3e-4,1e-3           a sweep, with a table at the end
python train.py resume=RUN_DIR                      go on with an interrupted run, from its saved config
python train.py from_run=RUN_DIR                    the same training once more, from what its run.json says
python train.py drafter.init_from=DRAFTER_DIR       warm start
"""

from pathlib import Path

import hydra
from omegaconf import DictConfig

from eagle3.again import require_same_inputs, settled
from eagle3.app import command, drafter_key, launch, prepare_machine, rank, run_log, task_overrides, tracked_run
from eagle3.charts import draw
from eagle3.checkpoints import BEST, Checkpoint, checkpoints, is_published, newest_sound, publish
from eagle3.config import Config
from eagle3.fit import fit
from eagle3.outcome import show_summary, summary_of
from eagle3.plan import TrainingPlan, plan_training, show_plan
from eagle3.record import declared
from eagle3.runlog import check_wandb_ready
from extract.rundir import RunDir


def train(config: Config, run_dir: Path) -> float | None:
    repeated = config.from_run
    config, run_dir = settled(config, run_dir, task_overrides())
    prepare_machine(config.hardware, plans=config.dry_run)
    check_wandb_ready(config.tracking.mode)
    plan = plan_training(config)
    if repeated:
        require_same_inputs(Path(repeated), plan.inputs)
    show_plan(plan)
    if config.dry_run:
        return None
    with tracked_run(config, run_dir, "train", plan.inputs, intact=is_published(run_dir)) as run:
        reused = run.state == "finished"
        if not reused:
            last, charts, tracked = work(config, plan, run)
            if rank() > 0:
                return None
            run.finish(summary_of(plan, last, run.path, charts, tracked))
        summary = run.summary()
        show_summary(summary, reused=reused, next_command=command("evaluate.py", *drafter_key(config, run.path / BEST)))
        return summary["accept_len"]


def work(config: Config, plan: TrainingPlan, run: RunDir) -> tuple[Checkpoint, list[Path], str | None]:
    """Train from the last whole checkpoint to the end; returns the last one, the charts, and where W&B has it."""
    start = newest_sound(run.path)
    done = start.step if start else 0
    with run_log(config, run, "train", declared(config.drafter.ttt_steps), resumed_from_step=done) as runlog:
        if done < plan.schedule.total_steps:
            fit(plan, runlog, run.path, start, rank())
        last = start if start and done == plan.schedule.total_steps else checkpoints(run.path)[-1]
        if rank() > 0:
            return last, [], None
        publish(run.path, last.best_step)  # an earlier attempt may have died just before it
        charts = draw([run.path], run.path / "charts")
        if config.tracking.artifacts:
            runlog.attach("model", run.path / BEST)
            runlog.attach("charts", run.path / "charts")
        return last, charts, runlog.where()


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(raw: DictConfig) -> float | None:
    return launch(raw, train)


if __name__ == "__main__":
    main()
