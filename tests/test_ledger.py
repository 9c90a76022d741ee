import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.runlog.ledger import Declared, Ledger, Row, RowCheck, read_ledger, read_rows, series

ROOT = Path(__file__).resolve().parents[1]
DECLARED = {
    "train": Declared(frozenset({"loss", "tokens"}), frozenset({"acc_0"}), integer=frozenset({"tokens"})),
    "val": Declared(frozenset({"accept_len"})),
}
GOOD = {"loss": 2.5, "tokens": 7}


def open_ledger(folder, attempt=1, resumed_from_step=None):
    path = folder / "metrics.jsonl"
    return Ledger(path, DECLARED, run="r", attempt=attempt, resumed_from_step=resumed_from_step)


def test_a_row_is_one_json_line_with_every_field(tmp_path):
    ledger = open_ledger(tmp_path)
    ledger.emit("train", 1, GOOD)
    ledger.emit("val", 1, {"accept_len": 1.5})
    lines = (tmp_path / "metrics.jsonl").read_text().split("\n")  # before close: nothing waits in a buffer
    first, second = json.loads(lines[0]), json.loads(lines[1])
    assert lines[2:] == [""]
    assert list(first) == ["run", "attempt", "seq", "split", "step", "wall", "values"]
    assert first["values"] == {"loss": 2.5, "tokens": 7} and isinstance(first["values"]["tokens"], int)
    assert (first["seq"], second["seq"]) == (1, 2)
    assert second["split"] == "val" and abs(first["wall"] - time.time()) < 60


@pytest.mark.parametrize(
    ("split", "step", "values", "told"),
    [
        ("train", 1, {"loss": 1.0}, "missing \\['tokens'\\]"),
        ("train", 1, GOOD | {"los": 1.0}, "not declared \\['los'\\]"),
        ("test", 1, GOOD, "split 'test' was not declared"),
        ("train", 1, GOOD | {"loss": "2.5"}, "train/loss must be a number, got str"),
        ("train", 1, GOOD | {"loss": None}, "train/loss must be a number, got NoneType"),
        ("train", 1, GOOD | {"loss": True}, "train/loss must be a number, got bool"),
        ("train", 1, GOOD | {"loss": torch.tensor(1.0)}, "got Tensor .*item"),
        ("train", 1, GOOD | {"tokens": 7.5}, "train/tokens is declared a whole number"),
        ("train", 1.0, GOOD, "step must be a whole number"),
        ("train", -1, GOOD, "step must be a whole number"),
    ],
)
def test_a_wrong_row_is_refused_and_leaves_no_trace(tmp_path, split, step, values, told):
    ledger = open_ledger(tmp_path)
    with pytest.raises(ValueError, match=told):
        ledger.emit(split, step, values)
    assert read_rows(ledger.path) == []
    ledger.emit("train", 1, GOOD)  # the refused row did not use up its step


def test_a_step_comes_once_and_never_falls(tmp_path):
    ledger = open_ledger(tmp_path)
    ledger.emit("train", 3, GOOD)
    ledger.emit("val", 2, {"accept_len": 1.0})  # each split has its own steps
    with pytest.raises(ValueError, match="train step 3: doubled"):
        ledger.emit("train", 3, GOOD)
    with pytest.raises(ValueError, match="train step 2: after step 3"):
        ledger.emit("train", 2, GOOD)


def test_optional_metrics_may_be_absent_and_numpy_numbers_are_numbers(tmp_path):
    ledger = open_ledger(tmp_path)
    ledger.emit("train", 1, GOOD)
    ledger.emit("train", 2, {"loss": np.float32(0.5), "tokens": np.int64(3), "acc_0": 0.25})
    assert series(read_ledger(ledger.path), "train/acc_0") == ([2], [0.25])
    assert series(read_ledger(ledger.path), "train/tokens") == ([1, 2], [7, 3])


