"""What a finished training says: the figures of summary.json and the closing table."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import get_console
from rich.text import Text

from eagle3.checkpoints import BEST, Checkpoint
from eagle3.plan import TrainingPlan
from eagle3.runlog import read_ledger
from extract.progress import closing_table, shown_path


def summary_of(
    plan: TrainingPlan, last: Checkpoint, run_dir: Path, charts: Sequence[Path], tracked: str | None
) -> dict[str, Any]:
    """Figures of the best and the last step, from the ledger."""
    val = {row.step: row.values for row in read_ledger(run_dir) if row.split == "val"}
    train = [row for row in read_ledger(run_dir) if row.split == "train"]
    best = val[last.best_step]
    return {
        "drafter_dir": str(run_dir / BEST),
        "accept_len": last.best_accept_len,
        "best_step": last.best_step,
        "steps": last.step,
        "val_loss": best["loss"],
        **{name: value for name, value in best.items() if name.startswith(("acc_", "coverage"))},
        "last_accept_len": last.accept_len,
        "train_loss": train[-1].values["loss"],
        "tokens_per_s": sum(row.values["tokens"] for row in train)
        / sum(row.values["tokens"] / row.values["tokens_per_s"] for row in train),
        "draft_vocab_size": plan.data.vocab.size,
        "coverage": plan.data.vocab.coverage,
        "charts": [str(chart) for chart in charts],
        "tracked": tracked,
    }


def show_summary(summary: dict[str, Any], *, reused: bool, next_command: str) -> None:
    steps = range(len([name for name in summary if name.startswith("acc_") and name[4:].isdigit()]))
    rows = [
        ("drafter", shown_path(summary["drafter_dir"])),
        ("val/accept_len", f"{summary['accept_len']:.3f} at step {summary['best_step']:,} of {summary['steps']:,}"),
        ("val/acc", ", ".join(f"step {k}: {summary[f'acc_{k}']:.1%}" for k in steps)),
        ("loss", f"train {summary['train_loss']:.3f}, validation {summary['val_loss']:.3f}"),
        ("speed", f"{summary['tokens_per_s']:,.0f} tokens/s"),
        *(("chart", shown_path(chart)) for chart in summary["charts"]),
    ]
    if summary["tracked"]:
        get_console().print(Text(f"W&B: {summary['tracked']}"), soft_wrap=True)  # in one piece, to be pasted
    closing_table("The drafter is trained" + (" (reused)" if reused else ""), rows, next_command)
