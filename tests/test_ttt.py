"""Tests of eagle3.ttt: the unrolled drafter equals the plain reference, and documents do not know their neighbours."""

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from torch import Tensor

from eagle3.supervision import Supervision, supervise
from eagle3.ttt import add_noise, unroll
from tests.batches import Case, cases, make_case, with_teacher
from tests.compared import assert_gradients, gradient_errors, reference, trained


@settings(max_examples=50)
@given(cases())
@example(make_case([[1], [2], [3]], ttt_steps=1))
@example(make_case([[3, 2, 1], [6]], ttt_steps=7, written=0.0))
@example(make_case([[12]], ttt_steps=7, seed=5, draft_vocab_size=9, num_kv_heads=4))
@example(make_case([[5, 7], []], ttt_steps=4, draft_vocab_size=1, fc_norm=True, norm_output=True))
def test_loss_metrics_and_gradients_equal_the_reference(case: Case):
    """In float32: a loss near 0, which 1 - alpha and -log alpha may be, is known to the rounding of 1."""
    loss, metrics, gradients = trained(case)
    want, want_gradients = reference(case, case.batch["aux"], torch.float64)
    assert loss == pytest.approx(want.metrics["loss"], rel=1e-5, abs=1e-6)
    assert metrics == pytest.approx(want.metrics, rel=1e-5, abs=1e-6)
    if max(gradient_errors(gradients, want_gradients).values()) <= 1e-5:
        return
    # One case in thousands is so ill-conditioned that the reference itself is no better in float32.
    rounding = gradient_errors(reference(case, case.batch["aux"], torch.float32)[1], want_gradients)
    assert_gradients(gradients, want_gradients, 5 * max(rounding.values()))


BF16 = {
    "K 4": make_case([[14, 9], [20]], ttt_steps=4, seed=3),
    "EAGLE-3.1, K 7": make_case([[30]], ttt_steps=7, seed=4, fc_norm=True, norm_output=True),
    "K 1, D = V": make_case([[3, 2, 1], [8]], ttt_steps=1, seed=5, draft_vocab_size=9),
    "wide heads, K 7": make_case([[3, 2, 12], [18]], ttt_steps=7, seed=6, hidden_size=24, head_dim=10),
}


@pytest.mark.parametrize("name", BF16)
def test_bf16_equals_the_reference_to_the_error_of_bf16(name: str):
    """Eight bits of mantissa are 4e-3 a product; gradients add up a few of them."""
    case = BF16[name]
    with torch.autocast("cpu", torch.bfloat16):
        loss, metrics, gradients = trained(case)
    want, want_gradients = reference(case, case.batch["aux"], torch.float32)
    assert loss == pytest.approx(want.metrics["loss"], rel=2e-3)
    assert loss != pytest.approx(want.metrics["loss"], rel=1e-6), "this did not run in bf16"
    assert metrics == pytest.approx(want.metrics, rel=1e-2, abs=3e-3)
    # Where a sum is rounded moves a small case by this much: the same step written otherwise gave 0.03 to 0.07.
    assert_gradients(gradients, want_gradients, 8e-2)


def run(case: Case, batch: dict[str, Tensor], aux: Tensor) -> tuple[Supervision, Tensor]:
    """Row sets and states [K, R, H]."""
    small = [batch[name] for name in ("input_ids", "loss_mask", "document", "top1")]
    plan = supervise(*small, case.drafter.t2d, case.recipe.ttt_steps)
    flat = [x.flatten(0, 1) for x in (aux, batch["input_ids"], batch["position"])]
    return plan, torch.stack(unroll(case.drafter, *flat, batch["document"], plan.rows, plan.index))


def all_written(case: Case) -> Case:
    batch = case.batch | {"loss_mask": torch.ones_like(case.batch["loss_mask"])}
    return replace(case, batch=with_teacher(batch, case.drafter, case.head, case.recipe.ttt_steps))


