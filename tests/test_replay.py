"""A mirror that was lost or never asked for is made again from the ledger."""

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3.runlog import open_runlog
from eagle3.runlog.ledger import Declared
from eagle3.runlog.mirrors import CsvMirror
from eagle3.runlog.reconcile import MetricsLost
from eagle3.runlog.replay import replay
from eagle3.runlog.wandb_log import read_wandb

DECLARED = {"train": Declared(frozenset({"loss"}), frozenset({"acc_0"})), "val": Declared(frozenset({"accept_len"}))}


@pytest.fixture
def run_dir(tmp_path):
    """Two attempts without any mirror, the second from step 2; a value that is no number."""
    shown = {"mode": "local", "project": "p", "group": "g", "job_type": "train", "config": {"lr": 1e-3}}
    with open_runlog(tmp_path, DECLARED, name="lr=1e-3", **shown) as log:
        for step in (1, 2, 3):
            log.emit("train", step, {"loss": 1.0})
    with open_runlog(tmp_path, DECLARED, name="lr=1e-3", attempt=2, resumed_from_step=2, **shown) as log:
        log.emit("train", 3, {"loss": float("nan"), "acc_0": 0.5})
        log.emit("val", 3, {"accept_len": 1.25})
    return tmp_path


def test_a_wandb_run_is_made_of_the_rows_that_count(run_dir):
    count, where = replay(run_dir, "wandb")
    (path,) = run_dir.glob("wandb/offline-run-*/run-*.wandb")
    assert count == 4 and where.startswith("wandb sync ")
    rows = read_wandb(path).rows
    assert [(row["attempt"], row["step"]) for row in rows] == [(1, 1), (1, 2), (2, 3), (2, 3)]
    assert rows[2]["train/loss"] != rows[2]["train/loss"] and rows[2]["train/acc_0"] == 0.5
    assert b"lr=1e-3" in path.read_bytes() and b"replayed" in path.read_bytes()


def test_csv_and_tensorboard_are_made_again(run_dir):
    for _ in range(2):  # over what is there
        assert replay(run_dir, "csv")[0] == replay(run_dir, "tensorboard")[0] == 4
    with (run_dir / "csv" / "train.csv").open(newline="") as file:
        assert [(line["step"], line["loss"]) for line in csv.DictReader(file)] == [
            ("1", "1.0"),
            ("2", "1.0"),
            ("3", "nan"),
        ]


def test_a_replay_that_loses_rows_is_an_error(run_dir, monkeypatch):
    real = CsvMirror.emit
    monkeypatch.setattr(CsvMirror, "emit", lambda self, row: row.step == 2 or real(self, row))
    with pytest.raises(MetricsLost, match="csv: 1 train rows missing or incomplete at step 2"):
        replay(run_dir, "csv")


def test_the_command_says_what_it_made_or_what_is_wrong(run_dir, tmp_path):
    def command(*arguments):
        line = [sys.executable, "-m", "eagle3.runlog.replay", *map(str, arguments)]
        return subprocess.run(line, capture_output=True, text=True, cwd=Path(__file__).parents[1])

    done = command(run_dir, "--mirror", "csv")
    assert done.returncode == 0 and done.stdout == f"4 rows: {run_dir / 'csv'}\n", done.stderr
    for wrong, told in ((tmp_path / "nowhere", "nowhere"), (copy_without_shown(run_dir), "has no runlog.json")):
        done = command(wrong)
        assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr


def copy_without_shown(run_dir):
    other = run_dir / "other"
    other.mkdir()
    shutil.copy(run_dir / "metrics.jsonl", other)
    assert json.loads((run_dir / "runlog.json").read_text())["name"] == "lr=1e-3"
    return other
