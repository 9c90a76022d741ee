"""The head and the loss of all TTT steps at once, in chunks, so that no [tokens, D] float32 tensor outlives its chunk.

    loss = sum_k decay^k * sum over M_k of L(teacher, draft) / |M_k|       L: one of eagle3.row_losses

The teacher of row r at step k is the verifier at r+1+k: one teacher row serves up to K students. Pairs (k, r) are
therefore sorted by teacher position, each chunk computes its teachers once, and the gradient is formed on the spot:
forward keeps d loss/d hidden and d loss/d head, backward only scales them.
Legend: P pairs (k, r) in the active sets, K steps, R rows, N tokens, H hidden, D draft vocabulary.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eagle3.row_losses import LOSSES, RowLoss


@dataclass(frozen=True)
class Teacher:
    """The verifier's side of the loss: nothing here takes a gradient."""

    last: Float[Tensor, "N H"]
    """Its final hidden states, after the final norm."""
    lse: Float[Tensor, "N"]
    """Logsumexp of its logits over the full vocabulary."""
    head: Float[Tensor, "D H"]
    """The rows of its head that belong to the draft vocabulary, in draft order."""


class HeadOutput(NamedTuple):
    """What the head says, for every step and active row; inactive pairs hold -1 or 0.

    A tuple, so that whoever wraps a module's forward (FSDP) finds the tensor that takes the gradient.
    """

    loss: Float[Tensor, ""]
    row_loss: Float[Tensor, "K R"]
    draft: Int[Tensor, "K R"]
    """Argmax in the draft vocabulary."""
    alpha: Float[Tensor, "K R"]
    """sum_v min(p_v, q_v), p over the full vocabulary: the chance that sampling accepts the draft."""


def head_and_loss(
    normed: Float[Tensor, "K R H"],
    lm_head: Float[Tensor, "D H"],
    teacher: Teacher,
    index: Int[Tensor, "K R"],
    active: Bool[Tensor, "K R"],
    weight: Float[Tensor, "K R"],
    *,
    loss: str = "soft_ce",
    chunk_pairs: int = 2048,
) -> HeadOutput:
    """Loss, drafts and acceptance of the active pairs.

    `normed` are states after the drafter's final norm; `index` says at which token the teacher of a pair speaks;
    `weight` is decay^k/|M_k| on supervised pairs and 0 elsewhere. `loss.backward()` reaches `normed` and `lm_head`.
    """
    step, row = active.nonzero(as_tuple=True)
    order = index[step, row].argsort(stable=True)
    step, row = step[order], row[order]
    total, row_loss, draft, alpha = _ChunkedHead.apply(
        normed[step, row], lm_head, teacher, index[step, row], weight[step, row], LOSSES[loss], chunk_pairs
    )
    shape = active.shape
    return HeadOutput(
        loss=total,
        row_loss=row_loss.new_zeros(shape).index_put((step, row), row_loss),
        draft=torch.full(shape, -1, dtype=torch.long, device=active.device).index_put((step, row), draft),
        alpha=alpha.new_zeros(shape).index_put((step, row), alpha),
    )


class _ChunkedHead(torch.autograd.Function):
    """(loss, row_loss [P], draft [P], alpha [P]) of pairs sorted by teacher position; only loss has a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        lm_head: Tensor,
        teacher: Teacher,
        speaks_at: Tensor,
        weight: Tensor,
        row_loss_of: RowLoss,
        chunk_pairs: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wants_gradient = any(ctx.needs_input_grad[:2])
        head = lm_head.to(_compute_dtype(hidden))
        teacher_head = teacher.head.to(head.dtype)
        total = _at_least_float32(hidden.new_zeros(()))
        grad_hidden = torch.empty_like(hidden) if wants_gradient else None
        grad_head = torch.zeros_like(lm_head) if wants_gradient else None
        losses, drafts, alphas = [], [], []
        for begin in range(0, len(hidden), chunk_pairs):
            chunk = slice(begin, begin + chunk_pairs)
            student_in = hidden[chunk].to(head.dtype)
            logits = _at_least_float32(student_in @ head.T)
            in_draft, mass = _teacher_probabilities(teacher, teacher_head, speaks_at[chunk])
            row_loss, gradient = row_loss_of(logits, in_draft, mass, weight[chunk])
            total += (row_loss * weight[chunk]).sum()
            losses.append(row_loss)
            drafts.append(logits.argmax(-1))
            alphas.append(torch.minimum(in_draft.mul_(mass[:, None]), logits.softmax(-1)).sum(-1))
            if grad_hidden is not None and grad_head is not None:
                gradient = gradient.to(head.dtype)
                grad_hidden[chunk] = gradient @ head
                grad_head += gradient.T @ student_in
        ctx.save_for_backward(grad_hidden, grad_head)
        outputs = tuple(torch.cat(x) if x else weight.new_zeros(0) for x in (losses, drafts, alphas))
        ctx.mark_non_differentiable(*outputs)
        return total, outputs[0], outputs[1].long(), outputs[2]

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_head = ctx.saved_tensors
        return grad_hidden * grad_total, grad_head * grad_total, None, None, None, None, None


def _teacher_probabilities(
    teacher: Teacher, head: Float[Tensor, "D H"], speaks_at: Int[Tensor, "P"]
) -> tuple[Float[Tensor, "P D"], Float[Tensor, "P"]]:
    """The verifier at each pair: its distribution over the draft vocabulary, and how much of its whole mass that is."""
    positions, back = speaks_at.unique_consecutive(return_inverse=True)
    logits = _at_least_float32(teacher.last[positions].to(head.dtype) @ head.T)
    mass = (logits.logsumexp(-1) - teacher.lse[positions]).exp()
    return logits.softmax(-1)[back], mass[back]


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    """The dtype of matrix products: autocast's where it is on, otherwise the tensor's own."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
