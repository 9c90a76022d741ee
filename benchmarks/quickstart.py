"""Times the quickstart from nothing, stage by stage: `python -m benchmarks.quickstart`.

Every stage is the very command of `make demo`, in a new directory. Wall seconds and peak memory are the operating
system's own (wait4), of the stage and all its children.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich import box, get_console
from rich.table import Table

from benchmarks.record import write_result

ROOT = Path(__file__).resolve().parent.parent
STAGES = ("extract", "train", "evaluate")
KEPT = ("accept_len", "accept_len_low", "accept_len_high", "val_loss", "tokens", "supervised", "tokens_per_s",
        "respond_tokens_per_s", "capture_tokens_per_s", "teacher_tokens_per_s", "tokens_s_plain",
        "tokens_s_speculative", "best_step", "coverage")  # fmt: skip


def measure(stage: str, work: Path) -> dict[str, Any]:
    """Run one script in `work`; its seconds, peak memory and the figures of its summary."""
    began = time.monotonic()
    child = os.spawnve(
        os.P_NOWAIT, sys.executable, [sys.executable, str(ROOT / f"{stage}.py"), f"hydra.run.dir={work / stage}",
        *(["drafter_dir=train/drafter"] if stage == "evaluate" else [])],
        {**os.environ, "EAGLE3_CACHE": str(work / "cache")},
    )  # fmt: skip
    _, status, usage = os.wait4(child, 0)
    seconds = time.monotonic() - began
    if status:
        raise SystemExit(f"{stage}.py ended with {os.waitstatus_to_exitcode(status)}")
    summary = json.loads((work / stage / "summary.json").read_text())
    kept = {key: summary[key] for key in KEPT if key in summary}
    return {"stage": stage, "seconds": round(seconds, 1), "peak_gib": round(usage.ru_maxrss / 2**20, 2), **kept}


def main() -> None:
    started_in = Path.cwd()
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        (work / "prompts").symlink_to(ROOT / "prompts")
        os.chdir(work)
        rows = [measure(stage, work) for stage in STAGES]
        os.chdir(started_in)
    path = write_result("quickstart", rows)
    table = Table("stage", "seconds", "peak GiB", box=box.SIMPLE)
    for row in rows:
        table.add_row(row["stage"], f"{row['seconds']:.1f}", f"{row['peak_gib']:.2f}")
    table.add_row("all", f"{sum(r['seconds'] for r in rows):.1f}", f"{max(r['peak_gib'] for r in rows):.2f}")
    console = get_console()
    console.print(table)
    console.print(f"written to {path}")


if __name__ == "__main__":
    main()