def test_nan_and_inf_are_stored_literally_and_counted(tmp_path):
    ledger = open_ledger(tmp_path)
    for step, loss in enumerate((math.nan, math.inf, -math.inf, np.float32("nan"), 1.0)):
        ledger.emit("train", step, GOOD | {"loss": loss})
    stored = [json.loads(line)["values"]["loss"] for line in ledger.path.read_text().splitlines()]
    assert stored == ["nan", "inf", "-inf", "nan", 1.0]
    assert ledger.nonfinite == {"train/loss": 4}
    values = series(read_ledger(ledger.path), "train/loss")[1]
    assert math.isnan(values[0]) and values[1:3] == [math.inf, -math.inf]


@settings(max_examples=200)
@given(st.dictionaries(st.text(min_size=1), st.floats() | st.integers(-(2**53), 2**53), max_size=5), st.text())
def test_any_row_reads_back_as_it_was(values, run):
    row = Row(run, 1, 1, "train", 0, 0.5, values)
    line = row.to_line()
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    back = Row.from_line(line)
    assert back.run == run
    assert all(back.values[k] == v or (math.isnan(back.values[k]) and math.isnan(v)) for k, v in values.items())


WRITER = """
import sys
from pathlib import Path
from eagle3.runlog.ledger import Declared, Ledger
path = Path(sys.argv[1])
ledger = Ledger(path, {"train": Declared(frozenset({"loss"}))}, run="r")
for step in range(10**9):
    ledger.emit("train", step, {"loss": step / 7})
    print(step, flush=True)
"""


def test_after_kill_9_every_acknowledged_row_is_there_and_the_next_attempt_goes_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for attempt in range(3):  # killed at three different moments
        folder = tmp_path / str(attempt)
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder / path.name)], stdout=subprocess.PIPE, text=True
        )
        said = [child.stdout.readline() for _ in range(50 + 37 * attempt)]
        child.send_signal(signal.SIGKILL)
        said += child.stdout.readlines()
        assert child.wait() == -signal.SIGKILL
        acknowledged = int(said[-1] if said[-1].endswith("\n") else said[-2])
        ledger = Ledger(
            folder / path.name,
            {"train": Declared(frozenset({"loss"}))},
            run="r",
            attempt=2,
            resumed_from_step=acknowledged,
        )
        ledger.emit("train", acknowledged + 1, {"loss": -1.0})
        ledger.close()
        steps, values = series(read_ledger(folder / path.name), "train/loss")
        assert steps == list(range(acknowledged + 2))
        assert values == [step / 7 for step in range(acknowledged + 1)] + [-1.0]


def test_a_torn_last_line_is_set_aside_and_told(tmp_path, caplog):
    ledger = open_ledger(tmp_path)
    ledger.emit("train", 1, GOOD)
    ledger.close()
    with ledger.path.open("ab") as file:
        file.write(b'{"run": "r", "att')
    assert len(read_rows(ledger.path)) == 1  # a reader beside a writer does not mind
    again = open_ledger(tmp_path, attempt=2, resumed_from_step=1)
    again.emit("train", 2, GOOD)
    again.close()
    assert (tmp_path / "metrics.torn").read_bytes() == b'{"run": "r", "att\n'
    assert "unfinished line of 17 bytes" in caplog.text and "metrics.torn" in caplog.text
    assert series(read_ledger(tmp_path), "train/loss")[0] == [1, 2]


def test_a_resumed_attempt_supersedes_later_rows_and_deletes_none(tmp_path, caplog):
    first = open_ledger(tmp_path)
    for step in range(1, 6):
        first.emit("train", step, GOOD | {"loss": float(step)})
    first.emit("val", 4, {"accept_len": 1.4})
    first.close()
    caplog.set_level("INFO")
    second = open_ledger(tmp_path, attempt=2, resumed_from_step=3)
    second.emit("train", 4, GOOD | {"loss": 40.0})
    second.close()
    assert "3 rows of earlier attempts are superseded" in caplog.text
    rows = read_ledger(tmp_path)
    assert series(rows, "train/loss") == ([1, 2, 3, 4], [1.0, 2.0, 3.0, 40.0])
    assert series(rows, "val/accept_len") == ([], [])
    everything = read_rows(tmp_path / "metrics.jsonl")
    assert [row.seq for row in everything] == list(range(1, 9)) and len(everything) == 6 + 1 + 1


