"""First stage: prompts → answers of the verifier → hidden states in a store.

python extract.py                       the quickstart
python extract.py dry_run=true          plan and stop
python extract.py name=mine verifier=hf verifier.name=NAME verifier.path=DIR extraction.prompts=FILE
"""

from pathlib import Path

import hydra
import torch
from omegaconf import DictConfig

from eagle3.app import command, launch, run_log, tracked_run
from eagle3.config import Config
from eagle3.runlog import Declared, RunLog, check_wandb_ready
from extract.job import Job, open_job
from extract.pipeline import StageFigures, answer_all, capture_all, plan_capture, teach_all
from extract.report import show_capture_plan, show_prompts_plan, show_summary, summary_of
from extract.rundir import RunDir
from extract.samples import Sample, require_supervision
from extract.store import create_or_resume, open_store, require_space
from extract.verifier import load_head

DECLARED = {
    "stage": Declared(
        names=frozenset({"done", "tokens", "reused", "seconds"}),
        optional=frozenset({"tokens_per_s"}),
        integer=frozenset({"done", "tokens", "reused"}),
    )
}


def extract(config: Config, run_dir: Path) -> None:
    check_wandb_ready(config.tracking.mode)
    job = open_job(config.verifier, config.server, config.extraction, config.hardware, Path(config.store),
                   cache_dir=Path(config.cache_dir), seed=config.seed)  # fmt: skip
    outlook = job.outlook()
    show_prompts_plan(job.store, **outlook)
    require_space(job.store, outlook["at_most"])
    if config.dry_run:
        return
    inputs = {"prompts": job.manifest["prompts"]["sha256"]}
    with tracked_run(config, run_dir, "extract", inputs, intact=job.is_done()) as run:
        reused = run.state == "finished"
        if not reused:
            run.finish(work(config, job, run))
        show_summary(run.summary(), reused=reused, next_command=command("train.py"))


def work(config: Config, job: Job, run: RunDir) -> dict[str, object]:
    """The three stages; each does only what an earlier run has not."""
    settings = config.extraction
    stages: dict[str, StageFigures] = {}
    with run_log(config, run, "extract", DECLARED) as runlog, job.journal() as journal:
        with create_or_resume(job.store, job.manifest, shard_bytes=settings.shard_mib << 20) as writer:
            stages["respond"], unanswered = answer_all(
                job.engine, job.chat, job.conversations, journal, sampling=job.sampling,
                verifier_sha256=job.spec.sha256, max_len=settings.max_len, concurrency=settings.concurrency,
                keep_given=job.keep_given,
            )  # fmt: skip
            why = f"the first left out is {unanswered[0].id}: {unanswered[0].reason}; " if unanswered else ""
            plan = plan_capture(job.samples(journal), f"{why}look at the prompts and the chat template")
            require_supervision(len(plan.ids), [*unanswered, *plan.skipped])
            needed = plan.tokens * job.token_bytes
            show_capture_plan(job.store, plan, unanswered, job.tokenizer, needed=needed, layers=job.capture_layers)
            samples = (s for s in job.samples(journal) if isinstance(s, Sample))
            stages["capture"] = capture_all(
                job.engine, samples, writer, total_tokens=plan.tokens, batch_tokens=settings.capture_tokens,
                dtype=getattr(torch, settings.dtype),
            )  # fmt: skip
            writer.finish(plan.ids)
        job.engine.close()
        stored = open_store(job.store).manifest["counts"]["tokens"]
        stages["teacher"] = teach_all(
            job.store, load_head(job.spec), total_tokens=stored, device=config.hardware.accelerator,
            chunk_tokens=settings.capture_tokens,
        )  # fmt: skip
        report(runlog, stages)
    store = open_store(job.store, need_teacher=True, need_complete=True)
    return summary_of(job.store, store.manifest["counts"], stages)


def report(runlog: RunLog, stages: dict[str, StageFigures]) -> None:
    runlog.expect("stage", len(stages))
    for number, figures in enumerate(stages.values(), start=1):
        runlog.emit("stage", number, figures.values())


@hydra.main(version_base="1.3", config_path="conf", config_name="extract")
def main(raw: DictConfig) -> None:
    launch(raw, extract)


if __name__ == "__main__":
    main()
