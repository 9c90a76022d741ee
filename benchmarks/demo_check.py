"""Does the drafter of `make demo` use what it was given? It must beat two controls on the texts of its evaluation:

    python -m benchmarks.demo_check [the overrides of the evaluation]

(a) a bigram table of the same training tokens, (b) the same drafter trained on states permuted across positions.
Both are made here; (b) is trained by train.py itself. Exit 1 if a 95 % interval of the difference touches 0.
"""

import json
import subprocess
import sys
from pathlib import Path

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich import box, get_console
from rich.table import Table

from benchmarks.record import write_result
from eagle3.app import launch
from eagle3.config import Config
from eagle3.controls import Compared, bigram_table, compare, control_counts
from eagle3.export.directory import load_drafter
from eagle3.permuted import permuted_store
from eagle3.report import read_texts
from eagle3.rows import split_conversations
from extract.job import open_verifier
from extract.progress import Progress
from extract.store import open_store
from extract.verifier import load_model

ROOT = Path(__file__).resolve().parent.parent


def check(config: Config, run_dir: Path) -> None:
    results = read_texts(run_dir)
    work = run_dir / "controls"
    drafter_dir = train_permuted(config, work)
    spec = open_verifier(config.verifier, Path(config.cache_dir))
    store = open_store(Path(config.store))
    train_refs, _ = split_conversations(store.samples, config.data.val_fraction, config.seed)
    table = bigram_table(store, train_refs, spec.vocab_size)
    device = config.hardware.accelerator
    model = load_model(spec, dtype=torch.float32, device=device)
    permuted = load_drafter(drafter_dir, model.get_input_embeddings().weight.data).to(device).eval()
    with Progress("controls", len(results), unit="texts") as progress:
        counts = control_counts(
            model,
            results,
            table,
            permuted,
            drafts=config.evaluation.drafts,
            seed=config.seed,
            advance=progress.advance,
        )
    compared = [
        compare(name, results, counts[key], resamples=config.evaluation.bootstrap, seed=config.seed)
        for key, name in (("bigram", "bigram table"), ("permuted", "permuted states"))
    ]
    show(compared)
    write_result("demo_check", [figures(c) for c in compared])
    lost = [c.name for c in compared if not c.beaten]
    if lost:
        raise ValueError(f"the drafter does not beat: {', '.join(lost)} (the interval touches 0)")


def train_permuted(config: Config, work: Path) -> Path:
    """train.py on the permuted store, as the user would start it; finished work is reused by train.py itself."""
    store = permuted_store(Path(config.store), work / "store", seed=config.seed)
    run_dir = work / "train"
    overrides = [
        o for o in HydraConfig.get().overrides.task if not o.startswith(("store=", "drafter_dir=", "tracking="))
    ]
    own = [f"store={store}", f"hydra.run.dir={run_dir}", "tracking=local"]
    subprocess.run([sys.executable, str(ROOT / "train.py"), *overrides, *own], cwd=Path.cwd(), check=True)
    return Path(json.loads((run_dir / "summary.json").read_text())["drafter_dir"])


def show(compared: list[Compared]) -> None:
    table = Table(title="Controls: acceptance length on the same texts", box=box.SIMPLE, title_justify="left")
    for name in ("control", "its", "ours", "ours minus its, 95 %", ""):
        table.add_column(name)
    for c in compared:
        verdict = "beaten" if c.beaten else "NOT BEATEN"
        table.add_row(c.name, f"{c.accept_len:.3f}", f"{c.ours:.3f}", str(c.difference), verdict)
    get_console().print(table)


def figures(c: Compared) -> dict[str, float | str]:
    difference = c.difference
    return {
        "control": c.name,
        "accept_len": c.accept_len,
        "ours": c.ours,
        "difference": difference.value,
        "low": difference.low,
        "high": difference.high,
    }


@hydra.main(version_base="1.3", config_path="../conf", config_name="evaluate")
def main(raw: DictConfig) -> None:
    launch(raw, check)


if __name__ == "__main__":
    main()
