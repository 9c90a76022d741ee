"""A server of the verifier, with a drafter or without: measured, tuned, or kept running.

python serve.py                                     the quickstart: how fast is vLLM on this machine
python serve.py server=sglang hardware=h200 serving=benchmark drafter_dir=DIR
python serve.py server=sglang serving=foreground    stays until Ctrl-C
python serve.py server=sglang serving=capture       likewise, for extract.py server.urls=[URL]
python serve.py dry_run=true                        the command line and its environment, and stop
python serve.py -m server.flags.attention_backend=triton,flashinfer     a table against the untuned server
"""

from pathlib import Path

import hydra
from omegaconf import DictConfig

from eagle3.app import command, launch, run_log, tracked_run
from eagle3.config import Config
from eagle3.runlog import check_wandb_ready
from eagle3.serving.figures import declared
from eagle3.serving.lives import HELD, Planned, measure, plan, summary_of
from eagle3.serving.prompts import Prompts, read_prompts
from eagle3.serving.report import show_line, show_summary
from eagle3.serving.tuning import require_alone
from extract.rundir import RunDir


def serve(config: Config, run_dir: Path) -> float | None:
    require_alone()
    planned = plan(config)
    if config.dry_run:
        show_line(planned.line)
    elif config.serving.mode in HELD:
        HELD[config.serving.mode](planned, run_dir)
    else:
        return benchmark(config, planned, run_dir)
    return None


def benchmark(config: Config, planned: Planned, run_dir: Path) -> float:
    """Figures of one server: into the ledger, W&B and summary.json; a finished run's are shown again."""
    check_wandb_ready(config.tracking.mode)
    prompts = read_prompts(config, planned.spec)
    with tracked_run(config, run_dir, "serve", planned.inputs(), renews=True) as run:
        reused = run.state == "finished"
        if not reused:
            work(config, planned, run, prompts)
        summary = run.summary()
        show_summary(summary, reused=reused, next_command=command("serve.py", "serving=foreground"))
        return summary["decode_tok_s"]


def work(config: Config, planned: Planned, run: RunDir, prompts: Prompts) -> None:
    with run_log(config, run, "serve", declared(planned.drafter is not None)) as runlog:
        measured = measure(planned, prompts, run.path, runlog)
        tracked = runlog.where()
    run.finish(summary_of(planned, measured, tracked))


@hydra.main(version_base="1.3", config_path="conf", config_name="serve")
def main(raw: DictConfig) -> float | None:
    return launch(raw, serve)


if __name__ == "__main__":
    main()
