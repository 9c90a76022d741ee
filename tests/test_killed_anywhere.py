"""A training that is killed twenty times, at moments drawn at random, ends bit for bit as the unbroken one does."""

import random

import pytest
import torch
from scripts import killed, succeed
from test_killed import assert_equal
from tiny_job import settings
from whole_job import values_by_step

from eagle3.checkpoints import checkpoints
from eagle3.runlog.ledger import MARKER, read_rows

KILLS = 20
MOMENTS = {
    "eagle3.runlog.ledger:Ledger._append": 5,  # how many calls of it at most, so that a run is not at its end before
    "eagle3.module:DrafterModule.training_step": 5,
    "eagle3.module:DrafterModule.validation_step": 2,
    "torch.optim.adamw:AdamW.step": 4,
    "eagle3.checkpoints:Checkpoints._complete": 2,
    "eagle3.checkpoints:Checkpoints._prune": 2,
    "eagle3.checkpoints:save_drafter": 2,
    "eagle3.checkpoints:publish": 2,
    "eagle3.checkpoints:sync": 12,
    "pathlib:Path.replace": 8,
    "os:fsync": 20,
}


@pytest.fixture(scope="module")
def both(folder, extracted):
    """The run directories of a training that was killed again and again, and of one that was not."""
    told = settings(data__val_every_steps=2, optimizer__epochs=8, hardware__threads=1)
    succeed("train.py", *told, "hydra.run.dir=unbroken", cwd=folder)
    drawn = random.Random(0)
    for _ in range(KILLS):
        target = drawn.choice(list(MOMENTS))
        moment = target, drawn.randint(1, MOMENTS[target]), drawn.choice(["before", "after"])
        killed("train.py", *told, "hydra.run.dir=anywhere", cwd=folder, die=moment)
    succeed("train.py", "resume=anywhere", cwd=folder)
    return folder / "anywhere", folder / "unbroken"


def test_the_curves_are_the_same(both):
    for split in ("train", "val"):  # losses, learning rates and gradient norms of the same data
        ours, theirs = (values_by_step(path, split) for path in both)
        assert ours == theirs and len(ours) > 10


def test_weights_and_optimizer_are_the_same(both):
    last = [checkpoints(path)[-1] for path in both]
    assert last[0].step == last[1].step and last[0].best_step == last[1].best_step
    states = [torch.load(checkpoint.trainer_state, weights_only=True) for checkpoint in last]
    for part in ("state_dict", "optimizer_states"):
        assert_equal(states[0][part], states[1][part])
    names = ("model.safetensors", "config.json")
    assert all((last[0].path / name).read_bytes() == (last[1].path / name).read_bytes() for name in names)


def test_every_row_of_every_attempt_is_kept(both):
    rows = read_rows(both[0] / "metrics.jsonl")
    assert [row.seq for row in rows] == list(range(1, len(rows) + 1))
    assert len({row.attempt for row in rows}) > KILLS // 2 and any(row.split == MARKER for row in rows)
