import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from eagle3.runlog import MetricsLost, RunLog, guard, open_runlog, wandb_mirror
from eagle3.runlog.guard import Guarded
from eagle3.runlog.ledger import Declared, Ledger, Row
from eagle3.runlog.mirrors import Held, Mirror
from eagle3.runlog.provenance import git_state, provenance
from eagle3.runlog.wandb_log import read_wandb

DECLARED = {"train": Declared(frozenset({"loss"})), "val": Declared(frozenset({"accept_len"}))}


class Memory(Mirror):
    """A mirror that holds what it is given, with faults on request."""

    name = "memory"

    def __init__(self, drop=(), fail=(), close_fails=False, cut=(), twice=()):
        self.drop, self.fail, self.close_fails, self.cut, self.twice = drop, fail, close_fails, cut, twice
        self.rows, self.closed_ok = Held(), None

    def emit(self, row):
        if row.step in self.fail:
            raise ConnectionError("no route")
        if row.step not in self.drop:
            self.rows[row.split, row.step, len(row.values) - (row.step in self.cut)] += 1 + (row.step in self.twice)

    def close(self, ok):
        self.closed_ok = ok
        if self.close_fails:
            raise TimeoutError("still uploading")

    def held(self):
        return self.rows


def open_with(folder, *mirrors):
    return RunLog(Ledger(folder / "metrics.jsonl", DECLARED, run="r"), mirrors)


def train(log, steps):
    for step in range(1, steps + 1):
        log.emit("train", step, {"loss": 1.0})


def report(folder):
    return json.loads((folder / "reconcile.json").read_text())


def test_agreeing_counts_are_written_and_nothing_is_raised(tmp_path):
    mirror = Memory()
    with open_with(tmp_path, mirror) as log:
        train(log, 4)
        log.emit("val", 4, {"accept_len": 1.2})
        log.expect("train", 4)
    told = report(tmp_path)
    assert told["ok"] and told["gaps"] == [] and mirror.closed_ok
    assert told["splits"] == {
        "train": {"expected": 4, "emitted": 4, "on_disk": 4, "inherited": 0, "memory": 4},
        "val": {"expected": None, "emitted": 1, "on_disk": 1, "inherited": 0, "memory": 1},
    }


@pytest.mark.parametrize(
    ("faults", "told"),
    [
        ({"drop": {2, 3}}, "memory: 2 train rows missing or incomplete at step 2, 3"),
        (
            {"drop": set(range(1, 99))},
            "memory: 20 train rows missing or incomplete at step 1, 2, 3, 4, 5, 6, 7, 8 …",
        ),
        ({"cut": {5}}, "memory: 1 train rows missing or incomplete at step 5"),
        ({"twice": {6}}, "memory: 1 train rows that the ledger lacks at step 6"),
        ({"fail": {2}}, "memory: 1 calls failed, first train step 2: ConnectionError: no route"),
        ({"close_fails": True}, "memory: 1 calls failed, first close: TimeoutError: still uploading"),
    ],
)
def test_a_faulty_mirror_never_stops_training_and_never_goes_unreported(tmp_path, faults, told):
    good = Memory()
    good.name = "good"
    with pytest.raises(MetricsLost) as raised, open_with(tmp_path, Memory(**faults), good) as log:
        train(log, 20)
    assert told in str(raised.value) and told in report(tmp_path)["gaps"]
    assert not report(tmp_path)["ok"]
    assert report(tmp_path)["splits"]["train"]["on_disk"] == 20 == report(tmp_path)["splits"]["train"]["good"]


def test_a_guard_logs_the_first_failures_and_counts_them_all(caplog):
    class Broken(Mirror):
        name = "broken"

        def emit(self, row):
            raise ZeroDivisionError("no")

    guard = Guarded(Broken())
    for step in range(10):
        guard.emit(Row("r", 1, step + 1, "train", step, 0.0, {}))
    guard.close(True, Held())
    assert len(guard.failures) == 10 and guard.failures[0] == "train step 0: ZeroDivisionError: no"
    assert caplog.text.count("mirror broken failed") == 3


