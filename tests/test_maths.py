"""Tests of a whole training step: gradients by finite differences, and documents that do not know their neighbours."""

from typing import Any

import pytest
import torch
from hypothesis import example, given
from torch import Tensor
from torch.func import functional_call

from eagle3.module import DrafterModule
from tests.batches import Case, cases, make_case, with_teacher
from tests.compared import assert_gradients, reference, trained

SMOOTH = ("soft_ce", "lk_alpha", "tv")
"""Losses of which all that moves takes a gradient; the weight inside lk_lambda does not."""


def double(batch: dict[str, Any]) -> dict[str, Any]:
    return {n: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for n, x in batch.items()}


@pytest.mark.parametrize("loss", SMOOTH)
def test_gradients_equal_finite_differences_in_float64(loss: str):
    """Of the whole step, in aux and in every weight, along random directions."""
    case = make_case([[7, 4], [9]], ttt_steps=3, seed=6, loss=loss, fc_norm=True, norm_output=True)
    module, batch = case.module().double(), double(case.batch)
    names = [name for name, _ in module.named_parameters()]
    leaves = (batch["aux"].requires_grad_(), *(p.detach().clone().requires_grad_() for p in module.parameters()))

    def of(aux: Tensor, *weights: Tensor) -> Tensor:
        _, out = functional_call(module, dict(zip(names, weights, strict=True)), (batch, aux))
        return out.loss

    assert torch.autograd.gradcheck(of, leaves, fast_mode=True, eps=1e-6, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("loss", ["soft_ce", "lk_alpha", "lk_lambda", "tv"])
def test_every_loss_equals_the_reference_with_any_step_count(loss: str):
    for steps in range(1, 8):
        case = make_case([[11, 6], [3, 2, 1, 9]], ttt_steps=steps, seed=steps, loss=loss, num_kv_heads=1 + steps % 2)
        value, metrics, gradients = trained(case)
        want, want_gradients = reference(case, case.batch["aux"], torch.float64)
        assert value == pytest.approx(want.metrics["loss"], rel=1e-5, abs=1e-6) and value > 0
        assert metrics == pytest.approx(want.metrics, rel=1e-5, abs=1e-6)
        assert_gradients(gradients, want_gradients, 1e-5)


def pieces(batch: dict[str, Any]) -> list[dict[str, Any]]:
    """Every document of a packed batch as a batch of its own, with the loss denominators of the whole."""
    whole = ("supervised_total", "step", "rows")
    out = []
    for b, of_row in enumerate(batch["document"]):
        for number in sorted(set(of_row.tolist()) - {-1}):
            at = (of_row == number).nonzero().squeeze(1)
            cut = {name: x[b : b + 1, at] for name, x in batch.items() if name not in whole}
            out.append(cut | {name: batch[name] for name in whole})
    return out


def counted(module: DrafterModule, batches: list[dict[str, Any]]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Metric sums and visits of a validation, and the gradients of a training step, over these batches."""
    for sums in (module.val_sums, module.val_visits):
        sums.zero_()
    module.zero_grad()
    for batch in batches:
        _, out = module(batch, batch["aux"])
        out.loss.backward()
        module.validation_step(batch, 0)
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in
                 module.named_parameters()}  # fmt: skip
    return [module.val_sums.clone(), module.val_visits.clone()], gradients


@given(cases())
@example(make_case([[3, 2, 1, 7], [8, 8]], ttt_steps=7, written=1.0))
def test_a_packed_batch_gives_the_metrics_and_gradients_of_its_documents_alone(case: Case):
    module = case.module()
    (sums, visits), gradients = counted(module, [case.batch])
    (alone_sums, alone_visits), alone = counted(module, pieces(case.batch))
    torch.testing.assert_close(sums, alone_sums, rtol=1e-5, atol=1e-5)
    assert torch.equal(visits, alone_visits)
    assert_gradients(gradients, alone, 1e-5)


@pytest.mark.parametrize("step", range(7))
def test_no_neighbour_gets_any_gradient_at_any_step(step: int, monkeypatch: pytest.MonkeyPatch):
    """Of four documents one is supervised, at one step alone: every bit of the others' gradient is 0."""
    case = make_case([[9, 12, 9], [12]], ttt_steps=7, seed=3, draft_vocab_size=9)
    mine = (case.batch["document"] == 1) & (torch.arange(2)[:, None] == 0)
    batch = with_teacher(case.batch | {"loss_mask": mine}, case.drafter, case.head, 7)
    module, aux = case.module(), batch["aux"].clone().requires_grad_()
    only = (torch.arange(7) == step).float()[:, None]
    monkeypatch.setattr(module, "_weights", lambda plan, _: plan.supervised * only)
    _, out = module(batch, aux)
    out.loss.backward()
    assert aux.grad is not None
    reached = aux.grad.abs().sum(-1) > 0
    assert not reached[~mine].any()
    # Its last row drafts its last token, and reads the states of all rows before.
    assert reached[mine].tolist() == [r < 12 - 2 - step for r in range(12)]


def test_a_document_s_drafts_losses_and_acceptance_do_not_move_with_its_neighbours():
    """Bit by bit: other tokens, states and verdicts all around it, the same masks."""
    case = make_case([[7, 9, 4], [6, 14]], ttt_steps=7, seed=11, written=1.0)
    batch, other = case.batch, make_case([[7, 9, 4], [6, 14]], ttt_steps=7, seed=12, written=1.0).batch
    mine = (batch["document"] == 1) & (torch.arange(2)[:, None] == 0)
    mixed = batch | {n: other[n].clone() for n in ("input_ids", "aux", "last", "top1", "lse")}
    for name in ("input_ids", "aux", "last", "top1", "lse"):
        mixed[name][mine] = batch[name][mine]
    module = case.module()
    (plan, want), (_, found) = (module(b, b["aux"]) for b in (batch, mixed))
    here = mine.flatten()[plan.rows]
    assert here.any() and not here.all()
    for name in ("row_loss", "draft", "alpha"):
        assert torch.equal(getattr(found, name)[:, here], getattr(want, name)[:, here]), name
        assert not torch.equal(getattr(found, name)[:, ~here], getattr(want, name)[:, ~here]), name


def test_one_document_alone_gives_what_the_reference_says_of_it():
    """Lengths 1, 2 and 3: no row, no row but one, one row of one step."""
    for length, active in ((1, 0), (2, 0), (3, 1)):
        case = make_case([[length]], ttt_steps=3, seed=length, written=1.0, draft_vocab_size=9)
        module = case.module()
        plan, _ = module(case.batch, case.batch["aux"])
        assert int(plan.active.sum()) == active
        value, metrics, _ = trained(case)
        want, _ = reference(case, case.batch["aux"], torch.float64)
        assert value == pytest.approx(want.metrics["loss"], rel=1e-5, abs=1e-6) and metrics == pytest.approx(
            want.metrics
        )
