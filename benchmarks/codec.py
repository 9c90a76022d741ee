"""What codec fp8 costs a drafter: the quickstart trained from both kinds of store, with the same answers.

    python -m benchmarks.codec [overrides of both scripts]

The answers are made once; states are captured, and a drafter is trained, for each codec.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich import box, get_console
from rich.table import Table

from benchmarks.record import write_result
from extract.store_codec import CODECS
from extract.store_space import size_text

ROOT = Path(__file__).resolve().parent.parent


def measured(codec: str, work: Path, overrides: list[str]) -> dict[str, Any]:
    """Extracts and trains in `work`; the figures of both summaries."""
    told: dict[str, Any] = {}
    for stage in ("extract", "train"):
        out = work / f"{stage}-{codec}"
        command = [sys.executable, str(ROOT / f"{stage}.py"), f"name={codec}", f"extraction.codec={codec}",
                   f"hydra.run.dir={out}", *overrides]  # fmt: skip
        subprocess.run(command, cwd=work, env={**os.environ, "EAGLE3_CACHE": str(work / "cache")}, check=True)
        told[stage] = json.loads((out / "summary.json").read_text())
    return {"codec": codec, "store_bytes": told["extract"]["bytes"], "tokens": told["extract"]["tokens"],
            "accept_len": told["train"]["accept_len"], "val_loss": told["train"]["val_loss"]}  # fmt: skip


def main() -> None:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        (work / "prompts").symlink_to(ROOT / "prompts")
        for codec in CODECS:
            if rows:
                (work / "data" / codec).mkdir()
                shutil.copy(work / "data" / rows[0]["codec"] / "responses.jsonl", work / "data" / codec)
            rows.append(measured(codec, work, sys.argv[1:]))
    path = write_result("codec", rows)
    table = Table("codec", "store", "bytes a token", "val/accept_len", "val/loss", box=box.SIMPLE)
    for row in rows:
        table.add_row(row["codec"], size_text(row["store_bytes"]), f"{row['store_bytes'] / row['tokens']:.0f}",
                      f"{row['accept_len']:.3f}", f"{row['val_loss']:.4f}")  # fmt: skip
    console = get_console()
    console.print(table)
    console.print(f"written to {path}")


if __name__ == "__main__":
    main()
