"""kill -9 at every stage, then the same command: nothing finished is done again, and the result is bit for bit that
of an unbroken run."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from scripts import killed, succeed
from tiny_job import settings
from whole_job import read_index, values_by_step

from eagle3.checkpoints import checkpoints
from eagle3.runlog.wandb_log import read_wandb
from extract.store import verify


@pytest.fixture(scope="module")
def interrupted_store(folder, extracted):
    """A store that was killed five times: in generation, capture (twice) and the teacher pass (twice)."""
    told = settings(store="killed")
    store = folder / "killed"
    seen = []

    def snapshot():
        journal = (store / "responses.jsonl").read_bytes()
        files = {f.name: f.stat().st_mtime_ns for f in (store / "shards").glob("0*.safetensors")}
        seen.append((journal, files))

    for target, number in (
        ("extract.journal:Journal.append", 3),  # one batch is on disk; the second was generated and is lost
        ("extract.store_queue:append_line", 1),  # a shard has its name, but no line in the index
        ("extract.store_queue:publish", 2),  # one shard is done, the second is not
        ("extract.teacher:append_line", 1),  # a teacher file has its name, but no line
        ("extract.teacher:append_line", 2),  # one teacher file is done
    ):
        killed("extract.py", *told, cwd=folder, die=(target, number, "before"))
        snapshot()
    return store, seen, succeed("extract.py", *told, cwd=folder)


def test_a_killed_extraction_ends_in_the_same_store_bit_for_bit(folder, interrupted_store):
    store, _, _ = interrupted_store
    whole = folder / "store"
    assert (store / "responses.jsonl").read_bytes() == (whole / "responses.jsonl").read_bytes()
    assert [(line["sha256"], line["samples"]) for line in read_index(store)] == [
        (line["sha256"], line["samples"]) for line in read_index(whole)
    ]
    assert [line["sha256"] for line in read_index(store, "teacher.jsonl")] == [
        line["sha256"] for line in read_index(whole, "teacher.jsonl")
    ]
    manifests = [json.loads((path / "manifest.json").read_text()) for path in (store, whole)]
    assert manifests[0] == manifests[1]
    assert verify(store).faults == []


def test_a_killed_extraction_does_nothing_finished_again(interrupted_store):
    store, seen, last = interrupted_store
    journals = [journal for journal, _ in seen]
    assert journals[0].count(b"\n") == 8, "the first batch of 8 was journalled before the first kill"
    final = (store / "responses.jsonl").read_bytes()
    assert all(final.startswith(journal) for journal in journals)
    assert journals[1] == journals[-1] == final, "answered once"
    recorded = {line["file"] for name in ("index.jsonl", "teacher.jsonl") for line in read_index(store, name)}
    shards = [{name: at for name, at in files.items() if name in recorded} for _, files in seen]
    assert [len(files) for files in shards[2:4]] == [1, len(read_index(store)) + 1]
    now = {file.name: file.stat().st_mtime_ns for file in (store / "shards").iterdir()}
    for name, at in shards[2].items():
        assert now[name] == at, f"{name} was written again"
    first_teacher = read_index(store, "teacher.jsonl")[0]["file"]
    assert now[first_teacher] == shards[4][first_teacher]
    assert "capture │ done by an earlier run" in last.output


@pytest.fixture(scope="module")
def interrupted_training(folder, trained):
    """A training that was killed in a step, twice while it saved, and between saving and publishing."""
    run_dir = folder / "killed-training"
    output = []
    told = settings(hydra__run__dir=run_dir.name)
    left = []
    for target, number, when in (
        ("eagle3.record:Record._emit_train", 6, "after"),  # mid-epoch, two steps after the checkpoint at 4
        ("eagle3.checkpoints:Checkpoints._complete", 1, "before"),  # files are there, nothing says they are whole
        ("eagle3.checkpoints:publish", 2, "before"),  # checkpoint 8 is there, the link is older
        ("eagle3.checkpoints:sync", 5, "after"),  # checkpoint 12 is whole, but has no name yet
        ("eagle3.charts:draw", 1, "before"),  # trained, and not finished
    ):
        output.append(killed("train.py", *told, cwd=folder, die=(target, number, when)).output)
        if len(left) == 2:
            damaged_checkpoints(run_dir / "checkpoints")
        left.append([checkpoint.step for checkpoint in checkpoints(run_dir)])
    succeed("train.py", f"resume={run_dir.name}", cwd=folder)
    return run_dir, left, output


def damaged_checkpoints(folder: Path) -> None:
    """Of higher steps than any whole one: weights cut in half, no optimizer state, and nothing at all."""
    whole = folder / "step-000008"
    for step, file in ((97, "trainer.ckpt"), (98, "model.safetensors")):
        shutil.copytree(whole, folder / f"step-{step:06d}")
        damaged = folder / f"step-{step:06d}" / file
        damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2])
    (folder / "step-000097" / "trainer.ckpt").unlink()
    (folder / "step-000099").mkdir()


def test_a_killed_training_goes_on_from_its_last_whole_checkpoint(interrupted_training, trained):
    run_dir, left, output = interrupted_training
    for step, fault in ((97, "trainer.ckpt is missing"), (98, "model.safetensors has "), (99, "complete.json")):
        assert f"step-{step:06d} is no whole checkpoint ({fault}" in output[3]
    steps = json.loads((trained[0] / "summary.json").read_text())["steps"]
    assert [found[-1] for found in left] == [4, 4, 8, 8, steps]
    attempts: dict[int, list[int]] = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["split"] == "train":
            attempts.setdefault(row["attempt"], []).append(row["step"])
    assert attempts == {
        1: [1, 2, 3, 4, 5, 6],
        2: [5, 6, 7, 8],
        3: [5, 6, 7, 8],
        4: [9, 10, 11, 12],
        5: list(range(9, steps + 1)),
    }, "the last attempt found everything trained"


def test_a_killed_training_ends_in_the_same_drafter_bit_for_bit(interrupted_training, trained):
    run_dir, whole = interrupted_training[0], trained[0]
    for split in ("train", "val"):  # the same data, rates, noise and gradients in every step
        assert values_by_step(run_dir, split) == values_by_step(whole, split)
    ours, theirs = checkpoints(run_dir), checkpoints(whole)
    assert [c.path.name for c in ours] == [c.path.name for c in theirs], "saved at the same steps"
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.accept_len, mine.best_step, mine.best_accept_len) == (
            other.accept_len, other.best_step, other.best_accept_len,
        )  # fmt: skip
        assert (mine.path / "model.safetensors").read_bytes() == (other.path / "model.safetensors").read_bytes()
        states = [torch.load(c.trainer_state, weights_only=True) for c in (mine, other)]
        assert_equal(states[0]["state_dict"], states[1]["state_dict"])
        assert_equal(states[0]["optimizer_states"], states[1]["optimizer_states"])
    assert (run_dir / "drafter").resolve().name == (whole / "drafter").resolve().name
    assert not list((run_dir / "checkpoints").glob("*.tmp")), "what the kills left is cleared away"


def test_two_processes_go_on_after_a_kill_as_one_process_trains(folder, extracted):
    told = settings(hardware="cpu_x2", optimizer__batch_tokens=640, hydra__run__dir="two", tracking="offline")
    killed("train.py", *told, cwd=folder, die=("eagle3.record:Record._emit_train", 6, "after"))
    succeed("train.py", *told, cwd=folder)
    one = settings(optimizer__batch_tokens=640, hydra__run__dir="one")
    succeed("train.py", *one, cwd=folder)
    for split in ("train", "val"):
        ours, theirs = values_by_step(folder / "two", split), values_by_step(folder / "one", split)
        assert ours.keys() == theirs.keys()
        for step in ours:
            assert ours[step] == pytest.approx(theirs[step], rel=1e-3), (split, step)
    runs = [read_wandb(path) for path in (folder / "two").glob("wandb/offline-run-*/run-*.wandb")]
    assert sorted(run.exit_code is None for run in runs) == [False, True], "one W&B run an attempt, not a process"
    (whole,) = [run.rows for run in runs if run.exit_code == 0]
    assert [row["step"] for row in whole if "train/loss" in row] == sorted(values_by_step(folder / "two", "train"))
    states = [torch.load(checkpoints(folder / name)[-1].trainer_state, weights_only=True) for name in ("two", "one")]
    for mine, other in zip(*(s["optimizer_states"][0]["state"].values() for s in states), strict=True):
        torch.testing.assert_close(mine["exp_avg"], other["exp_avg"], rtol=1e-2, atol=1e-5)


def assert_equal(one, other):
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_equal(left, right)
    else:
        assert one == other
