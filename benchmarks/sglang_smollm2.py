"""Is a store made by SGLang as good as one made in this process? On a GPU, with a real model:

    python -m benchmarks.sglang_smollm2 extraction.prompts=FILE server.python=PYTHON [KEY=VALUE ...]

SGLang answers the prompts and hands over states; transformers computes the states of the same text in this process; a
drafter is trained on each, and a second one on transformers' with another seed, which says what chance alone does.
Keys are those of extract.py, on top of experiment=smollm2_h200.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box, get_console
from rich.table import Table

from benchmarks.record import write_result
from extract.compare import compare, show
from extract.store import open_store

EXPERIMENT = "experiment=smollm2_h200"
TRAININGS = (("sglang", 0), ("transformers", 0), ("transformers", 1))
KEPT = ("accept_len", "val_loss", "best_step", "samples", "tokens", "supervised", "tokens_per_s",
        "respond_tokens_per_s", "capture_tokens_per_s", "teacher_tokens_per_s")  # fmt: skip


def ran(script: str, *keys: str) -> dict[str, Any]:
    """The summary of one stage, which its run directory holds."""
    found = Path("outputs/benchmarks") / "_".join([script, *(key.partition("=")[2] for key in keys[-2:])])
    command = [sys.executable, f"{script}.py", EXPERIMENT, *keys, f"hydra.run.dir={found}"]
    subprocess.run(command, check=True, env=os.environ)
    return json.loads((found / "summary.json").read_text())


def extracted(keys: Sequence[str]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Both stores; the second takes the first one's answers."""
    first = ran("extract", *keys, "name=sglang")
    Path("data/transformers").mkdir(parents=True, exist_ok=True)
    shutil.copy("data/sglang/responses.jsonl", "data/transformers")
    second = ran("extract", *_of_no_server(keys), "server=inprocess", "name=transformers")
    stores = [open_store(Path("data") / name, need_teacher=True) for name in ("sglang", "transformers")]
    found = compare(*stores)
    show(found, *(store.path for store in stores))
    rows = [{"stage": "extract", "engine": name, **_kept(summary)}
            for name, summary in (("sglang", first), ("transformers", second))]  # fmt: skip
    return rows, {"compared": asdict(found), "probes": stores[0].manifest["probes"]}


def main() -> None:
    keys = sys.argv[1:]
    rows, facts = extracted(keys)
    for engine, seed in TRAININGS:
        summary = ran("train", *_of_no_server(keys), "server=inprocess", f"name={engine}", f"seed={seed}")
        rows.append({"stage": "train", "engine": engine, "seed": seed, **_kept(summary)})
    table = Table("states from", "seed", "val/accept_len", "val/loss", box=box.SIMPLE)
    for row in rows[2:]:
        table.add_row(row["engine"], str(row["seed"]), f"{row['accept_len']:.4f}", f"{row['val_loss']:.4f}")
    console = get_console()
    console.print(table)
    console.print(f"written to {write_result('sglang_smollm2', rows, **facts)}")


def _of_no_server(keys: Sequence[str]) -> list[str]:
    return [key for key in keys if not key.startswith("server")]


def _kept(summary: dict[str, Any]) -> dict[str, Any]:
    return {key: summary[key] for key in KEPT if key in summary}


if __name__ == "__main__":
    main()
