"""Runs that go on or are made again: what may change beside `resume`, and that run.json alone repeats a training."""

import json
import shutil

import pytest
from scripts import killed, run, succeed
from tiny_job import settings
from whole_job import values_by_step

from eagle3.runlog.wandb_log import read_wandb


@pytest.fixture(scope="module")
def stopped(folder, extracted):
    """A training without W&B that was killed in its sixth step."""
    told = settings(optimizer__epochs=3, hydra__run__dir="stopped-once")
    killed("train.py", *told, cwd=folder, die=("eagle3.record:Record._emit_train", 6, "after"))
    return folder / "stopped-once"


def files(path, but=()):
    return {f: f.read_bytes() for f in path.rglob("*") if f.is_file() and f.name not in but}


def test_tracking_may_change_on_resume_and_the_new_wandb_run_has_the_whole_curve(folder, stopped):
    hydra_before = {name: (stopped / ".hydra" / name).read_bytes() for name in ("config.yaml", "overrides.yaml")}
    done = succeed("train.py", "resume=stopped-once", "tracking=offline", "tracking.artifacts=true",
                   "optimizer.epochs=3", cwd=folder)  # fmt: skip
    assert "wandb sync stopped-once/wandb/offline-run-" in done.output
    (log,) = stopped.glob("wandb/offline-run-*/run-*.wandb")
    rows = [row for row in read_wandb(log).rows if "train/loss" in row]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)) and len(rows) > 6
    assert {row["attempt"] for row in rows} == {1, 2}
    shown = json.loads((stopped / "runlog.json").read_text())
    assert shown["job_type"] == "train" and shown["config"]["resumed_from_step"] == 4
    assert shown["config"]["inputs"] == json.loads((stopped / "run.json").read_text())["inputs"], "the store's hash"
    text = log.read_bytes()
    assert b"drafter-" + log.stem[4:].encode() in text and b"charts-" in text, "artifacts on request"
    assert {name: (stopped / ".hydra" / name).read_bytes() for name in hydra_before} == hydra_before
    assert (stopped / ".hydra" / "resumed" / "overrides.yaml").exists() and (stopped / "train.log").stat().st_size
    assert not (folder / "outputs" / "train" / "refused").exists()


def test_a_run_is_repeated_from_its_run_json_alone_bit_for_bit(folder, trained):
    source = folder / "copied"
    source.mkdir()
    shutil.copy(trained[0] / "run.json", source)
    done = succeed("train.py", "from_run=copied", cwd=folder)
    again = folder / "outputs" / "train" / "copied-again"
    for split in ("train", "val"):
        assert values_by_step(again, split) == values_by_step(trained[0], split)
    weights = [(path / "drafter" / "model.safetensors").read_bytes() for path in (again, trained[0])]
    assert weights[0] == weights[1]
    assert (
        json.loads((again / "run.json").read_text())["config"]
        == json.loads((source / "run.json").read_text())["config"]
    )
    assert "drafter_dir=outputs/train/copied-again/drafter" in done.output.replace("\\\n", "")
    assert "(reused)" in succeed("train.py", "from_run=copied", cwd=folder).output


def test_a_repeat_from_another_store_is_refused_and_other_code_is_told(folder, trained):
    source = folder / "altered"
    source.mkdir()
    record = json.loads((trained[0] / "run.json").read_text())
    record["attempts"][-1]["git_sha"] = "another"
    (source / "run.json").write_text(json.dumps(record))
    done = succeed("train.py", "from_run=altered", "dry_run=true", cwd=folder)
    assert "git_sha differs from that of altered: another there" in done.output
    (source / "run.json").write_text(json.dumps(record | {"inputs": {"store": "another"}}))
    done = run("train.py", "from_run=altered", cwd=folder)
    assert done.code == 1 and "store: another there" in done.output and "Traceback" not in done.output


def test_a_run_of_another_stage_is_refused(folder, extracted):
    done = run("train.py", f"resume={extracted[0]}", cwd=folder)
    assert done.code == 1 and "is a run of extract.py" in done.output


def test_more_processes_than_devices_are_refused(folder, extracted):
    done = run("train.py", *settings(hydra__run__dir="crowd"), cwd=folder, WORLD_SIZE="2", RANK="0")
    assert done.code == 1 and "WORLD_SIZE=2 processes were started and 1 is used here" in done.output
    assert not (folder / "crowd" / "run.json").exists()
