import copy
import json
import os
import resource
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError
from scripts import succeed
from tiny import tiny_verifier
from tiny_drafter import ORIGIN, tiny_drafter
from tiny_job import settings, write_inputs
from tiny_store import in_child
from transformers import AutoModelForCausalLM

from eagle3 import checkpoints as module
from eagle3.best import best_validation
from eagle3.checkpoints import KEEP, Checkpoints, checkpoints, is_published, newest_sound
from eagle3.export.directory import load_drafter
from eagle3.runlog.ledger import Row


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    path = tiny_verifier(tmp_path_factory.mktemp("v"))
    return tiny_drafter(AutoModelForCausalLM.from_pretrained(path), always=[0, 1, 2])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The run directory of a real training with six validations."""
    folder = tmp_path_factory.mktemp("trained")
    write_inputs(folder)
    told = settings(
        extraction__max_new_tokens=16, optimizer__epochs=2, data__val_every_steps=1, hydra__run__dir="run",
        extraction__limit=12,
    )  # fmt: skip
    succeed("extract.py", *[t for t in told if not t.startswith("hydra.")], cwd=folder)
    succeed("train.py", *told, cwd=folder)
    return folder / "run"


class Trainer(SimpleNamespace):
    """What the callback asks of Lightning's Trainer."""

    is_global_zero = True

    def save_checkpoint(self, path):
        torch.save({"step": self.global_step, "filler": torch.zeros(20_000)}, path)


class Saving:
    """A training's saves, without the training."""

    def __init__(self, run_dir, drafter, start=None):
        self.record = SimpleNamespace(start_step=start.step if start else 0, last_val={})
        self.run_dir, self.module = run_dir, SimpleNamespace(drafter=drafter)
        self.callback = Checkpoints(run_dir, self.record, start, ORIGIN)

    def __call__(self, step, accept_len, loss=2.0):
        self.record.last_val = {"accept_len": accept_len, "loss": loss}
        self.callback.on_validation_end(Trainer(global_step=step - self.record.start_step), self.module)

    def names(self):
        return sorted(path.name for path in (self.run_dir / "checkpoints").iterdir())

    def best(self):
        return (self.run_dir / "drafter").resolve().name


@pytest.fixture
def save(tmp_path, drafter):
    return Saving(tmp_path, drafter)


def test_a_checkpoint_is_a_drafter_directory_that_says_it_is_whole(save, drafter):
    save(3, 1.5)
    (found,) = checkpoints(save.run_dir)
    assert (found.step, found.accept_len, found.best_step, found.best_accept_len) == (3, 1.5, 3, 1.5)
    facts = json.loads((found.path / "complete.json").read_text())
    files = {path.name: path.stat().st_size for path in found.path.iterdir() if path.name != "complete.json"}
    assert facts["bytes"] == files and set(files) == {"config.json", "model.safetensors", "trainer.ckpt"}
    again = load_drafter(save.run_dir / "drafter", drafter.embedding)
    assert torch.equal(again.lm_head.weight, drafter.lm_head.weight.bfloat16().float())


def test_the_best_is_published_by_acceptance_and_never_pruned(save):
    published = []
    for step, accept_len in enumerate([1.2, 1.6, 1.4, 1.6, 1.5, 1.3], start=1):
        save(step, accept_len)
        published.append(save.best())
    assert published == ["step-000001", *["step-000002"] * 5], "a later equal one does not replace it"
    assert save.names() == ["step-000002", "step-000005", "step-000006"]
    assert len(save.names()) == KEEP + 1


def test_names_hold_the_step_alone_and_no_directory_is_left_over(save):
    for step in range(1, 6):
        save(step, 1 + step / 7)
    assert save.names() == ["step-000004", "step-000005"]
    assert not [path for path in save.run_dir.rglob("*") if path.is_dir() and path.parent.name.startswith("step-")]
    assert {path.name for path in save.run_dir.iterdir()} == {"checkpoints", "drafter"}


def test_a_crash_at_any_moment_of_a_save_leaves_the_former_checkpoint_the_newest(save, monkeypatch):
    save(1, 1.5)
    whole = module.sync
    left = []
    for crash in range(1, 8):
        calls = []

        def failing(path, calls=calls, crash=crash):
            calls.append(path)
            if len(calls) == crash:
                raise OSError("power cut")
            whole(path)

        monkeypatch.setattr(module, "sync", failing)
        try:
            save(2, 1.6)
            left.append("saved")
        except OSError:
            left.append([c.step for c in checkpoints(save.run_dir)])
        assert save.best() == ("step-000002" if left[-1] == "saved" else "step-000001")
    # Four files and their directory are on disk before the name is given; then the checkpoints' directory is.
    assert left == [*[[1]] * 5, [1, 2], "saved"]


