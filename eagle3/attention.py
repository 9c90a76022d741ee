"""Attention of the active rows: over the step-0 keys of their document, and over their own keys of later steps.

Step-0 keys and who sees them are the same at every step, so they are one attention call with its log-sum-exp, and the
row's few own keys are merged in:

    out = (exp(lse_0) out_0 + sum_j exp(s_j) v_j) / (exp(lse_0) + sum_j exp(s_j))       s_j: score of own key j

On a GPU the call is flex_attention over blocks of 128 by 128, of which only those that some row sees are computed;
on a CPU it is written out, packed row by packed row.
Legend: B packed rows of T tokens, N = B*T, R active rows, kv key heads, hd head width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from eagle3.precision import at_least_float32, compiled_on_gpu

BLOCK = 128


class Sight(Protocol):
    """Which step-0 keys the active rows of a batch see: made once, used at every step."""

    def attend(
        self, query: Float[Tensor, "R heads hd"], key: Float[Tensor, "N kv hd"], value: Float[Tensor, "N kv hd"]
    ) -> tuple[Float[Tensor, "R heads hd"], Float[Tensor, "R heads"]]:
        """Attention over the keys that are seen, and the log-sum-exp of their scores."""


def sight_of(rows: Int[Tensor, "R"], document: Int[Tensor, "B T"]) -> Sight:
    """Row r (flat, ascending) sees the tokens from the beginning of its document up to itself."""
    first = document_starts(document)[rows]
    if rows.is_cuda and len(rows):
        return BlockSight(first, rows, _block_mask(first, rows, document.numel()))
    return dense_sight(first, rows, document.shape)


def document_starts(document: Int[Tensor, "B T"]) -> Int[Tensor, "N"]:
    """For every token, where its document begins. A document is a run of one number within a packed row."""
    begins = torch.ones_like(document, dtype=torch.bool)
    begins[:, 1:] = document[:, 1:] != document[:, :-1]
    place = torch.arange(document.numel(), device=document.device)
    return torch.where(begins.flatten(), place, 0).cummax(0).values


@dataclass(frozen=True)
class DenseSight:
    """All scores of a packed row at once."""

    packed_row: Int[Tensor, "R"]
    """Which packed row b an active row lies in."""
    slot: Int[Tensor, "R"]
    """Its place among the active rows of that packed row."""
    visible: Bool[Tensor, "B S T"]
    """Which keys slot s of packed row b sees. Empty slots see key 0, so that the softmax stays finite."""

    def attend(
        self, query: Float[Tensor, "R heads hd"], key: Float[Tensor, "N kv hd"], value: Float[Tensor, "N kv hd"]
    ) -> tuple[Float[Tensor, "R heads hd"], Float[Tensor, "R heads"]]:
        batch, slots, _ = self.visible.shape
        key, value = (x.unflatten(0, (batch, -1)) for x in (key, value))
        grouped = query.unflatten(1, (key.shape[2], -1)) * query.shape[-1] ** -0.5
        padded = grouped.new_zeros(batch, slots, *grouped.shape[1:])
        padded[self.packed_row, self.slot] = grouped
        scores = at_least_float32(torch.einsum("bsgmd,btgd->bsgmt", padded, key.to(query.dtype)))
        scores = scores.masked_fill(~self.visible[:, :, None, None], float("-inf"))
        lse = scores.logsumexp(-1)
        mixed = torch.einsum("bsgmt,btgd->bsgmd", scores.softmax(-1).to(value.dtype), value)
        here = (self.packed_row, self.slot)
        return mixed[here].flatten(1, 2), lse[here].flatten(1, 2)


def dense_sight(first: Int[Tensor, "R"], rows: Int[Tensor, "R"], shape: torch.Size) -> DenseSight:
    """The interval first .. row of every row, by packed row."""
    batch, tokens = shape
    packed_row, column = rows // tokens, rows % tokens
    per_row = torch.bincount(packed_row, minlength=batch)
    slot = torch.arange(len(rows), device=rows.device) - (per_row.cumsum(0) - per_row)[packed_row]
    visible = torch.zeros(batch, int(per_row.max()) if len(rows) else 0, tokens, dtype=torch.bool, device=rows.device)
    visible[:, :, 0] = True
    token = torch.arange(tokens, device=rows.device)
    visible[packed_row, slot] = (token >= (first % tokens)[:, None]) & (token <= column[:, None])
    return DenseSight(packed_row, slot, visible)


@dataclass(frozen=True)
class BlockSight:
    """Blocks that no row sees are not computed; blocks that every row sees whole need no mask."""

    first: Int[Tensor, "R"]
    rows: Int[Tensor, "R"]
    blocks: BlockMask

    def attend(
        self, query: Float[Tensor, "R heads hd"], key: Float[Tensor, "N kv hd"], value: Float[Tensor, "N kv hd"]
    ) -> tuple[Float[Tensor, "R heads hd"], Float[Tensor, "R heads"]]:
        query, key, value = (x.to(value.dtype).transpose(0, 1)[None] for x in (query, key, value))
        mixed, lse = _flex(query, key, value, self.blocks)
        return mixed[0].transpose(0, 1), lse[0].transpose(0, 1)


@compiled_on_gpu
def _flex(query: Tensor, key: Tensor, value: Tensor, blocks: BlockMask) -> tuple[Tensor, Tensor]:
    mixed, told = flex_attention(
        query, key, value, block_mask=blocks, enable_gqa=query.shape[1] != key.shape[1], return_aux=AuxRequest(lse=True)
    )
    assert told.lse is not None
    return mixed, told.lse


def _block_mask(first: Int[Tensor, "R"], rows: Int[Tensor, "R"], tokens: int) -> BlockMask:
    """The mask in blocks, from the intervals: a table of all pairs would be quadratic in the tokens."""
    blocks, missing = -(-tokens // BLOCK), -len(rows) % BLOCK
    # What fills the last block up sees no key: it begins behind the place where it ends.
    first = torch.cat([first, first.new_full((missing,), tokens)])
    last = torch.cat([rows, rows.new_full((missing,), -1)])
    lows, highs = first.view(-1, BLOCK), last.view(-1, BLOCK)
    begin = torch.arange(blocks, device=rows.device) * BLOCK
    seen = (begin + BLOCK > lows.amin(1)[:, None]) & (begin <= highs.amax(1)[:, None])
    whole = (begin >= lows.amax(1)[:, None]) & (begin + BLOCK - 1 <= highs.amin(1)[:, None])

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k >= first[q]) & (k <= last[q])

    return BlockMask.from_kv_blocks(
        *_listed(seen & ~whole), *_listed(whole), BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(len(rows), tokens)
    )


def _listed(wanted: Bool[Tensor, "Q K"]) -> tuple[Int[Tensor, "1 1 Q"], Int[Tensor, "1 1 Q K"]]:
    """How many blocks of each row of blocks are wanted, and their numbers before all others."""
    order = wanted.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return wanted.sum(1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]


@compiled_on_gpu
def merge(
    shared: Float[Tensor, "R heads hd"],
    lse: Float[Tensor, "R heads"],
    query: Float[Tensor, "R heads hd"],
    own_keys: Sequence[Float[Tensor, "R kv hd"]],
    own_values: Sequence[Float[Tensor, "R kv hd"]],
) -> Float[Tensor, "R width"]:
    """One softmax over what `Sight.attend` covered and the row's own keys."""
    kv = own_keys[0].shape[1] if own_keys else 1
    grouped = at_least_float32(query).unflatten(1, (kv, -1)) * query.shape[-1] ** -0.5
    logs = [lse, *((grouped * at_least_float32(key)[:, :, None]).sum(-1).flatten(1, 2) for key in own_keys)]
    weights = torch.stack(logs, dim=-1).softmax(-1)
    mixed = at_least_float32(shared) * weights[..., :1]
    for j, value in enumerate(own_values, start=1):
        share = weights[..., j].unflatten(1, (kv, -1))[..., None]
        mixed = mixed + (share * at_least_float32(value)[:, :, None]).flatten(1, 2)
    return mixed.flatten(1).to(shared.dtype)
