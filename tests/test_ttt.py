"""Tests of eagle3.ttt: the unrolled drafter equals the plain reference, and documents do not know their neighbours."""

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from torch import Tensor

from eagle3.loss import Teacher, head_and_loss
from eagle3.metrics import acceptance_length, rates
from eagle3.supervision import Supervision, supervise
from eagle3.ttt import add_noise, unroll
from tests.batches import Case, cases, make_case, with_teacher
from tests.reference import Network, Result, Verifier, train_step


def reference(case: Case, aux: Tensor, dtype: torch.dtype) -> tuple[Result, dict[str, Tensor]]:
    """The reference's result and its gradients by name, the one of `aux` included."""
    drafter, batch = case.drafter, dict(case.batch)
    weights = {n: p.detach().to(dtype).requires_grad_() for n, p in drafter.named_parameters()}
    leaves = weights | {"aux": aux.detach().to(dtype).requires_grad_()}
    batch |= {"aux": leaves["aux"], "last": batch["last"].to(dtype)}
    shape = drafter.shape
    theta = shape.rope_parameters["rope_theta"]
    net = Network(weights, shape.head_dim, shape.rms_norm_eps, theta, shape.fc_norm, shape.norm_output)
    verifier = Verifier(drafter.embedding.to(dtype), case.head.to(dtype))
    target_ids = drafter.t2d.nonzero().squeeze(1)
    recipe = case.recipe
    result = train_step(net, verifier, target_ids, batch, steps=recipe.ttt_steps, decay=recipe.step_decay)
    if not result.loss.requires_grad:
        return result, {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    found = torch.autograd.grad(result.loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return result, dict(zip(leaves, found, strict=True))


def trained(case: Case) -> tuple[float, dict[str, float], dict[str, Tensor]]:
    """Loss, metrics and gradients of the classes that train.py trains."""
    module = case.module()
    aux = case.batch["aux"].clone().requires_grad_()
    _, out = module(case.batch, aux)
    out.loss.backward()
    assert aux.grad is not None
    gradients = {"aux": aux.grad}
    for name, parameter in case.drafter.named_parameters():
        assert parameter.grad is not None, name
        gradients[name] = parameter.grad
    module.validation_step(case.batch, 0)
    metrics = rates(module.val_sums, case.recipe.step_decay)
    visited, *accepted = (int(count) for count in module.val_visits.tolist())
    metrics |= {"visited": visited} | {f"accepted_{k}": count for k, count in enumerate(accepted)}
    accept_len = acceptance_length(visited, sum(accepted))
    return out.loss.item(), metrics | ({} if accept_len is None else {"accept_len": accept_len}), gradients


def assert_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> None:
    """In relative norm; a gradient that all but cancels is measured against the whole."""
    assert set(ours) == set(theirs)
    whole = torch.stack([g.double().norm() for g in theirs.values()]).norm()
    for name, want in theirs.items():
        bar = tolerance * max(float(want.norm()), 1e-2 * float(whole))
        assert float((ours[name].double() - want.double()).norm()) <= bar, name


@settings(max_examples=50)
@given(cases())
@example(make_case([[1], [2], [3]], ttt_steps=1))
@example(make_case([[12]], ttt_steps=7, seed=5, draft_vocab_size=9, num_kv_heads=4))
@example(make_case([[5, 7], []], ttt_steps=4, draft_vocab_size=1, fc_norm=True, norm_output=True))
def test_loss_metrics_and_gradients_equal_the_reference(case: Case):
    loss, metrics, gradients = trained(case)
    want, want_gradients = reference(case, case.batch["aux"], torch.float64)
    assert loss == pytest.approx(want.metrics["loss"], rel=1e-5)
    assert metrics == pytest.approx(want.metrics, rel=1e-5)
    assert_gradients(gradients, want_gradients, 1e-5)


def test_bf16_equals_the_reference_to_the_error_of_bf16():
    case = make_case([[14, 9], [20]], ttt_steps=4, seed=3)
    with torch.autocast("cpu", torch.bfloat16):
        loss, metrics, gradients = trained(case)
    want, want_gradients = reference(case, case.batch["aux"], torch.float32)
    assert loss == pytest.approx(want.metrics["loss"], rel=1e-2)
    assert loss != pytest.approx(want.metrics["loss"], rel=1e-5), "this did not run in bf16"
    assert metrics["alpha_0"] == pytest.approx(want.metrics["alpha_0"], rel=2e-2)
    assert_gradients(gradients, want_gradients, 5e-2)


def run(case: Case, batch: dict[str, Tensor], aux: Tensor) -> tuple[Supervision, Tensor]:
    """Row sets and states [K, R, H]."""
    small = [batch[name] for name in ("input_ids", "loss_mask", "document", "top1")]
    plan = supervise(*small, case.drafter.t2d, case.recipe.ttt_steps)
    flat = [x.flatten(0, 1) for x in (aux, batch["input_ids"], batch["position"])]
    return plan, unroll(case.drafter, *flat, batch["document"], plan.rows, plan.index)


def test_gradients_equal_finite_differences_in_float64():
    """Along a random direction of aux and of every weight."""
    case = make_case([[7, 4], [9]], ttt_steps=3, seed=6, fc_norm=True, norm_output=True)
    drafter, batch = case.drafter.double(), case.batch
    aux = batch["aux"].double().requires_grad_()
    teacher = Teacher(batch["last"].double().flatten(0, 1), batch["lse"].double().flatten(), case.teacher_head.double())

    def loss() -> Tensor:
        plan, states = run(case, batch, aux)
        weight = 0.8 ** torch.arange(3, dtype=torch.float64) / batch["supervised_total"]
        weight = plan.supervised * weight[:, None]
        return head_and_loss(
            drafter.norm(states), drafter.lm_head.weight, teacher, plan.index, plan.active, weight
        ).loss

    loss().backward()
    for name, leaf in {"aux": aux, **dict(drafter.named_parameters())}.items():
        assert leaf.grad is not None, name
        direction = torch.randn(leaf.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        ends = []
        for step in (1e-5, -2e-5, 1e-5):  # there, to the other side, and back
            with torch.no_grad():
                leaf.add_(step * direction)
                ends.append(loss().item())
        slope = (ends[0] - ends[1]) / 2e-5
        assert slope == pytest.approx(float((leaf.grad * direction).sum()), rel=1e-5, abs=1e-8), name


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