@pytest.mark.parametrize("waiting", [1_000, 4])
def test_a_mirror_that_hangs_neither_stops_training_nor_goes_unreported(tmp_path, monkeypatch, caplog, waiting):
    monkeypatch.setattr(guard, "WAITING_ROWS", waiting)
    monkeypatch.setattr(guard, "STALLED_S", 0.05)
    released = threading.Event()

    class Hanging(Memory):
        patience_s = 0.1

        def emit(self, row):
            if row.step == 3:
                released.wait(60)

    good = Memory()
    good.name = "good"
    began = time.monotonic()
    with pytest.raises(MetricsLost) as raised, open_with(tmp_path, Hanging(), good) as log:
        for step in range(1, 13):
            log.emit("train", step, {"loss": 1.0})
            while good.rows.total() < step:
                time.sleep(0.01)
    released.set()
    assert time.monotonic() - began < 10
    told = str(raised.value)
    assert "memory: 12 train rows missing" in told and "train step 3 has lasted" in told
    assert ("rows wait already" in told) == (waiting == 4), "and they do not fill the memory"
    assert "mirror memory hangs (train step 3 has lasted" in caplog.text, "told while it hangs"
    assert report(tmp_path)["splits"]["train"]["good"] == 12


@pytest.mark.parametrize("emitted", [3, 5])
def test_more_or_fewer_rows_than_expected_are_an_error(tmp_path, emitted):
    with (
        pytest.raises(MetricsLost, match=f"train: 4 rows expected, {emitted} emitted"),
        open_with(tmp_path) as log,
    ):
        log.expect("train", 4)
        train(log, emitted)


def test_a_declared_split_without_a_row_counts_as_zero(tmp_path):
    with pytest.raises(MetricsLost, match="val: 1 rows expected, 0 emitted"), open_with(tmp_path) as log:
        log.expect("val", 1)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda lines: lines[:-1], "train: 4 rows emitted, 3 on disk"),
        (lambda lines: lines[1:], "the ledger cannot be read back: .*seq 2"),
        (
            lambda lines: [*lines[:-1], lines[-1].replace(b"1.0", b"2.0")],
            "last row on disk is not the last one",
        ),
        (lambda lines: None, "the ledger cannot be read back"),
    ],
)
def test_a_ledger_changed_behind_our_back_is_noticed(tmp_path, damage, told):
    with pytest.raises(MetricsLost, match=told), open_with(tmp_path) as log:
        train(log, 4)
        left = damage(log.ledger.path.read_bytes().splitlines(keepends=True))
        log.ledger.path.unlink()
        if left is not None:
            log.ledger.path.write_bytes(b"".join(left))


def test_the_first_exception_is_the_one_to_see_and_the_loss_is_its_note(tmp_path, caplog):
    mirror = Memory(drop={1})
    with pytest.raises(KeyboardInterrupt) as raised, open_with(tmp_path, mirror) as log:
        log.expect("train", 99)
        train(log, 2)
        raise KeyboardInterrupt
    assert "memory: 1 train rows missing" in raised.value.__notes__[0]
    assert "memory: 1 train rows missing" in caplog.text
    assert mirror.closed_ok is False
    assert report(tmp_path)["splits"]["train"]["expected"] is None  # a run that stopped early owes no more rows


