"""Third stage: decode with a drafter, on prompts it was not trained on, and say what it is worth.

python evaluate.py                                  the drafter that train.py of the same config has made
python evaluate.py drafter_dir=DIR                  any drafter of the same verifier
python evaluate.py evaluation.prompts=FILE          other prompts
python evaluate.py server=vllm                      in vLLM (make vllm-env): its own counts beside ours, and a verdict
python evaluate.py server=sglang                    the same in SGLang, which needs a GPU to draft
"""

from pathlib import Path

import hydra
from omegaconf import DictConfig

from eagle3.app import command, launch, run_log, tracked_run
from eagle3.config import Config
from eagle3.export.directory import find_drafter, read_origin
from eagle3.measure import MEASURES, show_plan
from eagle3.report import show_report, warn_of
from eagle3.runlog import Declared, check_wandb_ready
from extract.job import open_verifier
from extract.prompts import source_sha256
from extract.store_tensors import sha256_of

COMMON = frozenset({"accept_len", "accept_len_low", "accept_len_high", "accept_len_replayed", "prompts", "tokens",
                    "verifications", "tokens_s_speculative_all_prompts"})  # fmt: skip
SERVED = COMMON | {"accept_len_raw", "accept_len_decoded", "text_equal", "text_ties", "tokens_s_plain"}
FIGURES = {"inprocess": COMMON, "vllm": SERVED, "sglang": SERVED}
COUNTS = frozenset({"prompts", "tokens", "verifications", "text_equal", "text_ties"})


def judge(config: Config, run_dir: Path) -> float | None:
    engine = config.server.engine
    if config.drafter_dir is None:
        raise ValueError("drafter_dir=null: evaluate.py judges a drafter; give drafter_dir=DIR")
    check_wandb_ready(config.tracking.mode)
    drafter_dir = find_drafter(Path(config.drafter_dir)).resolve()  # a training that goes on switches the link
    origin = read_origin(drafter_dir)
    spec = open_verifier(config.verifier, Path(config.cache_dir))
    inputs = {
        "drafter": sha256_of(drafter_dir / "model.safetensors"),
        "drafter config": sha256_of(drafter_dir / "config.json"),
        "prompts": source_sha256(config.evaluation.prompts),
        "verifier": spec.sha256,
        "chat template": spec.chat_template_sha256,
    }
    checked = f"python -m eagle3.export check {config.drafter_dir} --engine sglang"
    next_command = command("-m benchmarks.demo_check") if engine == "inprocess" else checked
    if config.dry_run:
        show_plan(config, spec, drafter_dir)
        return None
    with tracked_run(config, run_dir, "evaluate", inputs, renews=True) as run:
        if run.state == "finished":
            summary = run.summary()
            show_report(summary, reused=True, next_command=next_command)
            return summary["accept_len"]
        report = MEASURES[engine](config, spec, drafter_dir, run.path)
        warnings = warn_of(report.pooled, origin, spec)
        report.write_texts(run.path)
        summary = report.summary()
        names = FIGURES[engine]
        with run_log(config, run, "evaluate", {"eval": Declared(names=names, integer=names & COUNTS)}) as runlog:
            runlog.expect("eval", 1)
            runlog.emit("eval", 1, {name: summary[name] for name in names})
        summary |= {"drafter_dir": config.drafter_dir, "warnings": warnings, "table": report.rows()}
        show_report(summary, reused=False, next_command=next_command)
        report.verdict()  # after the table, which shows what a failed gate found
        run.finish(summary)
        return summary["accept_len"]


@hydra.main(version_base="1.3", config_path="conf", config_name="evaluate")
def main(raw: DictConfig) -> float | None:
    return launch(raw, judge)


if __name__ == "__main__":
    main()
