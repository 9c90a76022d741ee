"""Two stores of the same text, held against each other: `python -m extract.compare DIR REFERENCE`.

Two engines never agree to the last bit; bf16 rounds each layer's output to 8 bits. This says how far apart they are,
layer by layer, and how often the verifier's next token is another one.
"""

import argparse
import logging
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from rich import box, get_console
from rich.table import Table
from torch import Tensor

from extract.store import Store, open_store

log = logging.getLogger(__name__)

NAMES = ("aux", "last", "top1")
MUST_AGREE = ("capture_layers", "hidden_size", "last")


@dataclass(frozen=True)
class Difference:
    """Of one kind of state over all tokens that two stores share: ‖a - b‖ / ‖b‖ of a token, b the reference."""

    state: str
    median: float
    p99: float
    max: float


@dataclass(frozen=True)
class Comparison:
    samples: int
    tokens: int
    only_here: int
    """Samples that the reference lacks, or has with other token ids; none of their states are compared."""
    differences: tuple[Difference, ...]
    top1_agreement: float
    """Share of tokens after which both stores' verifiers say the same next token."""


def compare(store: Store, reference: Store) -> Comparison:
    """Compares what both have by sample id. ValueError if they captured other things, or share no sample."""
    for key in MUST_AGREE:
        if store.manifest[key] != reference.manifest[key]:
            raise ValueError(
                f"{key} is {store.manifest[key]} in {store.path} and {reference.manifest[key]} in {reference.path}: "
                "their states are not of the same kind"
            )
    theirs = {ref.id: ref for ref in reference.samples}
    shared = [(ref, theirs[ref.id]) for ref in store.samples if ref.id in theirs]
    pairs = [(a, b) for a, b in shared if torch.equal(store.ids_and_masks(a)[0], reference.ids_and_masks(b)[0])]
    if not pairs:
        raise ValueError(f"{store.path} and {reference.path} share no sample with the same tokens")
    rows = [_of_sample(store.read(a, NAMES), reference.read(b, NAMES), store.manifest) for a, b in pairs]
    distances = torch.cat([distance for distance, _ in rows])
    same = torch.cat([agreed for _, agreed in rows])
    names = [*(f"layer {k}" for k in store.manifest["capture_layers"]), "last"]
    return Comparison(
        len(pairs), len(same), len(store.samples) - len(pairs),
        tuple(_summed_up(name, column) for name, column in zip(names, distances.T, strict=True)),
        same.float().mean().item(),
    )  # fmt: skip


def _of_sample(a: dict[str, Tensor], b: dict[str, Tensor], manifest: dict) -> tuple[Float[Tensor, "T states"], Tensor]:
    """Relative distance of every token's captured layers and `last`, and whether top-1 is the same."""
    width = manifest["hidden_size"]
    kinds: Iterator[tuple[Tensor, Tensor]] = zip(
        (*a["aux"].split(width, dim=1), a["last"]), (*b["aux"].split(width, dim=1), b["last"]), strict=True
    )
    columns = [(x.float() - y.float()).norm(dim=1) / y.float().norm(dim=1) for x, y in kinds]
    columns = [column.nan_to_num(0.0, posinf=math.inf) for column in columns]  # 0 / 0: both are zero
    return torch.stack(columns, dim=1), a["top1"] == b["top1"]


def _summed_up(name: str, distances: Float[Tensor, " T"]) -> Difference:
    ordered = distances.sort().values  # torch.quantile takes 16 M values at most
    return Difference(name, *(ordered[int(share * (len(ordered) - 1))].item() for share in (0.5, 0.99, 1.0)))


def show(found: Comparison, store: Path, reference: Path) -> None:
    table = Table("state", "median", "99 %", "max", title=f"{store} against {reference}", box=box.SIMPLE)
    for row in found.differences:
        table.add_row(row.state, f"{row.median:.2e}", f"{row.p99:.2e}", f"{row.max:.2e}")
    console = get_console()
    console.print(table)
    left_out = f"; {found.only_here} samples are not in both" if found.only_here else ""
    console.print(
        f"{found.tokens:,} tokens of {found.samples} samples, distance of a token over its length; "
        f"the same next token after {found.top1_agreement:.2%}{left_out}"
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m extract.compare", description="How far two stores are apart.")
    parser.add_argument("dir", type=Path)
    parser.add_argument("reference", type=Path)
    asked = parser.parse_args(arguments)
    try:
        both = [open_store(path, need_teacher=True) for path in (asked.dir, asked.reference)]
        show(compare(*both), asked.dir, asked.reference)
    except ValueError as error:
        logging.basicConfig(format="%(message)s")
        log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
