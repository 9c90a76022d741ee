"""Training-time test (TTT): K draft steps unrolled over the rows that draft, exactly as serving will run them.

Row r attends to the step-0 keys j <= r of its document and, at step k, to its own keys of steps 1..k; queries and
keys of step k are rotated at position pos[r]+k. Gradients flow through all steps. (EAGLE-3, arXiv:2503.01840, 3.2.)

With one decoder layer a row's output feeds only its own chain. So rows outside the active set need no more than
their step-0 keys and values, and everything else runs on the R active rows alone.
Legend: B packed rows of T tokens, N = B*T, R active rows, K steps, A*H captured width.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle3.attention import merge, sight_of
from eagle3.drafter import Eagle3Drafter
from eagle3.step import (
    Halves,
    angles_at,
    embedding_halves,
    finish,
    heads_of,
    matrices_of,
    normed_state,
    values_of,
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
    sight, matrices = sight_of(rows, document), matrices_of(drafter)
    own = matrices.state
    h0 = drafter.fuse(aux)
    # Row r holds token r+1, which step 0 reads. The last row of a document holds a foreign one, but no active row ever
    # sees its key.
    half = embedding_halves(drafter.embed(tokens.roll(-1)), matrices)
    x0 = normed_state(drafter, h0)
    key0 = heads_of(drafter, x0, half.key, own.key, angles_at(drafter, position))
    value0 = values_of(drafter, x0, half.value, own.value)

    (h,), (x,), states = take_steps(h0, rows[None]), take_steps(x0, rows[None]), []
    read = Halves(*(take_steps(of_all, (index - 1) % len(tokens)) for of_all in half))
    own_keys: list[Tensor] = []
    own_values: list[Tensor] = []
    for k in range(len(index)):
        angles = angles_at(drafter, position[rows] + k)
        if k > 0:
            x = normed_state(drafter, h)
            own_keys.append(heads_of(drafter, x, read.key[k], own.key, angles))
            own_values.append(values_of(drafter, x, read.value[k], own.value))
        query = heads_of(drafter, x, read.query[k], own.query, angles)
        shared, lse = sight.attend(query, key0, value0)
        attended = merge(shared, lse, query, own_keys, own_values) if own_keys else shared.flatten(1)
        state = finish(drafter, h, attended, matrices)
        states.append(state)
        h = drafter.feed(state)
    return states


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
        noise = torch.rand(row.shape, generator=generator, device=aux.device)
        out.copy_(noise.mul_(2.0 * std).sub_(std).add_(row))
    return noisy
