"""The order of training: whole optimizer steps, the same for any number of processes and micro-batches.

The packs are permuted once an epoch and cut into steps of `rows_per_step`; only inside a step are rows dealt
to ranks and micro-batches. Which packs make up step s is a pure function of (packs, rows_per_step, seed, s):
a resume needs nothing but the step, and the loss denominators of a step are known before its first backward.
"""

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Int64
from torch import Tensor
from torch.utils.data import Sampler

EMPTY_ROW = -1
"""Index of a row that is padding only: it fills up short steps, so that all ranks run equally often."""


class MicroBatch(NamedTuple):
    """What one rank runs forward at once: indices of packs, and what the loss must know of the whole step."""

    step: int
    """Optimizer step, from 0 over the whole run."""
    rows: tuple[int, ...]
    """Pack indices; EMPTY_ROW for padding."""
    supervised_total: tuple[int, ...]
    """|M_k| for k = 0..K-1 over all ranks and micro-batches of the step."""


class StepSampler(Sampler[MicroBatch]):
    """Micro-batches of one rank for the rest of the run, all epochs in one iteration.

    One iteration runs over epoch borders: there is no set_epoch to forget, and no iterator that was made too
    early. Give it to a DataLoader as `sampler` with `batch_size=None`, and keep Lightning from replacing it
    (`use_distributed_sampler=False`). Every step has exactly `micro_batches` micro-batches on every rank.
    """

    def __init__(
        self,
        supervised: Int64[Tensor, "P K"],
        *,
        rows_per_step: int,
        micro_rows: int,
        epochs: int,
        seed: int | None,
        world_size: int = 1,
        rank: int = 0,
    ) -> None:
        """`supervised` has |M_k| of every pack; `seed` None keeps the packs in order."""
        _check_sizes(len(supervised), rows_per_step, micro_rows, epochs, world_size, rank)
        self.supervised = supervised
        self.num_packs = len(supervised)
        self.rows_per_step, self.micro_rows, self.epochs, self.seed = rows_per_step, micro_rows, epochs, seed
        self.world_size, self.rank = world_size, rank
        self.micro_batches = -(-rows_per_step // (world_size * micro_rows))
        self.steps_per_epoch = -(-self.num_packs // rows_per_step)
        self.total_steps = self.steps_per_epoch * epochs
        self.start = 0

    @classmethod
    def whole(
        cls, supervised: Int64[Tensor, "P K"], *, micro_rows: int, world_size: int = 1, rank: int = 0
    ) -> "StepSampler":
        """One step that holds every pack once, in order: a pass over a validation split."""
        return cls(
            supervised,
            rows_per_step=max(1, len(supervised)),
            micro_rows=micro_rows,
            epochs=1,
            seed=None,
            world_size=world_size,
            rank=rank,
        )

    def set_start(self, step: int) -> None:
        """The next iteration begins with optimizer step `step`, wherever in an epoch that is."""
        if not 0 <= step <= self.total_steps:
            raise ValueError(f"cannot start at step {step}: the run has {self.total_steps} optimizer steps")
        self.start = step

    def step_rows(self, step: int) -> tuple[int, ...]:
        """The packs of one optimizer step, of all ranks together; the last step of an epoch may be short."""
        assert 0 <= step < self.total_steps
        epoch, within = divmod(step, self.steps_per_epoch)
        order = _epoch_order(self.num_packs, self.seed, epoch)
        return order[within * self.rows_per_step : (within + 1) * self.rows_per_step]

    def micro_batches_of(self, step: int) -> list[MicroBatch]:
        """This rank's share of one step: rows are dealt out like cards, so ranks differ by one at most."""
        rows = self.step_rows(step)
        total = tuple(self.supervised[list(rows)].sum(dim=0).tolist())
        mine = rows[self.rank :: self.world_size]
        mine += (EMPTY_ROW,) * (self.micro_batches * self.micro_rows - len(mine))
        starts = range(0, len(mine), self.micro_rows)
        return [MicroBatch(step, mine[start : start + self.micro_rows], total) for start in starts]

    def __iter__(self) -> Iterator[MicroBatch]:
        for step in range(self.start, self.total_steps):
            yield from self.micro_batches_of(step)

    def __len__(self) -> int:
        """Micro-batches of the whole run; those before `set_start` count, as in Lightning's own counters."""
        return self.total_steps * self.micro_batches


@lru_cache(maxsize=2)
def _epoch_order(num_packs: int, seed: int | None, epoch: int) -> tuple[int, ...]:
    if seed is None:
        return tuple(range(num_packs))
    digest = hashlib.sha256(f"{seed} {epoch}".encode()).digest()  # unlike seed + epoch, never meets another run
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
    return tuple(torch.randperm(num_packs, generator=generator).tolist())


def _check_sizes(num_packs: int, rows_per_step: int, micro_rows: int, epochs: int, world_size: int, rank: int) -> None:
    if num_packs < 1:
        raise ValueError("there is no row to train on: the split has no sample with supervised tokens")
    sizes = {
        "rows_per_step": rows_per_step,
        "micro_rows": micro_rows,
        "epochs": epochs,
        "world_size": world_size,
    }
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} is {value}: it must be at least 1")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is outside 0..{world_size - 1}")
