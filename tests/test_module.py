"""Tests of eagle3.module: optimizer steps through Lightning's Trainer, as train.py runs them."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle3.drafter import initialise
from eagle3.metrics import SUMS, rates
from eagle3.module import parameter_groups
from eagle3.schedule import lr_at
from tests.batches import make_case, with_teacher
from tests.stepping import Watch, copies, orthonormal_head, steps_of, train, with_recipe

pytestmark = pytest.mark.filterwarnings("ignore:You defined a .validation_step.")
LENGTHS = [[9, 5], [2], [14], [4, 4, 3]]
TRAINED = {
    "fc.weight", "norm.weight", "lm_head.weight", "fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight",
    *(f"midlayer.{n}.weight" for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")),
    *(f"midlayer.self_attn.{n}_proj.weight" for n in "qkvo"),
    *(f"midlayer.mlp.{n}_proj.weight" for n in ("gate", "up", "down")),
}  # fmt: skip


def test_every_trainable_tensor_moves_within_20_bf16_steps_and_no_frozen_one_does():
    case = make_case([[12, 8], [20]], ttt_steps=2, fc_norm=True, seed=4)
    initialise(case.drafter, case.head, seed=0)
    # So small a rate that a bf16 weight of 1 would stay where it is.
    case = with_recipe(case, lr=3e-5, total_steps=20, warmup_ratio=0.25)
    module = case.module()
    before, head = copies(case.drafter), module.teacher_head.clone()
    train(module, steps_of(case.batch, 20), precision="bf16-mixed")
    moved = {name for name, tensor in copies(case.drafter).items() if not torch.equal(tensor, before[name])}
    assert moved == TRAINED
    assert torch.equal(module.teacher_head, head)


def test_weights_and_optimizer_state_are_float32_under_bf16_mixed():
    case = make_case([[12]], ttt_steps=2)
    module = case.module()
    train(module, steps_of(case.batch, 1), precision="bf16-mixed")
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    optimizer = module.trainer.optimizers[0]
    state = [t for of_one in optimizer.state.values() for n, t in of_one.items() if n != "step"]
    assert state and {t.dtype for t in state} == {torch.float32}


def test_optimizer_holds_the_drafter_alone_and_norms_do_not_decay():
    case = make_case([[5]], fc_norm=True)
    module = case.module()
    assert {name for name, p in module.named_parameters() if p.requires_grad} == {f"drafter.{n}" for n in TRAINED}
    matrices, norms = parameter_groups(case.drafter, 0.1)
    assert (matrices["weight_decay"], norms["weight_decay"]) == (0.1, 0.0)
    names = {id(p): name for name, p in case.drafter.named_parameters()}
    assert {names[id(p)] for p in norms["params"]} == {n for n in TRAINED if "norm" in n}
    assert {names[id(p)] for p in matrices["params"]} == {n for n in TRAINED if "norm" not in n}


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_micro_batches_give_the_update_and_the_metrics_of_one_batch(micro_batches: int):
    """Noise is on, supervised tokens are spread unevenly, and one row has none."""

    def run(parts: int) -> tuple[dict[str, Tensor], Watch]:
        case = make_case(LENGTHS, padding=1, seed=8)
        # A large eps keeps Adam from blowing up the rounding of gradients that all but cancel.
        case = with_recipe(case, micro_batches=parts, noise_std=0.1, lr=0.05, eps=1e-2, total_steps=3)
        watch = train(case.module(), steps_of(case.batch, 3, parts))
        return copies(case.drafter), watch

    (want, one), (found, parts) = run(1), run(micro_batches)
    for name, tensor in want.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6, msg=name)
    assert len(one.sums) == len(parts.sums) == 3
    for ours, theirs in zip(parts.sums, one.sums, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-8)
    assert not torch.equal(want["fc.weight"], make_case(LENGTHS, padding=1, seed=8).drafter.fc.weight)


def test_training_adds_noise_to_aux_alone_by_seed_step_and_row():
    def seen(**recipe: Any) -> list[Tensor]:
        case = with_recipe(make_case([[6], [6]], seed=8), **recipe)
        taken: list[Tensor] = []
        case.drafter.fc.register_forward_pre_hook(lambda _, given: taken.append(given[0].detach().clone()))
        train(case.module(), steps_of(case.batch, 2))
        return [aux - case.batch["aux"].flatten(0, 1) for aux in taken]

    first, second = seen(noise_std=0.05, seed=1)
    assert 0.04 < float(first.abs().max()) <= 0.0501
    assert not torch.allclose(first, second) and not torch.allclose(first[:6], first[6:])
    assert torch.equal(seen(noise_std=0.05, seed=1)[0], first)
    assert not torch.allclose(seen(noise_std=0.05, seed=2)[0], first)
    assert not seen(noise_std=0.0)[0].any()


def test_validation_sums_over_micro_batches():
    case = make_case(LENGTHS, padding=2, seed=8)
    case = with_recipe(case, noise_std=0.5)  # not in validation
    whole, parts = case.module(), case.module()
    whole.validation_step(steps_of(case.batch, 1)[0], 0)
    for batch in steps_of(case.batch, 1, 4):
        parts.validation_step(batch, 0)
    assert torch.equal(parts.val_visits, whole.val_visits) and whole.val_visits[0] > 0
    torch.testing.assert_close(parts.val_sums, whole.val_sums, rtol=1e-6, atol=0)
    quiet = with_recipe(case, noise_std=0.0).module()
    quiet.validation_step(steps_of(case.batch, 1)[0], 0)
    assert torch.equal(quiet.val_sums, whole.val_sums)


def test_sampled_responses_are_not_replayed():
    case = make_case(LENGTHS, seed=8)
    module = case.module()
    module.validation_step(case.batch | {"greedy": torch.zeros_like(case.batch["greedy"])}, 0)
    assert not module.val_visits.any() and module.val_sums.any()


def test_padding_and_prompts_do_not_thin_out_the_loss():
    case = make_case([[9]], seed=8)
    batch = case.batch | {"loss_mask": torch.ones_like(case.batch["loss_mask"])}
    batch = with_teacher(batch, case.drafter, case.head, 3)
    module = case.module()
    _, want = module(batch, batch["aux"])
    wide = make_case([[9, 30], [4]], padding=6, seed=3).batch
    wide = wide | {"loss_mask": torch.zeros_like(wide["loss_mask"])}
    for name in ("input_ids", "loss_mask", "aux", "last"):
        wide[name][0, :9] = batch[name][0]
    wide = with_teacher(wide, case.drafter, case.head, 3)
    _, found = module(wide, wide["aux"])
    assert want.loss > 0
    torch.testing.assert_close(found.loss, want.loss, rtol=1e-5, atol=0)


def test_training_mode_is_back_after_every_validation(monkeypatch: pytest.MonkeyPatch):
    case = make_case(LENGTHS, seed=8)
    module, modes = case.module(), []
    for name in ("training_step", "validation_step"):
        plain = getattr(module, name)

        def noted(*given: Any, name: str = name, plain: Any = plain) -> Any:
            modes.append((name, case.drafter.training, torch.is_grad_enabled()))
            return plain(*given)

        monkeypatch.setattr(module, name, noted)
    train(module, steps_of(case.batch, 3), val=steps_of(case.batch, 1))
    assert modes == 3 * [("training_step", True, True), ("validation_step", False, False)]


def test_a_forward_does_not_carry_the_last_step_s_gradients(monkeypatch: pytest.MonkeyPatch):
    case = with_recipe(make_case(LENGTHS, seed=8), micro_batches=2)
    module, held = case.module(), []
    plain = module.forward

    def noted(*given: Any) -> Any:
        held.append([p.grad is not None for p in case.drafter.parameters()])
        return plain(*given)

    monkeypatch.setattr(module, "forward", noted)
    train(module, steps_of(case.batch, 3, 2))
    weights = len(list(case.drafter.parameters()))
    assert held == 3 * [weights * [False], weights * [True]], "the second micro-batch adds to the first one's"


def test_clips_to_the_global_norm_and_keeps_the_norm_before():
    case = with_recipe(make_case(LENGTHS, seed=8), clip_norm=0.01, lr=1e-9)
    module = case.module()
    watch = train(module, steps_of(case.batch, 1))
    assert watch.norms == [pytest.approx(0.01, rel=1e-3)]
    loose = with_recipe(case, clip_norm=1e9).module()
    [free] = train(loose, steps_of(case.batch, 1)).norms
    assert free > 0.1 and module.grad_norm == pytest.approx(free, rel=1e-3)
    assert loose.grad_norm == pytest.approx(free, rel=1e-5)


def test_learning_rate_is_that_of_the_batch_s_own_step():
    """From step 4 on, as after a resume, with two micro-batches a step."""
    recipe = {"lr": 1e-2, "total_steps": 9, "warmup_ratio": 0.3, "floor_ratio": 0.1, "micro_batches": 2}
    case = with_recipe(make_case(LENGTHS, seed=8), **recipe)
    module = case.module()
    watch = train(module, steps_of(case.batch, 9, 2)[8:])
    want = [lr_at(s, peak=1e-2, total_steps=9, warmup_ratio=0.3, floor_ratio=0.1) for s in range(4, 9)]
    assert watch.rates == pytest.approx(want)
    assert module.learning_rate(4) == want[0]


def test_a_step_without_any_supervised_token_between_others_stays_finite_and_is_counted():
    case = make_case(LENGTHS, seed=8)
    module = case.module()
    first, empty, last = steps_of(case.batch, 3)
    empty |= {"loss_mask": torch.zeros_like(empty["loss_mask"]), "supervised_total": torch.zeros(3, dtype=torch.long)}
    watch = train(module, [first, empty, last])
    supervised = [int(s[SUMS.index("supervised")].sum()) for s in watch.sums]
    assert supervised[0] > 0 and supervised[1] == 0 and supervised[2] > 0
    assert watch.norms[0] > 0 and watch.norms[1] == 0.0 and watch.norms[2] > 0
    assert rates(watch.sums[1], 0.8) == {"loss": 0.0}
    assert all(p.isfinite().all() for p in module.parameters())


def test_replies_of_undraftable_tokens_give_no_loss_and_count_as_misses():
    case = orthonormal_head(make_case([[10], [12]], vocab_size=9, draft_vocab_size=4, seed=8))
    undraftable = (~case.drafter.t2d).nonzero().squeeze(1)
    ids = undraftable[case.batch["input_ids"] % len(undraftable)]
    mask = torch.ones_like(case.batch["loss_mask"])
    batch = case.batch | {"input_ids": ids, "loss_mask": mask, "last": 9.0 * case.head[ids.roll(-1, 1)]}
    batch = with_teacher(batch, case.drafter, case.head, 3)
    assert torch.equal(batch["top1"], ids.roll(-1, 1))
    module = case.module()
    _, out = module(batch, batch["aux"])
    out.loss.backward()
    assert all(not p.grad.any() for p in case.drafter.parameters() if p.grad is not None)
    module.validation_step(batch, 0)
    found = rates(module.val_sums, 0.8)
    assert out.loss.item() == 0.0 and "loss_0" not in found
    assert found["coverage"] == 0.0 and found["acc_0"] == 0.0 and found["accept_len_all_rows"] == 1.0


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_a_gradient_that_is_not_finite_leaves_weights_and_moments_as_they_are(poison: float):
    """1e30 is finite, the norm over it is not."""
    case = make_case(LENGTHS, seed=8)
    module, without = case.module(), make_case(LENGTHS, seed=8).module()
    batches = steps_of(case.batch, 3)
    case.drafter.norm.weight.register_hook(lambda g: torch.full_like(g, poison) if module.step == 1 else g)
    watch = train(module, batches)
    train(without, [batches[0], batches[2]])
    assert [math.isfinite(norm) for norm in watch.norms] == [True, False, True], "the step has a row of its own"
    for name, weight in copies(without.drafter).items():
        assert torch.equal(copies(module.drafter)[name], weight), name
    assert {int(state["step"]) for state in module.trainer.optimizers[0].state.values()} == {2}
