"""What a training moves and what it leaves alone: every tensor of the drafter, and what it borrows of the verifier."""

from dataclasses import dataclass

from jaxtyping import Float
from rich import box, get_console
from rich.table import Table
from torch import Tensor

from eagle3.drafter import Eagle3Drafter
from extract.progress import TABLE_WIDTH


@dataclass(frozen=True)
class Weight:
    name: str
    shape: tuple[int, ...]
    numbers: int
    trained: bool


def weights_of(drafter: Eagle3Drafter, teacher_head: Float[Tensor, "D H"]) -> list[Weight]:
    """Trained ones first, in the order of the network."""
    named = [*drafter.named_parameters(), *((name, getattr(drafter, name)) for name in ("d2t", "t2d", "embedding"))]
    named.append(("teacher_head", teacher_head))
    found = [Weight(name, tuple(x.shape), x.numel(), x.requires_grad) for name, x in named]
    return sorted(found, key=lambda weight: not weight.trained)


def show_weights(drafter: Eagle3Drafter, teacher_head: Float[Tensor, "D H"]) -> None:
    """Prints name, shape, trained or frozen and count of each, in at most 80 columns."""
    found, console = weights_of(drafter, teacher_head), get_console()
    trained, frozen = (sum(w.numbers for w in found if w.trained is kind) for kind in (True, False))
    title = f"Weights: {trained:,} trained, {frozen:,} frozen"
    table = Table("tensor", "shape", "", title=title, title_justify="left", box=box.ROUNDED)
    table.add_column("numbers", justify="right")
    for weight in found:
        shape = " x ".join(f"{size:,}" for size in weight.shape)
        table.add_row(weight.name, shape, "trained" if weight.trained else "frozen", f"{weight.numbers:,}")
    console.print(table, width=min(TABLE_WIDTH, console.width))
