"""Tests of a training whose weights are sharded over two processes (FSDP2): it is killed, goes on, and ends as one."""

import pytest
import torch
from scripts import killed, run, succeed
from tiny_job import settings
from whole_job import values_by_step

from eagle3.checkpoints import checkpoints
from eagle3.export.directory import load_drafter, read_shape
from eagle3.module import parameter_groups


@pytest.fixture(scope="module")
def runs(folder, extracted):
    """`sharded`, killed after its sixth step and resumed, and `alone`, by one process without a break."""
    told = settings(hardware="cpu_x2_fsdp", optimizer__batch_tokens=640, hydra__run__dir="sharded")
    killed("train.py", *told, cwd=folder, die=("eagle3.record:Record._emit_train", 6, "after"))
    first = checkpoints(folder / "sharded")
    assert first and first[-1].step == 4
    succeed("train.py", "resume=sharded", cwd=folder)
    succeed("train.py", *settings(optimizer__batch_tokens=640, hydra__run__dir="alone"), cwd=folder)
    return folder / "sharded", folder / "alone"


@pytest.mark.parametrize("split", ["train", "val"])
def test_sharded_training_goes_on_after_a_kill_as_one_process_trains(runs, split):
    ours, theirs = (values_by_step(run_dir, split) for run_dir in runs)
    assert ours.keys() == theirs.keys() and len(ours) > 2
    for step in ours:
        assert ours[step] == pytest.approx(theirs[step], rel=1e-3), step


def test_its_checkpoint_is_one_servable_directory_with_one_whole_state(runs):
    ours, theirs = (checkpoints(run_dir)[-1] for run_dir in runs)
    assert sorted(p.name for p in ours.path.iterdir()) == sorted(p.name for p in theirs.path.iterdir())
    shape = read_shape(ours.path)
    embedding = torch.zeros(shape.vocab_size, shape.hidden_size)
    ours, theirs = (torch.load(c.trainer_state, weights_only=True) for c in (ours, theirs))
    drafter = load_drafter(runs[0] / "drafter", embedding)
    for name, weight in drafter.state_dict().items():
        assert weight.shape == ours["state_dict"][f"drafter.{name}"].shape
        torch.testing.assert_close(ours["state_dict"][f"drafter.{name}"], theirs["state_dict"][f"drafter.{name}"],
                                   rtol=1e-2, atol=1e-4)  # fmt: skip
    moments, others = (means_by_name(state, drafter) for state in (ours, theirs))
    for name, weight in drafter.named_parameters():
        assert moments[name].dtype == torch.float32 and moments[name].shape == weight.shape
        torch.testing.assert_close(moments[name], others[name], rtol=1e-2, atol=1e-5)


def means_by_name(state, drafter):
    """Adam's running means. One process numbers the weights by optimizer group, FSDP by their order in the module."""
    [optimizer] = state["optimizer_states"]
    numbers = [number for group in optimizer["param_groups"] for number in group["params"]]
    groups = parameter_groups(drafter, 0.0)
    names = {id(p): name for name, p in drafter.named_parameters()}
    weights = [p for group in groups for p in group["params"]]
    return {names[id(p)]: optimizer["state"][n]["exp_avg"] for p, n in zip(weights, numbers, strict=True)}


@pytest.mark.parametrize("hardware", ["cpu", "cpu_x2"])
def test_another_number_of_processes_or_another_strategy_is_refused_by_name(folder, runs, hardware):
    told = settings(hardware=hardware, optimizer__batch_tokens=640, hydra__run__dir="sharded")
    done = run("train.py", *told, cwd=folder)
    assert done.code == 1
    assert "belongstoanotherrun" in done.words() and "hardware.strategy:fsdpthere" in done.words()
    assert ("hardware.devices:2there,1now" in done.words()) == (hardware == "cpu")
