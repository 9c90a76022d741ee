import json
import math
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import pytest
import wandb

from eagle3.runlog import open_runlog
from eagle3.runlog.ledger import Declared
from eagle3.runlog.shown import plain
from eagle3.runlog.wandb_log import BLOCK_BYTES, read_wandb

DECLARED = {
    "train": Declared(frozenset({"loss", "lr"}), frozenset({"acc_0"})),
    "val": Declared(frozenset({"accept_len"})),
}
CONFIG = {"optimizer": {"lr": 1e-3, "betas": [0.9, 0.95]}, "drafter": {"ttt_steps": 3}}


def runlog(folder, mode="offline", **changes):
    options = {
        "project": "p",
        "group": "g",
        "name": "lr=1e-3",
        "job_type": "train",
        "config": CONFIG,
    } | changes
    return open_runlog(folder, DECLARED, mode=mode, **options)


def wandb_mirror(log):
    return next(m.mirror for m in log.mirrors if m.name == "wandb")


def train(log, steps, val_every=2, start=0):
    for step in range(start + 1, start + steps + 1):
        log.emit("train", step, {"loss": 1.0 / step, "lr": 1e-3})
        if step % val_every == 0:
            log.emit("val", step, {"accept_len": 1.0 + step})


def wandb_of(folder, attempt):
    """The log of an attempt whose own rows are in it."""
    (found,) = [p for p in log_files(folder) if max(r["attempt"] for r in read_wandb(p).rows) == attempt]
    return found


def log_files(folder):
    return sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))


def test_every_row_of_an_offline_wandb_run_is_read_back(tmp_path):
    with runlog(tmp_path) as log:
        train(log, 7)
        log.expect("train", 7)
        log.expect("val", 3)
    (path,) = log_files(tmp_path)
    history = read_wandb(path)
    assert history.exit_code == 0
    assert [row for row in history.rows if "train/loss" in row] == [
        {"step": step, "attempt": 1, "train/loss": 1.0 / step, "train/lr": 1e-3} for step in range(1, 8)
    ]
    # Rows of the two splits interleave on our own step, which W&B would drop if it were its `step=`.
    assert [row["step"] for row in history.rows] == [1, 2, 2, 3, 4, 4, 5, 6, 6, 7]
    report = json.loads((tmp_path / "reconcile.json").read_text())
    assert report["splits"]["train"] == {"expected": 7, "emitted": 7, "on_disk": 7, "inherited": 0, "wandb": 7}
    assert log.where() == f"wandb sync {os.path.relpath(path.parent)}"


def test_a_row_larger_than_a_block_is_read_back(tmp_path):
    names = frozenset(f"a_rather_long_metric_name_{i}" for i in range(2000))
    with open_runlog(
        tmp_path,
        {"train": Declared(names)},
        mode="offline",
        project="p",
        group="g",
        name="n",
        job_type="t",
        config={},
    ) as log:
        for step in range(3):
            log.emit("train", step, {name: step + 0.5 for name in names})
    (path,) = log_files(tmp_path)
    assert path.stat().st_size > 3 * BLOCK_BYTES
    assert [len(row) for row in read_wandb(path).rows] == [2002] * 3


def test_a_cut_log_reads_up_to_the_cut_and_a_damaged_one_is_named(tmp_path):
    with runlog(tmp_path) as log:
        train(log, 5)
    (path,) = log_files(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - 20])
    cut = read_wandb(path)
    assert cut.exit_code is None and 0 < len(cut.rows) <= 7
    path.write_bytes(whole[:200] + bytes([whole[200] ^ 1]) + whole[201:])
    with pytest.raises(ValueError, match="damaged chunk"):
        read_wandb(path)


def test_two_jobs_in_one_process_are_two_finished_runs(tmp_path):
    for job, lr in enumerate((3e-4, 1e-3)):
        with runlog(tmp_path / str(job), name=f"lr={lr}", config={"optimizer": {"lr": lr}}) as log:
            train(log, 3 + job)
    histories = [read_wandb(*log_files(tmp_path / job)) for job in "01"]
    assert [len(h.rows) for h in histories] == [3 + 1, 4 + 2]
    assert [h.exit_code for h in histories] == [0, 0]
    assert wandb.run is None or wandb.run._is_finished
    assert len({path.stem for job in "01" for path in log_files(tmp_path / job)}) == 2


