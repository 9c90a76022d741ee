"""Which rows of a packed batch draft, which are supervised, and against what: the only place that decides.

Legend: B packed rows of T tokens, N = B*T flat tokens, R active rows, K TTT steps, k a step, x the token ids.
At step k, row r reads token x[r+1+k] (the true one) and predicts x[r+2+k]; the teacher is the verifier at r+1+k.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True)
class Supervision:
    """Row sets of one micro-batch. All indices are flat, into the N = B*T tokens of the batch."""

    rows: Int[Tensor, "R"]
    """A_0, ascending: the rows that draft at all."""
    index: Int[Tensor, "K R"]
    """r+1+k: the token read at step k, and the position at which the teacher speaks."""
    active: Bool[Tensor, "K R"]
    """A_k: x[r+1] … x[r+2+k] lie in one document and were all written by the assistant. A_{k+1} is part of A_k."""
    supervised: Bool[Tensor, "K R"]
    """M_k: A_k where the verifier's top-1 at r+1+k can be drafted. The loss sums over these."""
    target: Int[Tensor, "K R"]
    """x[r+2+k], the true next token."""
    top1: Int[Tensor, "K R"]
    """The verifier's argmax at r+1+k, over its full vocabulary."""


def supervise(
    input_ids: Int[Tensor, "B T"],
    loss_mask: Bool[Tensor, "B T"],
    document: Int[Tensor, "B T"],
    top1: Int[Tensor, "B T"],
    in_draft_vocab: Bool[Tensor, "V"],
    ttt_steps: int,
) -> Supervision:
    """Row sets by the rules of serving: the first draft after a prompt is in, the token after end-of-turn is not.

    `document` numbers the documents of a packed row, -1 is padding; neighbours of equal number must be one document.
    """
    written = _span_left(loss_mask & (document >= 0), document, ttt_steps + 2)
    active_bt = torch.stack([written >= k + 2 for k in range(ttt_steps)])
    # `written` counts assistant tokens from r+1 on, so that A_k asks for k+2 of them: x[r+1] … x[r+2+k].
    rows = active_bt[0].flatten().nonzero().squeeze(1)
    active = active_bt.flatten(1)[:, rows]

    offsets = torch.arange(ttt_steps, device=rows.device)[:, None]
    last_token = input_ids.numel() - 1
    index = (rows + 1 + offsets).clamp(max=last_token)
    top1_at = top1.flatten()[index]
    return Supervision(
        rows=rows,
        index=index,
        active=active,
        supervised=active & in_draft_vocab[top1_at],
        target=input_ids.flatten()[(index + 1).clamp(max=last_token)],
        top1=top1_at,
    )


def _span_left(assistant: Bool[Tensor, "B T"], document: Int[Tensor, "B T"], limit: int) -> Int[Tensor, "B T"]:
    """How many tokens from r+1 on the assistant wrote without a gap, in r's own document; counted up to `limit`."""
    rows, tokens = assistant.shape
    count = torch.zeros(rows, tokens, dtype=torch.long, device=assistant.device)
    unbroken = torch.ones_like(assistant)
    for ahead in range(1, min(limit, tokens - 1) + 1):
        here = torch.zeros_like(assistant)
        here[:, :-ahead] = assistant[:, ahead:] & (document[:, ahead:] == document[:, :-ahead])
        unbroken = unbroken & here
        count += unbroken
    return count


def row_counts(
    input_ids: Int[Tensor, "B T"],
    loss_mask: Bool[Tensor, "B T"],
    document: Int[Tensor, "B T"],
    top1: Int[Tensor, "B T"],
    in_draft_vocab: Bool[Tensor, "V"],
    ttt_steps: int,
) -> tuple[Int[Tensor, "B K"], Int[Tensor, "B K"]]:
    """|A_k| and |M_k| of every packed row. Summed over a whole optimizer step they are the loss's denominators."""
    plan = supervise(input_ids, loss_mask, document, top1, in_draft_vocab, ttt_steps)
    packed_row = plan.rows // input_ids.shape[1]
    counts = []
    for mask in (plan.active, plan.supervised):
        total = torch.zeros(ttt_steps, input_ids.shape[0], dtype=torch.long, device=input_ids.device)
        counts.append(total.index_add_(1, packed_row, mask.long()).T)
    return counts[0], counts[1]
