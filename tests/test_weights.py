"""Tests of eagle3.weights, and of a training with each loss as the script runs it."""

import math

import pytest
from scripts import succeed
from tiny_job import settings

from eagle3.drafter import initialise
from eagle3.runlog import read_ledger
from eagle3.weights import show_weights, weights_of
from tests.batches import make_case
from tests.stepping import copies, steps_of, train, with_recipe


@pytest.mark.filterwarnings("ignore:You defined a .validation_step.")
def test_what_is_called_trained_moves_and_what_is_called_frozen_does_not():
    case = make_case([[12, 8], [20]], ttt_steps=2, fc_norm=True, seed=4)
    initialise(case.drafter, case.head, seed=0)
    case = with_recipe(case, lr=3e-5, total_steps=20, warmup_ratio=0.25)
    module = case.module()
    told = weights_of(case.drafter, module.teacher_head)
    assert [w.trained for w in told] == sorted((w.trained for w in told), reverse=True)
    before = copies(case.drafter) | {"teacher_head": module.teacher_head.clone()}
    assert {w.name for w in told} == {name for name in before if not name.startswith("rotary.")}
    train(module, steps_of(case.batch, 20), precision="bf16-mixed")
    after = copies(case.drafter) | {"teacher_head": module.teacher_head}
    for weight in told:
        assert weight.shape == before[weight.name].shape and weight.numbers == before[weight.name].numel()
        assert (after[weight.name] != before[weight.name]).any() == weight.trained, weight.name


def test_the_table_names_every_tensor_in_80_columns(capsys):
    case = make_case([[4]], fc_norm=True)
    show_weights(case.drafter, case.teacher_head)
    lines = capsys.readouterr().out.splitlines()
    told = weights_of(case.drafter, case.teacher_head)
    assert max(map(len, lines)) <= 80 and len(lines) == len(told) + 5
    trained = sum(w.numbers for w in told if w.trained)
    assert f"Weights: {trained:,} trained, " in lines[0]
    [row] = [line for line in lines if "midlayer.self_attn.k_proj.weight" in line]
    assert "12 x 24" in row and "trained" in row and "288" in row
    [row] = [line for line in lines if " embedding " in line]
    assert "9 x 12" in row and "frozen" in row and "108" in row


def test_a_training_shows_the_table_before_its_first_step(trained):
    _, done = trained
    assert 0 <= done.output.index("Weights: ") < done.output.index("train: ")
    assert "\x1b" not in done.output, "plain where it is no terminal"


@pytest.mark.parametrize("loss", ["lk_alpha", "lk_lambda", "tv"])
def test_the_script_trains_with_each_loss(folder, extracted, loss):
    told = settings(drafter__loss=loss, optimizer__epochs=1, hydra__run__dir=loss)
    succeed("train.py", *told, cwd=folder)
    losses = [row.values["loss"] for row in read_ledger(folder / loss) if row.split == "train"]
    assert len(losses) > 1 and all(math.isfinite(value) and value > 0 for value in losses)
    assert (folder / loss / "drafter" / "model.safetensors").exists()