def test_a_crash_before_complete_json_leaves_no_checkpoint(save, monkeypatch):
    save(1, 1.5)

    def dying(self, path):
        raise RuntimeError("killed")

    monkeypatch.setattr(Trainer, "save_checkpoint", dying)
    with pytest.raises(RuntimeError):
        save(2, 1.6)
    assert [c.step for c in checkpoints(save.run_dir)] == [1]
    assert save.names() == ["step-000001", "step-000002.tmp"]
    monkeypatch.undo()
    save(2, 1.6)
    assert save.names() == ["step-000001", "step-000002"], "what the crash left is replaced"


def test_going_on_publishes_what_a_crash_left_unpublished(save, drafter):
    save(1, 1.5)
    save(2, 1.7)
    (save.run_dir / "drafter").unlink()
    (save.run_dir / "drafter").symlink_to("checkpoints/step-000001")
    going_on = Saving(save.run_dir, drafter, checkpoints(save.run_dir)[-1])
    for is_global_zero in (False, True):
        going_on.callback.on_fit_start(SimpleNamespace(is_global_zero=is_global_zero), going_on.module)
        assert going_on.best() == ("step-000002" if is_global_zero else "step-000001"), "one process writes the link"
    assert going_on.best() == "step-000002"
    going_on(3, 1.6)
    assert (going_on.best(), checkpoints(save.run_dir)[-1].best_accept_len) == ("step-000002", 1.7)


def test_half_checkpoints_are_passed_over_by_name(save, caplog):
    for step in (1, 2):
        save(step, 1.5)
    folder = save.run_dir / "checkpoints"
    for name in ("step-000011", "step-000012", "step-000013", "step-000014.tmp"):
        shutil.copytree(folder / "step-000002", folder / name)
    (folder / "step-000011" / "trainer.ckpt").unlink()
    weights = folder / "step-000012" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (folder / "step-000013" / "complete.json").write_text('{"step": 13')
    (folder / "step-000015").mkdir()
    assert [c.step for c in checkpoints(save.run_dir)] == [1, 2]
    told = [record.message for record in caplog.records]
    for name, fault in (
        ("step-000011", "trainer.ckpt is missing"),
        ("step-000012", "model.safetensors has "),
        ("step-000013", "complete.json"),
        ("step-000015", "complete.json"),
    ):
        assert any(name in line and fault in line and "passed over" in line for line in told), name
    assert len(told) == 4


def test_a_checkpoint_with_one_wrong_bit_is_passed_over_by_name(save, caplog):
    for step in (1, 2):
        save(step, 1.5)
    state = checkpoints(save.run_dir)[-1].trainer_state
    data = bytearray(state.read_bytes())
    data[len(data) // 2] ^= 1
    state.write_bytes(data)
    assert newest_sound(save.run_dir).step == 1
    assert f"{state.parent} is damaged (trainer.ckpt: " in caplog.text and "fails its checksum" in caplog.text
    state.write_bytes(data[:-30] + bytes(30))
    assert newest_sound(save.run_dir).step == 1
    assert newest_sound(save.run_dir / "nothing") is None


def wrong_bit(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "trainer.ckpt"])
@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (wrong_bit, "is damaged ("),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "is no whole checkpoint ("),
        (Path.unlink, "is no whole checkpoint ("),
    ],
)
def test_a_checkpoint_of_which_any_file_was_changed_is_passed_over_by_name(save, caplog, file, damage, told):
    for step in (1, 2):
        save(step, 1 + step / 10)
    newest = checkpoints(save.run_dir)[-1].path
    damage(newest / file)
    assert newest_sound(save.run_dir).step == 1
    (line,) = caplog.messages
    assert line.startswith(f"{newest} {told}{file}") and line.endswith("and is passed over")
    assert is_published(save.run_dir) == (file == "trainer.ckpt" and "damaged" in told), "of no use to who decodes"


def test_a_damaged_best_checkpoint_gives_way_to_the_best_that_is_left(save, drafter, caplog):
    for step, accept_len in enumerate([1.2, 1.9, 1.5, 1.4], start=1):
        save(step, accept_len)
    wrong_bit(save.run_dir / "checkpoints" / "step-000002" / "model.safetensors")
    found = newest_sound(save.run_dir)
    assert (found.step, found.best_step, found.best_accept_len) == (4, 3, 1.5)
    assert "the best checkpoint, of step 2, is damaged (model.safetensors: not the bytes" in caplog.text
    going_on = Saving(save.run_dir, drafter, found)
    going_on.callback.on_fit_start(Trainer(), going_on.module)
    assert going_on.best() == "step-000003"
    going_on(5, 1.3)
    assert going_on.names() == ["step-000003", "step-000004", "step-000005"]


