"""One job on a tiny verifier, extracted and trained once for all tests, and how to read what it left."""

import json
from pathlib import Path

import pytest
from scripts import succeed
from tiny_job import settings, write_inputs

from eagle3.runlog import read_ledger

TIMES = {"tokens_per_s", "data_wait_share"}
ENGINE_STARTS = ("extract.engines.inprocess:InProcessEngine.__init__", 1, "before")


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Working directory of all runs; every path on the command lines is relative to it."""
    path = tmp_path_factory.mktemp("job")
    write_inputs(path)
    return path


def named_run(script: str, folder: Path):
    """A run in the directory that its config names, and that directory."""
    parent = folder / "outputs" / script
    before = set(parent.glob("*"))
    done = succeed(f"{script}.py", *settings(), cwd=folder)
    (run_dir,) = set(parent.glob("*")) - before
    return run_dir, done


@pytest.fixture(scope="session")
def extracted(folder):
    return named_run("extract", folder)


@pytest.fixture(scope="session")
def trained(folder, extracted):
    return named_run("train", folder)


def read_index(store: Path, name="index.jsonl"):
    return [json.loads(line) for line in (store / name).read_text().splitlines()]


def values_by_step(run_dir: Path, split: str):
    """What a training logged at each step, without what a clock decides."""
    rows = [row for row in read_ledger(run_dir) if row.split == split]
    return {row.step: {k: v for k, v in row.values.items() if k not in TIMES} for row in rows}
