"""Third stage: decode with a drafter, on prompts it was not trained on, and say what it is worth.

python evaluate.py                                  the drafter that train.py of the same config has made
python evaluate.py drafter_dir=DIR                  any drafter of the same verifier
python evaluate.py evaluation.prompts=FILE          other prompts
"""

from pathlib import Path

import hydra
from omegaconf import DictConfig

from eagle3.app import command, launch, run_log, tracked_run
from eagle3.config import Config
from eagle3.export import find_drafter, read_origin
from eagle3.measure import measure
from eagle3.report import show_report, warn_of
from eagle3.runlog import Declared, check_wandb_ready
from extract.job import open_verifier
from extract.progress import closing_table
from extract.prompts import source_sha256
from extract.store_tensors import sha256_of

FIGURES = frozenset({"accept_len", "accept_len_low", "accept_len_high", "accept_len_replayed", "prompts", "tokens",
                     "verifications", "tokens_s_speculative_all_prompts"})  # fmt: skip
DECLARED = {"eval": Declared(names=FIGURES, integer=frozenset({"prompts", "tokens", "verifications"}))}


def judge(config: Config, run_dir: Path) -> float | None:
    check_wandb_ready(config.tracking.mode)
    # Resolved: a training that goes on switches the link to a better drafter at any moment.
    drafter_dir = find_drafter(Path(config.drafter_dir)).resolve()
    spec = open_verifier(config.verifier, Path(config.cache_dir))
    inputs = {
        "drafter": sha256_of(drafter_dir / "model.safetensors"),
        "prompts": source_sha256(config.evaluation.prompts),
        "verifier": spec.sha256,
        "chat template": spec.chat_template_sha256,
    }
    if config.dry_run:
        prompts = f"{config.evaluation.prompts}, at most {config.evaluation.max_new_tokens} tokens each"
        closing_table("Plan", [("drafter", str(drafter_dir)), ("verifier", spec.name), ("prompts", prompts)], None)
        return None
    with tracked_run(config, run_dir, "evaluate", inputs, renews=True) as run:
        reused = run.state == "finished"
        if not reused:
            report = measure(config, spec, drafter_dir)
            warnings = warn_of(report, read_origin(drafter_dir), spec)
            report.write_texts(run.path)
            with run_log(config, run, "evaluate", DECLARED) as runlog:
                runlog.expect("eval", 1)
                summary = report.summary()
                runlog.emit("eval", 1, {name: summary[name] for name in FIGURES})
            run.finish(summary | {"drafter_dir": config.drafter_dir, "warnings": warnings, "table": report.rows()})
        summary = run.summary()
        show_report(summary, reused=reused, next_command=command("-m benchmarks.demo_check"))
        return summary["accept_len"]


@hydra.main(version_base="1.3", config_path="conf", config_name="evaluate")
def main(raw: DictConfig) -> float | None:
    return launch(raw, judge)


if __name__ == "__main__":
    main()