@pytest.mark.parametrize("norm_output", [False, True])
def test_every_row_depends_on_its_own_past_and_read_tokens_alone(norm_output: bool):
    """At every step, on aux of columns <= r of its document: all of them, and exactly nothing else."""
    case = all_written(make_case([[6, 7, 3], [1, 8]], padding=2, ttt_steps=3, norm_output=norm_output))
    aux = case.batch["aux"].clone().requires_grad_()
    plan, states = run(case, case.batch, aux)
    document, tokens = case.batch["document"].flatten(), case.batch["document"].shape[1]
    column = torch.arange(len(document))
    for k, at in plan.active.nonzero().tolist():
        [gradient] = torch.autograd.grad(states[k, at].square().sum(), aux, retain_graph=True)
        reached = gradient.abs().sum(-1).flatten() > 0
        r = int(plan.rows[at])
        own = (document == document[r]) & (column // tokens == r // tokens) & (column <= r)
        assert torch.equal(reached, own), (k, r)


def test_true_tokens_enter_every_step():
    """Row r at step k changes with x[j] for 1 <= j <= r+1+k of its document, never with a later or foreign token."""
    case = all_written(make_case([[5, 8]], ttt_steps=3))
    plan, before = run(case, case.batch, case.batch["aux"])
    document = case.batch["document"].flatten()
    for j in range(13):
        ids = case.batch["input_ids"].clone()
        ids[0, j] = (ids[0, j] + 1) % case.drafter.shape.vocab_size
        _, after = run(case, case.batch | {"input_ids": ids}, case.batch["aux"])
        moved = (after != before).any(-1)
        first = int((document == document[j]).nonzero()[0])
        reads = (document[plan.rows] == document[j]) & (first < j) & (j <= plan.index)
        assert torch.equal(moved & plan.active, reads & plan.active), j


def test_packed_equals_alone_and_does_not_move_with_its_neighbours():
    case = make_case([[7, 9, 4], [6, 8]], padding=3, ttt_steps=4, seed=11)
    plan, packed = run(case, case.batch, case.batch["aux"])
    b, t = plan.rows // 23, plan.rows % 23
    mine = (b == 0) & (t >= 7) & (t < 16)
    assert mine.any() and not mine.all()
    names = ("input_ids", "loss_mask", "document", "position", "top1")
    alone_plan, alone = run(case, {n: case.batch[n][:1, 7:16] for n in names}, case.batch["aux"][:1, 7:16])
    assert torch.equal(alone_plan.rows, plan.rows[mine] - 7)
    for k, active in enumerate(alone_plan.active):
        torch.testing.assert_close(packed[k][mine][active], alone[k][active], rtol=1e-5, atol=1e-6)

    other = case.batch["input_ids"].clone().roll(1, 0)
    noise = torch.randn_like(case.batch["aux"])
    for x, y in ((other, case.batch["input_ids"]), (noise, case.batch["aux"])):
        x[0, 7:16] = y[0, 7:16]
    _, moved = run(case, case.batch | {"input_ids": other}, noise)
    here = plan.active & mine
    assert torch.equal(moved[here], packed[here])
    assert not torch.equal(moved[plan.active & ~mine], packed[plan.active & ~mine])


def test_carried_state_is_the_residual_stream_or_the_normed_state_as_the_shape_says():
    for norm_output in (False, True):
        case = all_written(make_case([[8]], ttt_steps=3, norm_output=norm_output))
        _, before = run(case, case.batch, case.batch["aux"])
        with torch.no_grad():
            case.drafter.norm.weight.mul_(torch.linspace(0.5, 2.0, 12))
        _, after = run(case, case.batch, case.batch["aux"])
        assert torch.equal(before[0], after[0])
        assert torch.equal(before[1:], after[1:]) is not norm_output


def test_no_active_row_runs_and_gives_zero_gradients():
    case = make_case([[2, 1], [2]], ttt_steps=2)
    loss, metrics, gradients = trained(case)
    assert loss == 0.0 and metrics["loss"] == 0.0 and "acc_0" not in metrics
    assert all(float(g.abs().sum()) == 0.0 for g in gradients.values())


def test_a_row_gets_the_same_noise_in_any_batch():
    aux = torch.randn(3, 5, 4)
    together = add_noise(aux, 0.05, [7, 8, 9])
    assert torch.equal(add_noise(aux[1:2], 0.05, [8])[0], together[1])
    assert torch.equal(add_noise(aux[[2, 0]], 0.05, [9, 7]), together[[2, 0]])
    noise = together - aux
    assert not torch.allclose(noise[0], noise[1]) and not torch.equal(noise[0, 0], noise[0, 1])


def test_noise_is_uniform_in_float32_and_leaves_the_batch_alone():
    aux = torch.zeros(1, 100, 100, dtype=torch.bfloat16)
    noisy = add_noise(aux, 0.05, [3])
    assert noisy.dtype == torch.float32 and not aux.any()
    assert float(noisy.abs().max()) <= 0.05 and float(noisy.abs().max()) > 0.0499
    assert abs(float(noisy.mean())) < 1e-3
    assert float(noisy.std()) == pytest.approx(0.05 / 3**0.5, rel=0.02)


def test_std_zero_draws_no_random_number(monkeypatch: pytest.MonkeyPatch):
    aux = torch.randn(2, 3, 4)
    before = torch.get_rng_state()
    add_noise(aux, 0.05, [1, 2])
    assert torch.equal(torch.get_rng_state(), before), "training must not draw from the global generator"

    def drawn(*_: object, **__: object) -> None:
        raise AssertionError("a random number was drawn")

    for name in ("rand", "rand_like", "randn", "Generator"):
        monkeypatch.setattr(torch, name, drawn)
    assert add_noise(aux, 0.0, [1, 2]) is aux