def test_an_attempt_that_is_not_new_is_refused(tmp_path):
    ledger = open_ledger(tmp_path)
    ledger.emit("train", 1, GOOD)
    ledger.close()
    with pytest.raises(ValueError, match=r"already holds attempt 1: resume=RUN_DIR"):
        open_ledger(tmp_path)


def test_a_second_process_is_refused_and_the_lock_dies_with_its_owner(tmp_path):
    path = tmp_path / "metrics.jsonl"
    child = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    child.stdout.readline()
    try:
        with pytest.raises(ValueError, match="being written by another process"):
            open_ledger(tmp_path, attempt=2, resumed_from_step=0)
    finally:
        child.kill()
        child.communicate()
    open_ledger(tmp_path, attempt=2, resumed_from_step=0).close()


def test_reading_the_ledger_does_not_give_up_its_lock(tmp_path):
    ledger = open_ledger(tmp_path)
    ledger.emit("train", 1, GOOD)
    read_rows(ledger.path)
    code = f"""
from pathlib import Path
from eagle3.runlog.ledger import Ledger
Ledger(Path({str(ledger.path)!r}), {{}}, run="r", attempt=2, resumed_from_step=0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "being written by another process" in done.stderr


@pytest.mark.parametrize("damage", ["cut line", "lost line", "no json", "no row"])
def test_a_damaged_line_is_named(tmp_path, damage):
    ledger = open_ledger(tmp_path)
    for step in range(3):
        ledger.emit("train", step, GOOD)
    ledger.close()
    lines = ledger.path.read_bytes().split(b"\n")
    lines[1] = {"cut line": lines[1][:20], "lost line": None, "no json": b"?", "no row": b"[]"}[damage]
    ledger.path.write_bytes(b"\n".join(line for line in lines if line is not None))
    with pytest.raises(ValueError, match=r"metrics.jsonl:2 "):
        read_ledger(tmp_path)


def test_a_full_disk_raises_and_leaves_no_half_line(tmp_path, monkeypatch):
    ledger = open_ledger(tmp_path)
    ledger.emit("train", 1, GOOD)

    class FullDisk:
        """Takes ten bytes, then none."""

        def __init__(self, file):
            self.file, self.truncate, self.taken = file, file.truncate, False

        def write(self, data):
            if self.taken:
                raise OSError(28, os.strerror(28))
            self.taken = True
            return self.file.write(data[:10])

    real = ledger._file
    ledger._file = FullDisk(real)
    with pytest.raises(OSError, match="cannot write train step 2: No space left"):
        ledger.emit("train", 2, GOOD)
    ledger._file = real
    assert ledger.path.read_bytes().endswith(b"}\n")
    ledger.emit("train", 3, GOOD)
    assert [row.step for row in read_rows(ledger.path)] == [1, 3]


def test_a_missing_ledger_names_the_absolute_path(tmp_path):
    with pytest.raises(ValueError, match=str(tmp_path)):
        read_ledger(tmp_path / "metrics.jsonl")


def test_no_metric_goes_around_the_ledger():
    sources = {path: path.read_text() for path in (ROOT / "eagle3").rglob("*.py")}
    for told in ("self.log(", "self.log_dict(", "log_every_n_steps", "wandb.log(", "WandbLogger", "CSVLogger"):
        assert not [path.name for path, text in sources.items() if told in text], told
    assert "logger=False" in sources[ROOT / "eagle3" / "fit.py"]


def test_row_check_is_the_same_on_every_rank():
    check = RowCheck(DECLARED)
    assert check("train", 1, GOOD) == GOOD
    with pytest.raises(ValueError, match="missing"):
        check("train", 2, {})