def test_a_crashing_job_between_two_others_is_closed_and_marked_failed(tmp_path):
    for job in "012":
        if job != "1":
            with runlog(tmp_path / job) as log:
                train(log, 2)
            continue
        with pytest.raises(RuntimeError, match="boom"), runlog(tmp_path / job) as log:
            train(log, 1)
            log.expect("train", 2)  # not held against a run that stopped early
            raise RuntimeError("boom")
    histories = [read_wandb(*log_files(tmp_path / job)) for job in "012"]
    assert [h.exit_code for h in histories] == [0, 1, 0]
    assert [len(h.rows) for h in histories] == [3, 1, 3]


def test_nan_reaches_wandb_as_nan(tmp_path):
    with runlog(tmp_path) as log:
        for step, loss in enumerate((math.nan, math.inf, 1.0)):
            log.emit("train", step, {"loss": loss, "lr": 0.1})
    rows = read_wandb(*log_files(tmp_path)).rows
    assert math.isnan(rows[0]["train/loss"]) and rows[1]["train/loss"] == math.inf
    assert json.loads((tmp_path / "reconcile.json").read_text())["nonfinite"] == {"train/loss": 2}


def test_a_resumed_training_is_a_second_run_of_the_same_group(tmp_path, monkeypatch):
    asked = []
    real = wandb.init
    monkeypatch.setattr(wandb, "init", lambda **options: asked.append(options) or real(**options))
    with runlog(tmp_path, config={"steps": 4}) as log:
        train(log, 4)
    with runlog(tmp_path, config={"steps": 6}, attempt=2, resumed_from_step=3) as log:
        train(log, 3, start=3)
        log.expect("train", 3)
    assert asked[0]["id"] != asked[1]["id"] and asked[0]["group"] == asked[1]["group"] == "g"
    assert [options["config"]["attempt"] for options in asked] == [1, 2]
    assert [options["config"]["steps"] for options in asked] == [4, 6]
    assert "step" not in asked[0] and asked[0]["reinit"] == "create_new"
    steps = [[row["step"] for row in read_wandb(path).rows if "train/loss" in row] for path in log_files(tmp_path)]
    assert sorted(steps) == [[1, 2, 3, 4], [1, 2, 3, 4, 5, 6]]


def test_wandb_environment_does_not_join_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_RUN_ID", "same")
    for job in "01":
        with runlog(tmp_path / job) as log:
            train(log, 1)
    assert len({path.stem for job in "01" for path in log_files(tmp_path / job)} - {"run-same"}) == 2


def test_only_rank_0_opens_anything_and_all_ranks_check_names(tmp_path, monkeypatch):
    started = []
    real = wandb.init
    monkeypatch.setattr(wandb, "init", lambda **options: started.append(options) or real(**options))
    for rank in (1, 0):
        with runlog(tmp_path / str(rank), rank=rank) as log:
            train(log, 2)
            log.expect("train", 2)
            log.sync()
            with pytest.raises(ValueError, match="missing"):
                log.emit("train", 3, {"loss": 1.0})
            assert (log.where() is None) == (rank == 1)
    assert len(started) == 1
    assert not (tmp_path / "1").exists()


class Choice(Enum):
    ADAMW = "adamw"


@dataclass
class Odd:
    x: int = 1


def test_config_reaches_wandb_as_nested_plain_values(caplog):
    config = {
        "a": {"b": (1, 2)},
        "path": Path("x"),
        "choice": Choice.ADAMW,
        "none": None,
        "odd": {"z": Odd()},
    }
    shown = plain(config | {"nan": math.nan, "set": {2, 1}})
    assert shown == {
        "a": {"b": [1, 2]},
        "path": "x",
        "choice": "adamw",
        "none": None,
        "odd": {"z": "Odd(x=1)"},
        "nan": "nan",
        "set": [1, 2],
    }
    assert "config.odd.z is a Odd" in caplog.text


