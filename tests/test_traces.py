"""Hydra makes a directory before a script begins; what was refused or only planned leaves none behind."""

import pytest
from scripts import run, succeed
from tiny_job import settings

from eagle3.traces import clear_traces


@pytest.mark.parametrize(
    "told",
    [
        ["resume=nowhere"],
        ["from_run=nowhere"],
        settings(drafter__draft_vocab_size=9999),
        settings(optimizer__lr="abc"),
        settings(store="nostore"),
        settings(optimizer__lr=0.7, dry_run="true"),
    ],
)
def test_a_refused_run_and_a_dry_run_leave_nothing(folder, trained, told):
    before = sorted(folder.glob("outputs/**"))
    done = run("train.py", *told, cwd=folder)
    assert done.code == (0 if "dry_run=true" in told else 1) and "Traceback" not in done.output
    assert sorted(folder.glob("outputs/**")) == before


def test_a_dry_run_of_a_run_that_is_there_leaves_it_as_it_is(folder, trained):
    before = {file: file.read_bytes() for file in trained[0].rglob("*") if file.is_file()}
    succeed("train.py", *settings(dry_run="true"), cwd=folder)
    assert {file: file.read_bytes() for file in trained[0].rglob("*") if file.is_file()} == before


def test_what_is_not_hydras_own_stays(tmp_path):
    for name, file in (("log", "train.log"), ("mine", "notes.txt"), ("run", "run.json")):
        (tmp_path / name / ".hydra").mkdir(parents=True)
        (tmp_path / name / file).write_text("something")
        clear_traces(tmp_path / name, "train")
        assert (tmp_path / name / ".hydra").is_dir() and (tmp_path / name / file).exists()
