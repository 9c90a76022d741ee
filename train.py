"""Second stage: a store of hidden states → an EAGLE-3 drafter.

python train.py                                     the quickstart, on the store of extract.py
python train.py -m optimizer.lr=3e-4,1e-3           a sweep, with a table at the end
python train.py resume=RUN_DIR                      go on with an interrupted run, from its saved config
python train.py drafter.init_from=DRAFTER_DIR       warm start
"""

from pathlib import Path

import hydra
from omegaconf import DictConfig

from eagle3.app import command, is_sweep, launch, prepare_machine, rank, require_alone, run_log, tracked_run
from eagle3.charts import draw
from eagle3.checkpoints import BEST, checkpoints, publish
from eagle3.config import Config, from_values
from eagle3.fit import fit
from eagle3.outcome import show_summary, summary_of
from eagle3.plan import TrainingPlan, plan_training, show_plan
from eagle3.record import declared
from eagle3.runlog import check_wandb_ready
from extract.progress import shown_path
from extract.rundir import RunDir, saved_config


def train(config: Config, run_dir: Path) -> float | None:
    if config.resume:
        require_alone("resume")
        run_dir = Path(config.resume).absolute()
        config = from_values(saved_config(run_dir))
        prepare_machine(config.hardware)
    check_wandb_ready(config.tracking.mode)
    if config.hardware.devices > 1 and is_sweep():
        raise ValueError("a sweep (-m) trains on one device a job; set hardware.devices=1 or launch single runs")
    plan = plan_training(config)
    show_plan(plan)
    if config.dry_run:
        return None
    intact = (run_dir / BEST).exists()
    with tracked_run(config, run_dir, "train", plan.inputs, intact=intact) as run:
        reused = run.state == "finished"
        if not reused:
            tracked = work(config, plan, run)
            if rank() > 0:
                return None
            last = checkpoints(run.path)[-1]
            publish(run.path, last.best_step)  # again: an earlier attempt may have died after its last checkpoint
            charts = draw([run.path], run.path / "charts")
            run.finish(summary_of(plan, last, run.path, charts, tracked))
        summary = run.summary()
        show_summary(summary, reused=reused, next_command=command("evaluate.py", *other_drafter(config, run)))
        return summary["accept_len"]


def other_drafter(config: Config, run: RunDir) -> list[str]:
    """The key that evaluate.py needs where the run does not lie where its config says: a sweep, a directory given."""
    drafter = run.path / BEST
    return [] if drafter.absolute() == Path(config.drafter_dir).absolute() else [f"drafter_dir={shown_path(drafter)}"]


def work(config: Config, plan: TrainingPlan, run: RunDir) -> str | None:
    """Train from the last whole checkpoint to the end; returns where W&B has it."""
    found = checkpoints(run.path)
    start = found[-1] if found else None
    done = start.step if start else 0
    with run_log(config, run, "train", declared(config.drafter.ttt_steps), resumed_from_step=done) as runlog:
        if done < plan.schedule.total_steps:
            fit(plan, runlog, run.path, start, rank())
        return runlog.where()


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(raw: DictConfig) -> float | None:
    return launch(raw, train)


if __name__ == "__main__":
    main()
