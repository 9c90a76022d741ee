"""Rebuilds a mirror of a run from its ledger: a new W&B run, or new TensorBoard or CSV files.

    python -m eagle3.runlog.replay RUN_DIR [--mirror wandb|tensorboard|csv] [--online]

What is sent is held against the ledger as at the end of a training; a difference is an error here too.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import get_args

from rich.console import Console

from eagle3.runlog import check_wandb_ready, read_ledger
from eagle3.runlog.guard import Guarded
from eagle3.runlog.reconcile import MetricsLost, held_of, mirror_gaps
from eagle3.runlog.shown import MirrorName, open_mirror, read_shown


def replay(run_dir: Path, name: MirrorName, *, online: bool = False) -> tuple[int, str]:
    """Number of rows that the new mirror holds, and where it is.

    Raises:
        ValueError: no run directory, a damaged ledger, or a mirror that cannot start.
        MetricsLost: the mirror does not hold what the ledger holds.
    """
    rows = read_ledger(run_dir)
    shown = read_shown(run_dir)
    if name == "wandb":
        check_wandb_ready("online" if online else "offline")
        shown = replace(shown, mode="online" if online else "offline", tags=(*shown.tags, "replayed"))
    mirror = Guarded(open_mirror(name, run_dir, shown), rows)
    where = mirror.mirror.where() or str(run_dir / name)
    mirror.close(True, held_of(rows))
    gaps = mirror_gaps(mirror, rows)[1]
    if gaps:
        raise MetricsLost("\n".join(gaps))
    return len(rows), where


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m eagle3.runlog.replay", description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("--mirror", choices=get_args(MirrorName), default="wandb")
    parser.add_argument("--online", action="store_true", help="send a W&B run at once; needs WANDB_API_KEY")
    told = parser.parse_args()
    try:
        count, where = replay(told.run_dir, told.mirror, online=told.online)
    except (OSError, ValueError, MetricsLost) as err:
        parser.exit(2, f"error: {err}\n")
    Console().print(f"{count} rows: {where}", soft_wrap=True, highlight=False)


if __name__ == "__main__":
    main()
