"""Tests of eagle3.loss: values and gradients, chunks, empty sets, and what is held in memory."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from eagle3.loss import HeadOutput, Teacher, head_and_loss
from eagle3.row_losses import LOSSES
from tests.reference import row_loss

STEPS, ROWS, TOKENS, HIDDEN, DRAFT, VOCAB = 3, 7, 12, 5, 11, 17


class Inputs:
    """Random arguments of `head_and_loss`; the draft vocabulary is the first DRAFT of VOCAB ids."""

    def __init__(self, *, rows: int = ROWS, hidden: int = HIDDEN, draft: int = DRAFT, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        self.normed = torch.randn(STEPS, rows, hidden, generator=generator).requires_grad_()
        self.lm_head = torch.randn(draft, hidden, generator=generator).requires_grad_()
        tokens = rows + STEPS + 2
        last = torch.randn(tokens, hidden, generator=generator)
        head = torch.randn(max(VOCAB, draft), hidden, generator=generator)
        self.full = (last.double() @ head.double().T).softmax(-1)
        self.teacher = Teacher(last, (last @ head.T).logsumexp(-1), head[:draft])
        self.index = torch.arange(rows) + 1 + torch.arange(STEPS)[:, None]
        self.active = (torch.rand(STEPS, rows, generator=generator) < 0.8).long().cumprod(0).bool()
        self.supervised = self.active & (torch.rand(STEPS, rows, generator=generator) < 0.7)
        count = self.supervised.sum(1).clamp(min=1)
        self.weight = self.supervised * (0.8 ** torch.arange(STEPS) / count)[:, None]

    def run(self, **changes: Any) -> tuple[HeadOutput, Tensor, Tensor]:
        """The output, and the gradients of `normed` and `lm_head`."""
        leaves = [x.detach().clone().requires_grad_() for x in (self.normed, self.lm_head)]
        given = {"teacher": self.teacher, "index": self.index, "active": self.active, "weight": self.weight} | changes
        out = head_and_loss(*leaves, **given)
        out.loss.backward()
        assert leaves[0].grad is not None and leaves[1].grad is not None
        return out, leaves[0].grad, leaves[1].grad


def plain(x: Inputs, kind: str = "soft_ce") -> tuple[Tensor, Tensor, Tensor]:
    """The loss by autograd, all logits at once, in float64."""
    normed, head = (t.detach().double().requires_grad_() for t in (x.normed, x.lm_head))
    verdict = x.full.double().log()[x.index].flatten(0, 1)
    logits = (normed @ head.T).flatten(0, 1)
    rows = [row_loss(kind, q, p, torch.arange(DRAFT)) for q, p in zip(logits, verdict, strict=True)]
    loss = (torch.stack(rows) * x.weight.flatten()).sum()
    return loss.detach(), *torch.autograd.grad(loss, (normed, head))


@pytest.mark.parametrize("kind", sorted(LOSSES))
def test_loss_and_gradients_equal_autograd_in_float64(kind: str):
    x = Inputs()
    out, *gradients = x.run(loss=kind)
    want, *want_gradients = plain(x, kind)
    torch.testing.assert_close(out.loss.double(), want, rtol=1e-6, atol=0)
    for ours, theirs in zip(gradients, want_gradients, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-7)


def test_float64_stays_float64():
    x = Inputs()
    want, *want_gradients = plain(x)
    t = x.teacher
    x.normed, x.lm_head, x.weight = x.normed.double(), x.lm_head.double(), x.weight.double()
    out, *gradients = x.run(teacher=Teacher(t.last.double(), t.lse.double(), t.head.double()), chunk_pairs=4)
    for ours, theirs in zip((out.loss, *gradients), (want, *want_gradients), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)


def test_backward_scales_with_what_comes_from_above():
    x = Inputs()
    leaves = [t.detach().clone().requires_grad_() for t in (x.normed, x.lm_head)]
    out = head_and_loss(*leaves, x.teacher, x.index, x.active, x.weight)
    (out.loss * 6.0).backward()
    _, *once = x.run()
    for leaf, gradient in zip(leaves, once, strict=True):
        torch.testing.assert_close(leaf.grad, 6.0 * gradient)


@pytest.mark.parametrize("chunk_pairs", [1, 2, 5, 1000])
def test_chunk_size_does_not_change_anything(chunk_pairs: int):
    x = Inputs(seed=2)
    want, *want_gradients = x.run(chunk_pairs=4)
    out, *gradients = x.run(chunk_pairs=chunk_pairs)
    for name in ("loss", "row_loss", "alpha"):
        torch.testing.assert_close(getattr(out, name), getattr(want, name), rtol=1e-6, atol=1e-7)
    assert torch.equal(out.draft, want.draft)
    for ours, theirs in zip(gradients, want_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_drafts_and_acceptance_of_every_active_pair():
    x = Inputs()
    out, *_ = x.run()
    logits = x.normed.detach() @ x.lm_head.detach().T
    for k in range(STEPS):
        for r in range(ROWS):
            if not x.active[k, r]:
                assert (out.draft[k, r], out.alpha[k, r], out.row_loss[k, r]) == (-1, 0, 0)
                continue
            p, q = x.full[x.index[k, r]], torch.zeros(VOCAB)
            q[:DRAFT] = logits[k, r].softmax(-1)
            assert out.draft[k, r] == logits[k, r].argmax()
            assert out.alpha[k, r].item() == pytest.approx(sum(map(min, p.tolist(), q.tolist())), rel=1e-5)


def test_unsupervised_rows_give_no_loss_and_no_gradient():
    x = Inputs()
    out, gradient, head_gradient = x.run()
    assert (x.active & ~x.supervised).any()
    assert not gradient[~x.supervised].any() and (gradient[x.supervised] != 0).any(-1).all()
    moved = x.normed.detach().clone()
    moved[~x.supervised] += 1.0
    x.normed = moved
    again, _, moved_head_gradient = x.run()
    torch.testing.assert_close(again.loss, out.loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(moved_head_gradient, head_gradient)


def test_draft_vocabulary_without_any_top1_gives_drafts_and_zero_loss():
    x = Inputs()
    out, *gradients = x.run(weight=torch.zeros_like(x.weight))
    assert out.loss.item() == 0.0 and (out.draft[x.active] >= 0).all()
    assert all(not g.any() and g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("rows", [0, 3])
def test_empty_sets_give_zero_loss_and_finite_zero_gradients(rows: int):
    x = Inputs(rows=rows)
    nobody = torch.zeros(STEPS, rows, dtype=torch.bool)
    out, *gradients = x.run(active=nobody, weight=torch.zeros(STEPS, rows))
    assert out.loss.item() == 0.0
    assert out.draft.shape == (STEPS, rows) and (out.draft == -1).all()
    assert [g.shape for g in gradients] == [(STEPS, rows, HIDDEN), (DRAFT, HIDDEN)]
    assert all(not g.any() and g.isfinite().all() for g in gradients)


class Largest(TorchDispatchMode):
    """The most numbers in one tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.parametrize("kind", sorted(LOSSES))
