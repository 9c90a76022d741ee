"""Training-time test (TTT): K draft steps unrolled over the rows that draft, exactly as serving will run them.

Row r attends to the step-0 keys j <= r of its document and, at step k, to its own keys of steps 1..k; queries and
keys of step k are rotated at position pos[r]+k. Gradients flow through all steps. (EAGLE-3, arXiv:2503.01840, 3.2.)

With one decoder layer a row's output feeds only its own chain. So rows outside the active set need no more than
their step-0 keys and values, and everything else runs on the R active rows alone.
Legend: B packed rows of T tokens, N = B*T, R active rows, K steps, A*H captured width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eagle3.drafter import Eagle3Drafter


@dataclass(frozen=True)
class Context:
    """Where the active rows of a batch sit, for attention: computed once and the same for every step."""

    packed_row: Int[Tensor, "R"]
    """Which packed row b an active row lies in."""
    slot: Int[Tensor, "R"]
    """Its place among the active rows of that packed row."""
    visible: Bool[Tensor, "B S T"]
    """Step-0 keys that slot s of packed row b may attend to. Empty slots see key 0, so that softmax stays finite."""


def context(rows: Int[Tensor, "R"], document: Int[Tensor, "B T"]) -> Context:
    """Document-causal visibility of step-0 keys for the active rows (flat, ascending indices)."""
    batch, tokens = document.shape
    packed_row, column = rows // tokens, rows % tokens
    per_row = torch.bincount(packed_row, minlength=batch)
    first = per_row.cumsum(0) - per_row
    slot = torch.arange(len(rows), device=rows.device) - first[packed_row]
    slots = int(per_row.max()) if len(rows) else 0
    visible = torch.zeros(batch, slots, tokens, dtype=torch.bool, device=rows.device)
    visible[:, :, 0] = True
    same = document[packed_row] == document[packed_row, column][:, None]
    causal = torch.arange(tokens, device=rows.device) <= column[:, None]
    visible[packed_row, slot] = same & causal
    return Context(packed_row, slot, visible)


def unroll(
    drafter: Eagle3Drafter,
    aux: Float[Tensor, "N AH"],
    tokens: Int[Tensor, "N"],
    position: Int[Tensor, "N"],
    document: Int[Tensor, "B T"],
    rows: Int[Tensor, "R"],
    index: Int[Tensor, "K R"],
) -> Float[Tensor, "K R H"]:
    """The drafter's state after each of K steps on the active rows, before the final norm.

    `index[k]` says which token of `tokens` each active row reads at step k. At step 0 every row r reads token r+1.
    """
    where = context(rows, document)
    h0 = drafter.fuse(aux)
    e = drafter.embed(tokens)
    # Step-0 keys of all rows. The last row of a document reads a foreign token, but no active row ever sees its key.
    key0, value0 = drafter.key_value(e.roll(-1, 0), h0)
    key0 = drafter.rotate(key0, position)
    batch = document.shape[0]
    key0, value0 = (x.unflatten(0, (batch, -1)) for x in (key0, value0))

    h, states = h0[rows], []
    own_keys: list[Tensor] = []
    own_values: list[Tensor] = []
    for k, reads in enumerate(index):
        e_k, here = e[reads], position[rows] + k
        query = drafter.rotate(drafter.query(e_k, h), here)
        if k > 0:
            key, value = drafter.key_value(e_k, h)
            own_keys.append(drafter.rotate(key, here))
            own_values.append(value)
        attended = attend(query, key0, value0, own_keys, own_values, where)
        state = drafter.finish(h, attended)
        states.append(state)
        h = drafter.feed(state)
    return torch.stack(states)


def attend(
    query: Float[Tensor, "R heads hd"],
    key0: Float[Tensor, "B T kv hd"],
    value0: Float[Tensor, "B T kv hd"],
    own_keys: list[Tensor],
    own_values: list[Tensor],
    where: Context,
) -> Float[Tensor, "R width"]:
    """One softmax over the visible step-0 keys and the row's own keys of earlier steps, [R, kv, hd] each."""
    rows, heads, head_dim = query.shape
    kv_heads = key0.shape[2]
    query = query.unflatten(1, (kv_heads, heads // kv_heads)) * head_dim**-0.5
    batch, slots, _ = where.visible.shape

    padded = query.new_zeros(batch, slots, *query.shape[1:])
    padded[where.packed_row, where.slot] = query
    scores = torch.einsum("bsgmd,btgd->bgmst", padded, key0.to(query.dtype))
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    scores = scores.masked_fill(~where.visible[:, None, None], float("-inf"))
    scores = scores.permute(0, 3, 1, 2, 4)[where.packed_row, where.slot]  # R kv group T
    own = [torch.einsum("rgmd,rgd->rgm", query, key.to(query.dtype)).to(scores.dtype) for key in own_keys]
    weights = torch.cat([scores, *(score[..., None] for score in own)], dim=-1).softmax(dim=-1)

    tokens = value0.shape[1]
    shared = weights.new_zeros(batch, slots, *weights.shape[1:3], tokens)
    shared[where.packed_row, where.slot] = weights[..., :tokens]
    mixed = torch.einsum("bsgmt,btgd->bsgmd", shared.to(value0.dtype), value0)[where.packed_row, where.slot]
    for i, value in enumerate(own_values):
        mixed = mixed + weights[..., tokens + i, None].to(value.dtype) * value[:, :, None]
    return mixed.reshape(rows, heads * head_dim)


def add_noise(aux: Float[Tensor, "B T AH"], std: float, seeds: Sequence[int]) -> Float[Tensor, "B T AH"]:
    """Uniform noise in (-std, std), added in float32 before any cast. `std` 0 draws no random numbers.

    Every packed row has a seed of its own, so that a row gets the same noise on any rank, in any micro-batch and
    after any resume.
    """
    if std == 0.0:
        return aux
    noisy = aux.to(torch.float32, copy=True)
    for row, seed in zip(noisy, seeds, strict=True):
        generator = torch.Generator(aux.device).manual_seed(seed)
        noise = torch.rand(row.shape, generator=generator, device=aux.device)
        row += (2.0 * noise - 1.0) * std
    return noisy
