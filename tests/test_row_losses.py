"""Tests of eagle3.row_losses: each loss and its gradient against the dense definition, by hand, and at its extremes."""

from math import log
from typing import get_args, get_type_hints

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from eagle3.config import Drafter
from eagle3.row_losses import LOSSES
from tests.reference import row_loss

ALL = sorted(LOSSES)


def random_rows(seed: int, rows: int, vocab: int, draft: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Draft logits [P, D], the verifier's [P, V], and weights [P], in float64; the draft vocabulary is the first D."""
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(rows, draft, dtype=torch.float64, generator=generator)
    verdict = scale * torch.randn(rows, vocab, dtype=torch.float64, generator=generator)
    return logits, verdict, torch.rand(rows, dtype=torch.float64, generator=generator)


def teacher_of(verdict: Tensor, draft: int) -> tuple[Tensor, Tensor]:
    """The verifier's distribution over the draft vocabulary, and the mass that lies in it."""
    return verdict[:, :draft].softmax(-1), verdict.softmax(-1)[:, :draft].sum(-1)


@pytest.mark.parametrize("name", ALL)
@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(0, 4), st.sampled_from([0.3, 3.0, 12.0]))
def test_loss_and_gradient_equal_autograd_of_the_dense_definition(
    name: str, seed: int, draft: int, beyond: int, scale: float
):
    logits, verdict, weight = random_rows(seed, 5, draft + beyond, draft, scale)
    logits.requires_grad_()
    dense = torch.stack([row_loss(name, *row, torch.arange(draft)) for row in zip(logits, verdict, strict=True)])
    [want] = torch.autograd.grad((dense * weight).sum(), logits)
    value, gradient = LOSSES[name](logits.detach(), *teacher_of(verdict, draft), weight)
    torch.testing.assert_close(value, dense.detach(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradient, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["lk_alpha", "soft_ce", "tv"])
def test_gradient_equals_finite_differences_in_float64(name: str):
    logits, verdict, weight = random_rows(1, 6, 11, 9, 3.0)
    teacher, mass = teacher_of(verdict, 9)
    _, gradient = LOSSES[name](logits, teacher, mass, weight)
    for d in range(9):
        step = 1e-6 * torch.nn.functional.one_hot(torch.tensor(d), 9)
        up, down = (LOSSES[name](logits + sign * step, teacher, mass, weight)[0] for sign in (1, -1))
        torch.testing.assert_close(weight * (up - down) / 2e-6, gradient[:, d], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("name", "value", "gradient"),
    [
        # q = (3/4, 1/4), t = (1/2, 1/2), mass 4/5: p = (2/5, 2/5), alpha = 2/5 + 1/4.
        ("soft_ce", -0.5 * log(3 / 16), [0.25, -0.25]),
        ("tv", 0.35, [3 / 16, -3 / 16]),  # d alpha = q_2 (1 - q_2) and its negative
        ("lk_alpha", -log(0.65), [3 / 16 / 0.65, -3 / 16 / 0.65]),
    ],
)
def test_hand_made_row(name: str, value: float, gradient: list[float]):
    logits, half = torch.tensor([[3.0, 1.0]]).log(), torch.tensor([[0.5, 0.5]])
    found, of = LOSSES[name](logits, half, torch.tensor([0.8]), torch.tensor([2.0]))
    assert found.item() == pytest.approx(value)
    assert of.tolist() == [pytest.approx([2 * g for g in gradient])]


@pytest.mark.parametrize("name", ALL)
def test_arguments_are_left_as_they_are(name: str):
    logits, verdict, weight = random_rows(2, 4, 8, 6, 2.0)
    arguments = (logits, *teacher_of(verdict, 6), weight)
    before = [x.clone() for x in arguments]
    LOSSES[name](*arguments)
    assert all(torch.equal(x, y) for x, y in zip(arguments, before, strict=True))


@pytest.mark.parametrize("name", ALL)
def test_extreme_rows_stay_finite_in_float32(name: str):
    """p and q share no float32 number; a teacher without any mass in the draft vocabulary has weight 0."""
    logits = torch.tensor([[300.0, 0.0, 0.0], [0.0, 0.0, 0.0], [-200.0, 200.0, 0.0]])
    teacher = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    value, gradient = LOSSES[name](logits, teacher, torch.tensor([1.0, 0.0, 0.5]), torch.tensor([1.0, 0.0, 1.0]))
    assert value.isfinite().all() and gradient.isfinite().all()
    assert not gradient[1].any()
    torch.testing.assert_close(gradient.sum(-1), torch.zeros(3), rtol=0, atol=1e-5)
    if name in ("soft_ce", "lk_alpha"):  # they pull also where p and q hardly meet
        assert gradient[0, 1] < -0.9 and gradient[2, 0] < -0.9


@pytest.mark.parametrize("name", ["tv", "lk_alpha"])
def test_a_draft_equal_to_the_verifier_has_no_loss(name: str):
    logits, _, weight = random_rows(3, 4, 7, 7, 1.0)
    value, _ = LOSSES[name](logits, logits.softmax(-1), torch.ones(4, dtype=torch.float64), weight)
    torch.testing.assert_close(value, torch.zeros_like(value), rtol=0, atol=1e-12)


def test_the_config_offers_these_losses_and_no_other():
    assert sorted(get_args(get_type_hints(Drafter)["loss"])) == ALL