def test_no_tensor_of_pairs_by_vocabulary_is_made_or_kept(kind: str):
    x = Inputs(rows=200, hidden=4, draft=300)
    pairs, chunk, kept = int(x.active.sum()), 16, []
    with (
        Largest() as largest,
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t),
    ):
        out = head_and_loss(x.normed, x.lm_head, x.teacher, x.index, x.active, x.weight, loss=kind, chunk_pairs=chunk)
        out.loss.backward()
    assert pairs * 300 > 10 * largest.numel, "the bound below would mean nothing"
    assert largest.numel <= chunk * 300
    assert sum(kept) <= pairs * 4 + 300 * 4 + 10 * pairs


def test_evaluation_forms_no_gradient():
    x = Inputs()
    with torch.no_grad():
        out = head_and_loss(x.normed, x.lm_head, x.teacher, x.index, x.active, x.weight)
    want, *_ = x.run()
    assert not out.loss.requires_grad and torch.equal(out.loss, want.loss.detach())


def test_nothing_of_the_verifier_takes_a_gradient():
    x = Inputs()
    head = x.teacher.head.clone().requires_grad_()
    x.run(teacher=Teacher(x.teacher.last, x.teacher.lse, head))
    assert head.grad is None


def test_autocast_multiplies_in_bf16_and_sums_in_float32():
    x = Inputs()
    want, *want_gradients = x.run()
    with torch.autocast("cpu", torch.bfloat16):
        out, *gradients = x.run()
    assert out.loss.dtype == torch.float32 and all(g.dtype == torch.float32 for g in gradients)
    assert out.loss.item() == pytest.approx(want.loss.item(), rel=1e-2)
    for ours, theirs in zip(gradients, want_gradients, strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 3e-2