def test_config_in_the_run_is_nested_and_has_provenance(tmp_path):
    with runlog(tmp_path) as log:
        held = dict(wandb_mirror(log).run.config)
        train(log, 1)
    assert held["optimizer"] == CONFIG["optimizer"] and held["attempt"] == 1
    assert {"git_sha", "git_dirty", "versions", "argv", "device", "started"} <= set(held["provenance"])


@pytest.mark.parametrize(
    ("host", "told"),
    [
        ("nobody.invalid", "no W&B key for 127.0.0.1: run `wandb login`, or use tracking=offline"),
        ("127.0.0.1", "cannot reach http://127.0.0.1:9"),
    ],
)
def test_online_without_a_key_or_a_server_fails_at_once_and_names_the_remedy(tmp_path, host, told):
    netrc = tmp_path / "netrc"
    netrc.write_text(f"machine {host} login user password {'0' * 40}\n")
    netrc.chmod(0o600)
    ours = {"WANDB_BASE_URL": "http://127.0.0.1:9", "NETRC": str(netrc), "no_proxy": "127.0.0.1"}
    environment = {name: v for name, v in os.environ.items() if not name.startswith("WANDB_")} | ours
    code = "from eagle3.runlog import check_wandb_ready as c; c('offline'); print('fine'); c('online')"
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout == "fine\n" and told in done.stderr and "tracking=offline" in done.stderr
    assert time.monotonic() - started < 20


def test_a_missing_directory_is_made_and_an_unwritable_one_is_an_error(tmp_path):
    with runlog(tmp_path / "not" / "yet" / "there") as log:
        train(log, 1)
    assert log_files(tmp_path / "not" / "yet" / "there")
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "below", Path("/proc/metrics")):
        with pytest.raises(ValueError, match=f"cannot write metrics to {place}"):
            runlog(place)


def test_csv_and_tensorboard_hold_every_row(tmp_path):
    with runlog(tmp_path, mode="local", csv=True, tensorboard=True) as log:
        train(log, 4)
        log.emit("train", 5, {"loss": math.nan, "lr": 0.5, "acc_0": 0.25})
        log.expect("train", 5)
    report = json.loads((tmp_path / "reconcile.json").read_text())
    assert report["splits"]["train"] == {
        "expected": 5,
        "emitted": 5,
        "on_disk": 5,
        "inherited": 0,
        "csv": 5,
        "tensorboard": 5,
    }
    assert report["splits"]["val"]["tensorboard"] == 2
    lines = (tmp_path / "csv" / "train.csv").read_text().splitlines()
    assert lines[0] == "attempt,step,wall,loss,lr,acc_0"
    assert lines[1].startswith("1,1,") and lines[1].endswith(",1.0,0.001,") and lines[5].endswith("nan,0.5,0.25")
    assert log.where() is None


@pytest.mark.parametrize("mode", ["local", "offline"])
def test_the_mirrors_of_a_resumed_attempt_read_as_one_curve(tmp_path, mode):
    with pytest.raises(RuntimeError), runlog(tmp_path, mode=mode, csv=True, tensorboard=True) as log:
        train(log, 5)
        raise RuntimeError("killed after the checkpoint at step 2")
    with runlog(tmp_path, mode=mode, csv=True, tensorboard=True, attempt=2, resumed_from_step=2) as log:
        train(log, 4, start=2)
        log.expect("train", 4)
    counts = json.loads((tmp_path / "reconcile.json").read_text())["splits"]["train"]
    assert counts == {"expected": 4, "emitted": 4, "on_disk": 4, "inherited": 2, "csv": 6, "tensorboard": 6} | (
        {"wandb": 6} if mode == "offline" else {}
    )
    lines = (tmp_path / "csv" / "train.csv").read_text().splitlines()[1:]
    assert [line.split(",")[:2] for line in lines] == [[a, s] for a, s in zip("112222", "123456", strict=True)]
    if mode == "offline":
        first, second = (wandb_of(tmp_path, attempt) for attempt in (1, 2))
        assert [r["step"] for r in read_wandb(second).rows if "train/loss" in r] == [1, 2, 3, 4, 5, 6]
        config = json.loads((tmp_path / "runlog.json").read_text())["config"]
        assert (config["attempt"], config["resumed_from_step"]) == (2, 2)
        assert config["supersedes"] == [first.stem.removeprefix("run-")], "which run to hide"