def test_a_mirror_with_a_full_disk_is_told_and_marks_the_wandb_run_as_failed(tmp_path):
    log = open_runlog(
        tmp_path,
        DECLARED,
        mode="offline",
        project="p",
        group="g",
        name="n",
        job_type="train",
        config={},
        csv=True,
    )
    csv_mirror = log.mirrors[0].mirror
    csv_mirror._files["train"].close()
    csv_mirror._files["train"] = Path("/dev/full").open("w")  # noqa: SIM115 - its disk is full; the ledger's is not
    with pytest.raises(MetricsLost, match=r"csv: 3 train rows missing.*\n.*calls failed, first .*No space left"), log:
        train(log, 3)
    (wandb_file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert read_wandb(wandb_file).exit_code == 1
    assert report(tmp_path)["splits"]["train"]["wandb"] == 3


def test_rows_that_wandb_swallows_are_noticed_while_its_run_can_still_be_marked_as_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(wandb_mirror, "SETTLE_TIMEOUT_S", 2.0)
    log = open_runlog(tmp_path, DECLARED, mode="offline", project="p", group="g", name="n", job_type="train", config={})
    run = log.mirrors[0].mirror.run
    real, calls = run.log, []

    def drops_the_second(row):
        calls.append(row)
        if len(calls) != 2:
            real(row)

    run.log = drops_the_second
    with pytest.raises(MetricsLost, match="wandb: 1 train rows missing or incomplete at step 2"), log:
        train(log, 3)
    (wandb_file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert read_wandb(wandb_file).exit_code == 1
    assert "lacks rows" in report(tmp_path)["gaps"][-1]


def test_the_rows_are_read_back_before_the_wandb_run_is_finished(tmp_path, monkeypatch):
    """Of a run that lost nothing, once W&B has written it: it is not marked by what is still on its way."""
    seen = []
    real = wandb_mirror.WandbMirror.close

    def close(self, ok):
        seen.append((ok, read_wandb(self.log_file)))
        real(self, ok)

    monkeypatch.setattr(wandb_mirror.WandbMirror, "close", close)
    log = open_runlog(tmp_path, DECLARED, mode="offline", project="p", group="g", name="n", job_type="train", config={})
    with log:
        train(log, 300)
    ((ok, history),) = seen
    assert ok and len(history.rows) == 300 and history.exit_code is None


def test_a_mirror_that_loses_rows_is_closed_as_failed(tmp_path):
    class Settling(Memory):
        def settle(self, want):
            assert want == Held({("train", step, 1): 1 for step in (1, 2, 3)})
            if self.rows != want:
                raise RuntimeError("rows are missing")

    mirror = Settling(drop={2})
    told = "first rows before the end: RuntimeError: rows are missing"
    with pytest.raises(MetricsLost, match=told), open_with(tmp_path, mirror) as log:
        train(log, 3)
    assert mirror.closed_ok is False
    (tmp_path / "well").mkdir()
    mirror = Settling()
    with open_with(tmp_path / "well", mirror) as log:
        train(log, 3)
    assert mirror.closed_ok is True


def test_a_lost_metric_makes_the_process_exit_non_zero(tmp_path):
    code = f"""
from pathlib import Path
from eagle3.runlog import Declared, open_runlog
with open_runlog(Path({str(tmp_path)!r}), {{"train": Declared(frozenset({{"loss"}}))}}, mode="local",
                 project="p", group="g", name="n", job_type="train", config={{}}) as log:
    log.expect("train", 2)
    log.emit("train", 1, {{"loss": 1.0}})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode != 0 and "train: 2 rows expected, 1 emitted" in done.stderr


def test_a_second_attempt_owes_its_own_rows_and_its_mirrors_hold_the_inherited_ones_too(tmp_path):
    with open_with(tmp_path) as log:
        train(log, 3)
    ledger = Ledger(tmp_path / "metrics.jsonl", DECLARED, run="r", attempt=2, resumed_from_step=2)
    with RunLog(ledger, [Memory()]) as log:
        log.emit("train", 3, {"loss": 1.0})
        log.expect("train", 1)
    counts = {"expected": 1, "emitted": 1, "on_disk": 1, "inherited": 2, "memory": 3}
    assert report(tmp_path)["splits"]["train"] == counts


def test_provenance_inside_and_outside_git(tmp_path):
    outside = provenance(tmp_path)
    assert outside["git_sha"] is None and outside["git_dirty"] is None
    assert outside["versions"]["torch"] and outside["device"].startswith(("cpu", "1 x", "2 x", "4 x", "8 x"))
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    (tmp_path / "code.py").write_text("1\n")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "m"]):
        subprocess.run(git + command, check=True)
    clean = git_state(tmp_path)
    assert len(clean["git_sha"]) == 40 and clean["git_dirty"] is False and clean["git_diff_sha256"] is None
    (tmp_path / "code.py").write_text("2\n")
    dirty = git_state(tmp_path)
    assert dirty["git_dirty"] and dirty["git_sha"] == clean["git_sha"]
    (tmp_path / "code.py").write_text("3\n")
    assert git_state(tmp_path)["git_diff_sha256"] != dirty["git_diff_sha256"]
    (tmp_path / "installed").mkdir()
    assert git_state(tmp_path / "installed")["git_sha"] is None  # inside a repository that does not track it


def test_after_kill_9_the_ledger_has_every_row_whatever_wandb_kept(tmp_path):
    code = f"""
import os, signal
from pathlib import Path
from eagle3.runlog import Declared, open_runlog
log = open_runlog(Path({str(tmp_path)!r}), {{"train": Declared(frozenset({{"loss"}}))}}, mode="offline",
                  project="p", group="g", name="n", job_type="train", config={{}})
for step in range(20):
    log.emit("train", step, {{"loss": 1.0}})
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 20
    assert not (tmp_path / "reconcile.json").exists()
