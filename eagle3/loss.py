"""The head and the loss of all TTT steps at once, in chunks, so that no [tokens, D] float32 tensor outlives its chunk.

    loss = sum_k decay^k * sum over M_k of L(teacher, draft) / |M_k|       L: one of eagle3.row_losses

The teacher of row r at step k is the verifier at r+1+k: one teacher row serves up to K students. Pairs (k, r) are
therefore sorted by teacher position, each chunk computes its teachers once, and the gradient is formed on the spot:
forward keeps d loss/d hidden and d loss/d head, backward only scales them.
Legend: P pairs (k, r) in the active sets, K steps, R rows, N tokens, H hidden, D draft vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eagle3.precision import at_least_float32, compiled_on_gpu, compute_dtype
from eagle3.products import add_product
from eagle3.row_losses import LOSSES, RowLoss, soft_cross_entropy
from eagle3.take import take_steps


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
    chunk_pairs: int = 8192,
) -> HeadOutput:
    """Loss, drafts and acceptance of the active pairs.

    `normed` are states after the drafter's final norm; `index` says at which token the teacher of a pair speaks;
    `weight` is decay^k/|M_k| on supervised pairs and 0 elsewhere. `loss.backward()` reaches `normed` and `lm_head`.
    """
    dtype = compute_dtype(normed)
    step, row = active.nonzero(as_tuple=True)
    order = index[step, row].argsort(stable=True)
    step, row = step[order], row[order]
    (student,) = take_steps(normed.flatten(0, 1).to(dtype), (step * active.shape[1] + row)[None])
    del normed  # one copy is enough
    total, row_loss, draft, alpha = _ChunkedHead.apply(
        student, lm_head, teacher, index[step, row], weight[step, row], LOSSES[loss], chunk_pairs
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
        head = lm_head.to(hidden.dtype)
        teacher_head = teacher.head.to(head.dtype)
        positions, speaker = speaks_at.unique_consecutive(return_inverse=True)
        total = at_least_float32(hidden.new_zeros(()))
        # `hidden` is a copy for this function alone: once a chunk has read its rows, their gradient takes their place.
        grad_hidden = hidden if wants_gradient else None
        grad_head = torch.zeros_like(lm_head) if wants_gradient else None
        losses, drafts, alphas = [], [], []
        for chunk, speakers in _chunks(speaker, chunk_pairs):
            spoken = teacher.last[positions[speakers]].to(head.dtype) @ teacher_head.T
            row_loss, gradient, draft, alpha = _judge(
                hidden[chunk] @ head.T, spoken, speaker[chunk] - speakers.start, teacher.lse[positions[speakers]],
                weight[chunk], row_loss_of,
            )  # fmt: skip
            total += (row_loss * weight[chunk]).sum()
            losses.append(row_loss)
            drafts.append(draft)
            alphas.append(alpha)
            if grad_hidden is not None and grad_head is not None:
                add_product(grad_head, gradient, hidden[chunk])
                torch.mm(gradient, head, out=grad_hidden[chunk])
            del spoken, gradient  # before the next chunk needs as much
        ctx.save_for_backward(grad_hidden, grad_head)
        outputs = tuple(torch.cat(x) if x else weight.new_zeros(0) for x in (losses, drafts, alphas))
        ctx.mark_non_differentiable(*outputs)
        return total, outputs[0], outputs[1].long(), outputs[2]

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_head = ctx.saved_tensors
        return grad_hidden * grad_total, grad_head * grad_total, None, None, None, None, None


def _chunks(speaker: Int[Tensor, "P"], pairs: int) -> Iterator[tuple[slice, slice]]:
    """Pairs, and the teachers that speak to them: both are in order, so each is a slice."""
    chunks = [slice(begin, min(begin + pairs, len(speaker))) for begin in range(0, len(speaker), pairs)]
    ends = [place for chunk in chunks for place in (chunk.start, chunk.stop - 1)]
    spoken = speaker[
        torch.tensor(ends, dtype=torch.long, device=speaker.device)
    ].tolist()  # the one wait for the device
    for chunk, low, high in zip(chunks, spoken[::2], spoken[1::2], strict=True):
        yield chunk, slice(low, high + 1)


def _judge(
    logits: Float[Tensor, "P D"],
    spoken: Float[Tensor, "U D"],
    speaker: Int[Tensor, "P"],
    lse: Float[Tensor, "U"],
    weight: Float[Tensor, "P"],
    row_loss_of: RowLoss,
) -> tuple[Float[Tensor, "P"], Float[Tensor, "P D"], Int[Tensor, "P"], Float[Tensor, "P"]]:
    """`_judged`, or on a GPU a kernel for the usual loss, which leaves its gradient in the place of `logits`."""
    if logits.is_cuda and row_loss_of is soft_cross_entropy and logits.dtype != torch.float64:
        from eagle3.soft_ce_kernel import judged_in_place  # Triton comes with the GPU builds of torch alone

        return judged_in_place(logits, spoken, speaker, *_teachers(spoken, lse), weight)
    return _judged(logits, spoken, speaker, lse, weight, row_loss_of)


@compiled_on_gpu
def _teachers(spoken: Float[Tensor, "U D"], lse: Float[Tensor, "U"]) -> tuple[Float[Tensor, "U"], Float[Tensor, "U"]]:
    """Log-sum-exp of the teachers' logits, and how much of their mass lies in the draft vocabulary."""
    within = at_least_float32(spoken).logsumexp(-1)
    return within, (within - lse).exp()


@compiled_on_gpu
def _judged(
    logits: Float[Tensor, "P D"],
    spoken: Float[Tensor, "U D"],
    speaker: Int[Tensor, "P"],
    lse: Float[Tensor, "U"],
    weight: Float[Tensor, "P"],
    row_loss_of: RowLoss,
) -> tuple[Float[Tensor, "P"], Float[Tensor, "P D"], Int[Tensor, "P"], Float[Tensor, "P"]]:
    """Loss, weight times its gradient, draft and alpha of each pair; `spoken` are U teachers' logits."""
    student, teacher = at_least_float32(logits), at_least_float32(spoken)
    within = teacher.logsumexp(-1)
    mass = (within - lse).exp()[speaker]
    in_draft = (teacher[speaker] - within[speaker, None]).exp()
    row_loss, gradient = row_loss_of(student, in_draft, mass, weight)
    # As the losses write it, so that the compiler sees one logsumexp and not two.
    q = (student - student.logsumexp(-1)[:, None]).exp()
    alpha = torch.minimum(in_draft * mass[:, None], q).sum(-1)
    return row_loss, gradient.to(logits.dtype), logits.argmax(-1), alpha
