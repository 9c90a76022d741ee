"""First stage: prompts → answers of the verifier → hidden states in a store.

python extract.py                       the quickstart
python extract.py dry_run=true          plan and stop
python extract.py name=mine verifier=hf verifier.name=NAME verifier.path=DIR extraction.prompts=FILE
"""

from contextlib import closing
from pathlib import Path

import hydra
from omegaconf import DictConfig

from eagle3.app import STAGE_FIGURES, command, emit_stages, launch, run_log, tracked_run
from eagle3.config import Config
from eagle3.runlog import check_wandb_ready
from extract.job import Job, open_job
from extract.report import show_commands, show_prompts_plan, show_summary, summary_of
from extract.rundir import RunDir
from extract.stages import capture_stage, respond_stage, teacher_stage
from extract.store import create_or_resume, open_store, require_space


def extract(config: Config, run_dir: Path) -> None:
    check_wandb_ready(config.tracking.mode)
    job = open_job(config.verifier, config.server, config.extraction, config.hardware, Path(config.store),
                   cache_dir=Path(config.cache_dir), seed=config.seed)  # fmt: skip
    outlook = job.outlook()
    show_prompts_plan(job.store, **outlook)
    done = job.is_done()
    require_space(job.store, 0 if done else outlook["at_most"])
    if config.dry_run:
        show_commands(job.commands)
        return
    inputs = {"prompts": job.manifest["prompts"]["sha256"]}
    with tracked_run(config, run_dir, "extract", inputs, intact=done) as run:
        reused = run.state == "finished"
        if not reused:
            run.finish(work(config, job, run))
        show_summary(run.summary(), reused=reused, next_command=command("train.py"))


def work(config: Config, job: Job, run: RunDir) -> dict[str, object]:
    """The three stages; each does only what an earlier run has not."""
    shard_bytes = config.extraction.shard_mib << 20
    with run_log(config, run, "extract", STAGE_FIGURES) as runlog, job.journal() as journal:
        with closing(job.engine), create_or_resume(job.store, job.manifest, shard_bytes=shard_bytes) as writer:
            responded, unanswered = respond_stage(job, journal)
            captured = capture_stage(job, journal, writer, unanswered)
        taught = teacher_stage(job, config.hardware.accelerator)
        stages = {"respond": responded, "capture": captured, "teacher": taught}
        emit_stages(runlog, [stage.values() for stage in stages.values()])
    store = open_store(job.store, need_teacher=True, need_complete=True)
    return summary_of(job.store, store.manifest, stages)


@hydra.main(version_base="1.3", config_path="conf", config_name="extract")
def main(raw: DictConfig) -> None:
    launch(raw, extract)


if __name__ == "__main__":
    main()
