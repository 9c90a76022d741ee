"""W&B online, against a server on this machine: what it is sent, and what happens when it is busy or dies."""

import json
import os
import signal
from pathlib import Path

import httpx
import pytest
from scripts import FORKS
from standin_wandb import standin_wandb

from eagle3.runlog import MetricsLost, check_wandb_ready, open_runlog, wandb_mirror
from eagle3.runlog.ledger import Declared, read_ledger
from eagle3.runlog.wandb_log import read_wandb

DECLARED = {"train": Declared(frozenset({"loss"}))}
STEPS = 30


def train_online(folder: Path, url: str, told, trouble: str) -> None:
    """A training in a process of its own, whose W&B service is its own too."""
    os.environ.pop("WANDB_SERVICE", None)
    os.environ |= {"WANDB_BASE_URL": url, "WANDB_API_KEY": "0" * 40, "no_proxy": "127.0.0.1", "WANDB_SILENT": "true"}
    wandb_mirror.FINISH_TIMEOUT_S = 1.0 if trouble.startswith("the") else 30.0
    wandb_mirror.EXIT_RECORD_TIMEOUT_S = 1.0
    wandb_mirror.SETTLE_TIMEOUT_S = 3.0
    check_wandb_ready("online")
    try:
        with open_runlog(
            folder, DECLARED, mode="online", project="p", group="sweep", name="lr=1e-3", job_type="train",
            tags=("a", "b"), config={"optimizer": {"lr": 1e-3}},
        ) as log:  # fmt: skip
            log.expect("train", STEPS)
            if trouble == "a row is lost":
                run = log.mirrors[0].mirror.run
                run.log = lambda row, real=run.log: None if row["step"] == 7 else real(row)
            for step in range(1, STEPS + 1):
                log.emit("train", step, {"loss": 1.0 / step})
                if step == 10 and trouble == "the server dies":
                    httpx.get(f"{url}/die")
                if step == 10 and trouble == "the service is killed":
                    os.kill(wandb_service(), signal.SIGKILL)
        told.put(None)
    except MetricsLost as lost:
        told.put(str(lost))


def wandb_service() -> int:
    """Process id of the program in which W&B does its work for this process."""
    stats = [path.read_text().rsplit(")", 1) for path in Path("/proc").glob("[0-9]*/stat")]
    (found,) = [int(name.split(" (")[0]) for name, rest in stats
                if "wandb-core" in name and int(rest.split()[1]) == os.getpid()]  # fmt: skip
    return found


def run_online(folder, url, trouble=""):
    """What the training said in the end, if anything was lost."""
    told = FORKS.SimpleQueue()
    process = FORKS.Process(target=train_online, args=(folder, url, told, trouble))
    process.start()
    process.join(60)
    assert process.exitcode == 0, "None: W&B keeps the process from its end"
    return told.get()


def test_every_row_arrives_though_the_server_is_busy_at_first(tmp_path):
    with standin_wandb() as server:
        server.busy = 1
        assert run_online(tmp_path, server.url) is None
    assert [row["step"] for row in server.rows] == list(range(1, STEPS + 1))
    assert [row["train/loss"] for row in server.rows] == [1.0 / step for step in range(1, STEPS + 1)]
    assert server.busy == 0 and server.exit_codes == [0]
    (path,) = tmp_path.glob("wandb/run-*/run-*.wandb")
    assert len(read_wandb(path).rows) == STEPS, "the local log of an online run is what is read back"
    told = server.runs[0]
    assert (told["groupName"], told["displayName"], told["jobType"]) == ("sweep", "lr=1e-3", "train")
    assert sorted(told["tags"]) == ["a", "b"]
    config = json.loads(told["config"])
    assert config["optimizer"]["value"] == {"lr": 1e-3} and config["attempt"]["value"] == 1
    assert config["provenance"]["value"]["versions"]["torch"]


@pytest.mark.parametrize("trouble", ["the server dies", "the service is killed"])
def test_trouble_with_wandb_stops_no_training_and_is_told(tmp_path, trouble):
    with standin_wandb() as server:
        said = run_online(tmp_path, server.url, trouble)
    assert "wandb: " in said and " calls failed, first " in said
    assert len(read_ledger(tmp_path)) == STEPS
    report = json.loads((tmp_path / "reconcile.json").read_text())
    assert not report["ok"] and report["splits"]["train"]["emitted"] == STEPS


def test_a_row_that_is_lost_marks_the_run_as_failed_on_the_server(tmp_path):
    with standin_wandb() as server:
        said = run_online(tmp_path, server.url, "a row is lost")
    assert "wandb: 1 train rows missing or incomplete at step 7" in said
    assert server.exit_codes == [1] and len(server.rows) == STEPS - 1
