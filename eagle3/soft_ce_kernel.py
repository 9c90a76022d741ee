"""Soft cross-entropy of one chunk on a GPU in two readings of its logits: `eagle3.loss` has the same in plain terms.

A program takes one pair: first the maximum, the sum of exponentials and the argmax of its logits; then loss, alpha and
gradient, which takes the logits' place. Exponentials and sums are float32.
Legend: P pairs (k, r), U teachers, D draft vocabulary.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

BLOCK = 2048
WARPS = 4
"""Fastest of seven shapes for 32,000 columns on an H200: 0.51 ms for 8192 pairs, of 0.24 that their bytes take."""


def judged_in_place(
    logits: Float[Tensor, "P D"],
    spoken: Float[Tensor, "U D"],
    speaker: Int[Tensor, "P"],
    within: Float[Tensor, "U"],
    mass: Float[Tensor, "U"],
    weight: Float[Tensor, "P"],
) -> tuple[Float[Tensor, "P"], Float[Tensor, "P D"], Int[Tensor, "P"], Float[Tensor, "P"]]:
    """Loss, weight times its gradient, draft and alpha of each pair; the gradient is written over `logits`.

    `within` is the log-sum-exp of a teacher's logits, `mass` the share of the verifier's whole vocabulary in them.
    """
    pairs, width = logits.shape
    assert logits.is_contiguous() and spoken.is_contiguous() and spoken.shape[1] == width
    row_loss, alpha = (torch.empty(pairs, dtype=torch.float32, device=logits.device) for _ in range(2))
    draft = torch.empty(pairs, dtype=torch.long, device=logits.device)
    block = min(BLOCK, triton.next_power_of_2(width))
    _judged_row[(pairs,)](
        logits, spoken, speaker, within, mass, weight, row_loss, draft, alpha, width, BLOCK=block, num_warps=WARPS
    )
    return row_loss, logits, draft, alpha


@triton.jit
def _judged_row(  # type: ignore[no-untyped-def]
    logits, spoken, speaker, within, mass, weight, row_loss, draft, alpha, width, BLOCK: tl.constexpr
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    who = tl.load(speaker + pair)
    own, its = logits + pair * width, spoken + who * width
    column = tl.arange(0, BLOCK)

    top, total, best = float("-inf"), 0.0, 0
    for begin in range(0, width, BLOCK):
        there = begin + column
        s = tl.load(own + there, mask=there < width, other=float("-inf")).to(tl.float32)
        high, place = tl.max(s, axis=0, return_indices=True)
        best = tl.where(high > top, begin + place, best)
        above = tl.maximum(top, high)
        total = total * tl.exp(top - above) + tl.sum(tl.exp(s - above), axis=0)
        top = above
    log_z = top + tl.log(total)

    log_sum, share, factor = tl.load(within + who), tl.load(mass + who), tl.load(weight + pair)
    dot, overlap = 0.0, 0.0
    for begin in range(0, width, BLOCK):
        there = begin + column
        inside = there < width
        s = tl.load(own + there, mask=inside, other=0.0).to(tl.float32)
        t = tl.load(its + there, mask=inside, other=float("-inf")).to(tl.float32)
        p = tl.exp(t - log_sum)
        q = tl.exp(s - log_z)
        dot += tl.sum(p * s, axis=0)
        overlap += tl.sum(tl.minimum(p * share, q), axis=0)
        tl.store(own + there, (factor * (q - p)).to(logits.dtype.element_ty), mask=inside)

    tl.store(row_loss + pair, log_z - dot)
    tl.store(draft + pair, best)
    tl.store(alpha + pair, overlap)
