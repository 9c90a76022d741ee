"""From a store to batches: packed rows read through the memory map straight into the batch, in workers.

Nothing here touches CUDA. Legend: B rows, T tokens of a row, A captured layers, H verifier hidden size,
V verifier vocabulary, P packs, K TTT steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from jaxtyping import Bool, Int, Int64
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from eagle3.packing import Pack
from eagle3.rows import RowPlan
from eagle3.sampler import EMPTY_ROW, MicroBatch, StepSampler
from extract.store import Store

Batch = dict[str, Tensor | int]

SMALL = ("input_ids", "loss_mask", "top1")
"""Stored tensors that decide which rows are supervised."""
STORED = (*SMALL, "lse", "aux", "last")
"""All stored tensors of a row."""
DTYPES = {
    "input_ids": torch.int64,
    "loss_mask": torch.bool,
    "top1": torch.int64,
    "lse": torch.float32,
    "document": torch.int32,
    "position": torch.int64,
    "greedy": torch.bool,
}
"""Dtypes in a batch; aux and last keep that of the store."""
PADDING = {"document": -1}
"""Value of a padding token where it is not 0."""


CountRows = Callable[..., tuple[Int[Tensor, "B K"], Int[Tensor, "B K"]]]
"""|A_k| and |M_k| of every row of a batch, as eagle3.supervision.row_counts says them."""


@dataclass(frozen=True)
class RowCounts:
    """|A_k| and |M_k| of every pack."""

    active: Int64[Tensor, "P K"]
    supervised: Int64[Tensor, "P K"]


class PackedStore(Dataset[Batch]):
    """Packed rows of a store, read by the micro-batch.

    A row of T = row_tokens tokens holds input_ids [T] int64, loss_mask [T] bool, document [T] int32 (numbers
    the pieces from 0; -1 is padding), position [T] int64 (from 0 in each piece), greedy [T] bool (temperature
    0), aux [T, A*H] and last [T, H] in the store's dtype, top1 [T] int64 and lse [T] float32.
    """

    def __init__(self, store: Store, plan: RowPlan) -> None:
        """ValueError if the store's teacher pass has not finished."""
        if not store.has_teacher:
            raise ValueError(f"{store.path}: the teacher pass has not finished; run extract.py again as before")
        self.store = store
        self.plan = plan

    def __len__(self) -> int:
        return len(self.plan.packs)

    def __getitem__(self, micro: MicroBatch) -> Batch:
        """One micro-batch: its rows as [B, T, …], their indices `rows` [B], and two figures of its step.

        `step` is the optimizer step (int), `supervised_total` [K] int64 is |M_k| of the whole step.
        """
        batch: Batch = dict(self.read(micro.rows))
        batch["rows"] = torch.tensor(micro.rows)
        batch["supervised_total"] = torch.tensor(micro.supervised_total)
        batch["step"] = micro.step
        return batch

    def read(self, rows: Sequence[int], names: Sequence[str] = STORED) -> dict[str, Tensor]:
        """These rows as [B, T, …] tensors (EMPTY_ROW: padding); ValueError names a sample with NaN or inf."""
        batch = self._blank(len(rows), names)
        for index, row in enumerate(rows):
            assert row == EMPTY_ROW or 0 <= row < len(self)
            pack = () if row == EMPTY_ROW else self.plan.packs[row]
            self._fill({name: tensor[index] for name, tensor in batch.items()}, pack, names)
        return batch

    def _blank(self, num_rows: int, names: Sequence[str]) -> dict[str, Tensor]:
        """Unfilled tensors."""
        manifest = self.store.manifest
        hidden = manifest["hidden_size"]
        widths = {"aux": (len(manifest["capture_layers"]) * hidden,), "last": (hidden,)}
        states = getattr(torch, manifest["dtype"])
        return {
            name: _empty((num_rows, self.plan.row_tokens, *widths.get(name, ())), DTYPES.get(name, states))
            for name in (*names, "document", "position", "greedy")
        }

    def _fill(self, row: dict[str, Tensor], pack: Pack, names: Sequence[str]) -> None:
        end = 0
        for document, piece in enumerate(pack):
            ref = self.plan.refs[piece.sample]
            start, end = end, end + piece.tokens
            stored = self.store.read((ref.shard, ref.start + piece.start, ref.start + piece.stop), names)
            for name, tensor in stored.items():
                if tensor.is_floating_point():
                    _check_finite(tensor, name, ref.id, self.store.path)
                row[name][start:end] = tensor
            row["document"][start:end] = document
            row["position"][start:end] = torch.arange(piece.tokens)
            row["greedy"][start:end] = ref.temperature == 0
        for name, tensor in row.items():
            tensor[end:] = PADDING.get(name, 0)


def count_rows(
    dataset: PackedStore,
    count: CountRows,
    in_draft_vocab: Bool[Tensor, "V"],
    ttt_steps: int,
    rows_at_once: int = 16,
) -> RowCounts:
    """|A_k| and |M_k| of every pack, from small tensors only; they give the loss denominators of any step."""
    active, supervised = [], []
    for start in range(0, len(dataset), rows_at_once):
        batch = dataset.read(range(start, min(start + rows_at_once, len(dataset))), SMALL)
        of_a, of_m = count(
            input_ids=batch["input_ids"],
            loss_mask=batch["loss_mask"],
            document=batch["document"],
            top1=batch["top1"],
            in_draft_vocab=in_draft_vocab,
            ttt_steps=ttt_steps,
        )
        active.append(of_a)
        supervised.append(of_m)
    return RowCounts(torch.cat(active).to(torch.int64), torch.cat(supervised).to(torch.int64))


def loader(
    dataset: PackedStore,
    sampler: StepSampler,
    *,
    num_workers: int,
    pin_memory: bool,
    prefetch_factor: int = 2,
) -> DataLoader[Batch]:
    """Batches in the sampler's order, the same for any number of workers; 0 reads in this process.

    `pin_memory` only where the batches go to a GPU.
    """
    return DataLoader(
        dataset,
        sampler=sampler,
        batch_size=None,  # an item is a micro-batch: its rows are read into one tensor and never collated
        num_workers=num_workers,
        pin_memory=pin_memory,
        prefetch_factor=prefetch_factor if num_workers else None,  # without workers torch refuses it
        persistent_workers=num_workers > 0,
    )


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """In a worker the memory is shared from the start, or the batch would be copied on its way out."""
    if get_worker_info() is None:
        return torch.empty(shape, dtype=dtype)
    storage = torch.UntypedStorage._new_shared(prod(shape) * dtype.itemsize)
    return torch.empty(0, dtype=dtype).set_(storage, 0, shape)  # type: ignore[call-overload]


def _check_finite(tensor: Tensor, name: str, sample: str, path: Path) -> None:
    # aminmax takes less time than the copy that follows, isfinite on every value thirty times as much.
    lowest, highest = torch.aminmax(tensor)
    if not bool(torch.isfinite(lowest) & torch.isfinite(highest)):
        token = int((~torch.isfinite(tensor)).nonzero()[0, 0])
        raise ValueError(
            f"sample {sample} has NaN or infinite values in `{name}`, from token {token} of the piece read: "
            f"check the store with python -m extract.store verify {path}"
        )