def test_of_equal_lengths_the_lowest_validation_loss_is_the_best_and_then_the_earliest(save, drafter):
    nan = float("nan")
    published = []
    for step, loss in enumerate([nan, 2.0, 2.0, 1.5, nan, 1.7], start=1):
        save(step, 1.5, loss)
        published.append(int(save.best()[-1]))
    assert published == [1, 2, 2, 4, 4, 4]
    going_on = Saving(save.run_dir, drafter, newest_sound(save.run_dir))
    going_on(7, 1.5, 1.6)
    assert going_on.best() == "step-000004", "the loss of the best is kept over a resume"
    rows = [Row("r", 1, n, "val", n, 0.0, {"accept_len": 1.5, "loss": loss})
            for n, loss in enumerate([nan, 2.0, 2.0, 1.5, nan, 1.7], start=1)]  # fmt: skip
    assert best_validation(rows).step == 4 and best_validation(rows[:3]).step == 2, "tables and charts agree"


def test_the_newest_is_that_of_the_highest_step_whatever_its_name_or_time(save):
    for step in (999_999, 1_000_000):
        save(step, 1.5)
    os.utime(save.run_dir / "checkpoints" / "step-999999", (2**31, 2**31))
    assert [c.step for c in checkpoints(save.run_dir)] == [999_999, 1_000_000]


def _save_with_little_room(run_dir, drafter, done):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
    saving = Saving(run_dir, drafter, checkpoints(run_dir)[-1])
    try:
        saving(2, 9.0)
    except (OSError, RuntimeError, SafetensorError) as error:
        done.write_text(str(error))


def test_a_full_disk_leaves_the_former_checkpoint_usable(save, drafter, tmp_path):
    save(1, 1.5)
    largest = max(path.stat().st_size for path in (save.run_dir / "checkpoints" / "step-000001").iterdir())
    assert largest > 60_000, "or the limit would not be met"
    said = tmp_path / "said"
    in_child(lambda: _save_with_little_room(save.run_dir, drafter, said))
    assert said.exists(), "the save did not fail"
    assert [c.step for c in checkpoints(save.run_dir)] == [1]
    assert save.best() == "step-000001"
    load_drafter(save.run_dir / "drafter", drafter.embedding)
    torch.load(checkpoints(save.run_dir)[-1].trainer_state, weights_only=True)


def test_a_compiled_drafter_is_saved_under_the_same_names(save, drafter):
    names = list(drafter.state_dict())
    compiled = copy.deepcopy(drafter)
    compiled.compile(backend="eager")
    assert list(compiled.state_dict()) == names
    Saving(save.run_dir, compiled)(1, 1.5)
    plain = load_drafter(save.run_dir / "drafter", drafter.embedding)
    assert list(plain.state_dict()) == names and not any("_orig_mod" in name for name in names)
    compiled.load_state_dict(plain.state_dict())


def test_trainer_state_loads_with_weights_only_and_holds_no_verifier(trained):
    found = checkpoints(trained)[-1]
    state = torch.load(found.trainer_state, weights_only=True)
    names = list(state["state_dict"])
    assert names and all(name.startswith("drafter.") for name in names)
    assert not [name for name in names if "embed" in name or "teacher" in name]
    assert not any("hparams" in key or "hyper_parameters" in key for key in state)
    trainable = [t for name, t in state["state_dict"].items() if t.is_floating_point()]
    weights_and_moments = 3 * sum(t.numel() * t.element_size() for t in trainable)
    assert found.trainer_state.stat().st_size < 1.3 * weights_and_moments
    moments = state["optimizer_states"][0]["state"]
    assert len(moments) == len(trainable) and all({"exp_avg", "exp_avg_sq", "step"} <= set(m) for m in moments.values())
    assert all(int(m["step"]) == found.step for m in moments.values())


def test_a_training_keeps_the_newest_and_the_best(trained):
    summary = json.loads((trained / "summary.json").read_text())
    kept = {c.step for c in checkpoints(trained)}
    assert kept == {summary["steps"] - 1, summary["steps"], summary["best_step"]}
    assert sorted(path.name for path in (trained / "checkpoints").iterdir()) == sorted(f"step-{s:06d}" for s in kept)


def test_one_that_a_kill_left_half_written_is_named_where_a_run_goes_on(save, caplog):
    for step in (1, 2):
        save(step, 1.5)
    folder = save.run_dir / "checkpoints"
    (folder / "step-000002").rename(folder / "step-000002.tmp")
    assert newest_sound(save.run_dir).step == 1
    assert "step-000002.tmp was still being written when its process died" in caplog.text
