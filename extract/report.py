"""What extract.py shows: the plan before the work, one sample with its mask, and the closing table."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import get_console
from rich.panel import Panel
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from extract.chat import mask_preview
from extract.pipeline import CapturePlan, StageFigures
from extract.progress import closing_table
from extract.prompts import Skipped
from extract.store_space import free_bytes, size_text


def show_prompts_plan(store: Path, *, conversations: int, skipped: int, turns: int, known: int, at_most: int) -> None:
    """Before anything is generated: what will be asked, and the most that it can write."""
    closing_table(
        "Plan",
        [
            ("prompts", f"{conversations:,} conversations, {skipped:,} skipped"),
            ("answers", f"{turns:,} turns, {known:,} of them in the journal already"),
            ("writes", f"at most {size_text(at_most)} to {store}, {size_text(free_bytes(store))} free"),
        ],
        None,
    )


def show_commands(commands: Sequence[str]) -> None:
    """The servers that would be started, as they can be pasted."""
    for command in commands:
        get_console().print(Text(command), soft_wrap=True)


def show_capture_plan(
    store: Path,
    plan: CapturePlan,
    unanswered: Sequence[Skipped],
    tokenizer: PreTrainedTokenizerBase,
    *,
    needed: int,
    layers: tuple[int, ...],
) -> None:
    """Before the capture: exact counts, and one sample in colour."""
    samples = f"{len(plan.ids):,} from {plan.conversations:,} conversations"
    if left_out := [*unanswered, *plan.skipped]:
        samples += f"; {len(left_out):,} left out, first {left_out[0].id}: {left_out[0].reason}"
    closing_table(
        "Capture",
        [
            ("samples", samples),
            ("tokens", f"{plan.tokens:,}, longest sample {plan.longest:,}"),
            ("supervised", f"{plan.supervised:,} tokens, {plan.supervised / plan.tokens:.0%}"),
            ("layers", f"{', '.join(map(str, layers))} and the final state"),
            ("writes", f"{size_text(needed)} to {store}, {size_text(free_bytes(store))} free"),
        ],
        None,
    )
    console = get_console()
    plain = console.color_system is None
    text = mask_preview(plan.preview, tokenizer, max_tokens=160, brackets=plain)
    title = f"sample {plan.preview.id}: {'⟦ ⟧' if plain else 'green'} is supervised"
    console.print(Panel(text, title=title, title_align="left"), width=min(80, console.width))


def summary_of(store: Path, manifest: dict[str, Any], stages: dict[str, StageFigures]) -> dict[str, Any]:
    """Figures of summary.json; the rates are of this run alone."""
    size = sum(file.stat().st_size for file in (store / "shards").iterdir())
    figures: dict[str, Any] = {"store": str(store), "bytes": size, **manifest["counts"]}
    if "servers" in (probes := manifest.get("probes", {})):  # several captured
        figures |= {key: probes[key] for key in ("servers", "servers_lost")}
    for name, stage in stages.items():
        figures[f"{name}_seconds"] = round(stage.seconds, 2)
        figures[f"{name}_start_s"] = round(stage.start_s, 2)
        figures[f"{name}_reused"] = stage.reused
        if stage.tokens_per_s is not None:
            figures[f"{name}_tokens_per_s"] = round(stage.tokens_per_s, 1)
    return figures


def show_summary(figures: dict[str, Any], *, reused: bool, next_command: str) -> None:
    rows = [
        ("store", figures["store"]),
        ("samples", f"{figures['samples']:,}, {figures['quarantined']:,} quarantined"),
        ("tokens", f"{figures['tokens']:,}, {figures['supervised']:,} supervised"),
        ("size", size_text(figures["bytes"])),
    ]
    if "servers" in figures:
        rows.append(("servers", f"{figures['servers']}, {figures['servers_lost']} of them lost"))
    for name in ("respond", "capture", "teacher"):
        if f"{name}_tokens_per_s" in figures:
            speed = f"{figures[f'{name}_tokens_per_s']:,.0f} tokens/s, {figures[f'{name}_seconds']:.1f} s"
            start_s = figures[f"{name}_start_s"]
            rows.append((name, speed + (f"; the engine started in {start_s:.1f} s" if start_s >= 0.1 else "")))
        else:
            rows.append((name, "done by an earlier run"))
    closing_table("Hidden states are ready" + (" (reused)" if reused else ""), rows, next_command)
