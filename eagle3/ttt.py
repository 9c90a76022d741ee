"""Training-time test (TTT): K draft steps unrolled over the rows that draft, exactly as serving will run them.

Row r attends to the step-0 keys j <= r of its document and, at step k, to its own keys of steps 1..k; queries and
keys of step k are rotated at position pos[r]+k. Gradients flow through all steps. (EAGLE-3, arXiv:2503.01840, 3.2.)

With one decoder layer a row's output feeds only its own chain. So rows outside the active set need no more than
their step-0 keys and values, and everything else runs on the R active rows alone.
Legend: B packed rows of T tokens, N = B*T, R active rows, K steps, A*H captured width,
Q queries, keys and values together.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle3.attention import merge, sight_of
from eagle3.drafter import Eagle3Drafter
from eagle3.precision import compiled_on_gpu
from eagle3.step import (
    all_of,
    angles_at,
    embedding_half,
    finish,
    heads_of,
    keys_and_values_of,
    matrices_of,
    normed_state,
    queries_of,
)
from eagle3.take import take_steps


def unroll(
    drafter: Eagle3Drafter,
    aux: Float[Tensor, "N AH"],
    tokens: Int[Tensor, "N"],
    position: Int[Tensor, "N"],
    document: Int[Tensor, "B T"],
    rows: Int[Tensor, "R"],
    index: Int[Tensor, "K R"],
) -> list[Float[Tensor, "R H"]]:
    """The drafter's state after each of K steps on the active rows, before the final norm.

    `index[k]` says which token of `tokens` each active row reads at step k. At step 0 every row r reads token r+1.
    """
    sight, matrices, shape = sight_of(rows, document), matrices_of(drafter), drafter.shape
    h0 = drafter.fuse(aux)
    # Row r holds token r+1, which step 0 reads. The last row of a document holds a foreign one, but no active row ever
    # sees its key.
    half = embedding_half(drafter, tokens.roll(-1), matrices)
    x0, angles = normed_state(drafter, h0), angles_at(drafter, position)
    # A copy: what heads are made of is used up, and later steps read it too.
    part = keys_and_values_of(shape)
    _, key0, value0 = heads_of(x0, half[:, part.rows].clone(), part, matrices, angles)
    (h,), (x,), states = take_steps(h0, rows[None]), take_steps(x0, rows[None]), []
    read = _read(half, queries_of(shape).rows, (index - 1) % len(tokens))
    own_keys: list[Tensor] = []
    own_values: list[Tensor] = []
    for k in range(len(index)):
        angles = angles_at(drafter, position[rows] + k)
        if k == 0:
            query, _, _ = heads_of(x, read.pop(0), queries_of(shape), matrices, angles)
        else:
            query, key, value = heads_of(normed_state(drafter, h), read.pop(0), all_of(shape), matrices, angles)
            own_keys.append(key)
            own_values.append(value)
        shared, lse = sight.attend(query, key0, value0)
        attended = merge(shared, lse, query, own_keys, own_values) if own_keys else shared.flatten(1)
        state = finish(drafter, h, attended, matrices)
        states.append(state)
        h = drafter.feed(state)
    return states


def _read(half: Float[Tensor, "N Q"], queries: slice, places: Int[Tensor, "K R"]) -> list[Tensor]:
    """What each step reads of the tokens: step 0 queries alone, for its keys and values are those of all rows."""
    later = take_steps(half, places[1:]) if len(places) > 1 else ()
    return [*take_steps(half[:, queries], places[:1]), *later]


def add_noise(
    aux: Float[Tensor, "B T AH"], std: float, seeds: Sequence[int], dtype: torch.dtype = torch.float32
) -> Float[Tensor, "B T AH"]:
    """Uniform noise in (-std, std), added in float32 before the cast to `dtype`. `std` 0 draws no random numbers.

    Every packed row has a seed of its own, so that a row gets the same noise on any rank, in any micro-batch and
    after any resume.
    """
    if std == 0.0:
        return aux
    noisy = torch.empty_like(aux, dtype=dtype)
    for row, out, seed in zip(aux, noisy, seeds, strict=True):
        generator = torch.Generator(aux.device).manual_seed(seed)
        _add_scaled(torch.rand(row.shape, generator=generator, device=aux.device), std, row, out)
    return noisy


@compiled_on_gpu
def _add_scaled(noise: Tensor, std: float, row: Tensor, out: Tensor) -> None:
    out.copy_(noise * (2.0 * std) - std + row)
