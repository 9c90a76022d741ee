"""The scripts as a user runs them, on a tiny verifier: whole, again, killed at every stage, and in sweeps."""

import json
import math
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from scripts import ROOT, Script, killed, run, succeed
from tiny_job import settings, write_inputs

from eagle3.checkpoints import checkpoints
from eagle3.export import read_vocab
from eagle3.runlog import read_ledger
from eagle3.runlog.wandb_log import read_wandb
from extract.store import open_store, verify

TIMES = {"tokens_per_s", "data_wait_share"}
ENGINE_STARTS = ("extract.engines.inprocess:InProcessEngine.__init__", 1, "before")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Working directory of all runs; every path on the command lines is relative to it."""
    path = tmp_path_factory.mktemp("job")
    write_inputs(path)
    return path


@pytest.fixture(scope="module")
def extracted(folder):
    return succeed("extract.py", *settings(), cwd=folder)


@pytest.fixture(scope="module")
def trained(folder, extracted):
    done = succeed("train.py", *settings(), cwd=folder)
    (run_dir,) = (folder / "outputs" / "train").iterdir()
    return run_dir, done


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
        ("extract.store_writer:append_line", 1),  # a shard has its name, but no line in the index
        ("extract.store_writer:StoreWriter._write_shard", 2),  # one shard is done, the second is not
        ("extract.teacher:append_line", 1),  # a teacher file has its name, but no line
        ("extract.teacher:append_line", 2),  # one teacher file is done
    ):
        killed("extract.py", *told, cwd=folder, die=(target, number, "before"))
        snapshot()
    return store, seen, succeed("extract.py", *told, cwd=folder)


def read_index(store: Path, name="index.jsonl"):
    return [json.loads(line) for line in (store / name).read_text().splitlines()]


def values_by_step(run_dir: Path, split: str):
    """What a training logged at each step, without what a clock decides."""
    rows = [row for row in read_ledger(run_dir) if row.split == split]
    return {row.step: {k: v for k, v in row.values.items() if k not in TIMES} for row in rows}


# Whole


def test_extraction_leaves_a_sound_store_and_names_the_next_command(folder, extracted):
    assert verify(folder / "store").faults == []
    store = open_store(folder / "store", need_teacher=True, need_complete=True)
    counts = store.manifest["counts"]
    assert counts["samples"] >= 24 and counts["shards"] >= 2, "several shards, or the kills test little"
    (run_dir,) = (folder / "outputs" / "extract").iterdir()
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["tokens"] == counts["tokens"] and summary["respond_tokens_per_s"] > 0
    assert "next: python train.py verifier=hf" in extracted.output
    assert "green is supervised" in extracted.output and f"{counts['tokens']:,} tokens" in extracted.output


def test_training_leaves_drafter_charts_ledger_and_summary(folder, trained):
    run_dir, done = trained
    summary = json.loads((run_dir / "summary.json").read_text())
    assert Path(summary["drafter_dir"]) == run_dir / "drafter"
    assert {"config.json", "model.safetensors"} <= {path.name for path in (run_dir / "drafter").iterdir()}
    assert read_vocab(run_dir / "drafter").size == summary["draft_vocab_size"] == 64
    assert all(Path(chart).stat().st_size > 1000 for chart in summary["charts"])
    train, val = values_by_step(run_dir, "train"), values_by_step(run_dir, "val")
    steps = summary["steps"]
    assert list(train) == list(range(1, steps + 1))
    assert list(val) == [*range(4, steps, 4), steps]
    first, last = train[1]["loss"], train[steps]["loss"]
    assert last < first and math.isfinite(first), "it learns"
    assert "next: python evaluate.py verifier=hf" in done.output


def test_the_best_drafter_follows_held_out_acceptance_not_the_last_step(trained):
    run_dir, _ = trained
    accept_len = {step: values["accept_len"] for step, values in values_by_step(run_dir, "val").items()}
    best = max(accept_len, key=lambda step: (accept_len[step], -step))
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["best_step"], summary["accept_len"]) == (best, accept_len[best])
    assert (run_dir / "drafter").resolve().name == f"step-{best:06d}"


def test_no_file_name_needs_quoting_on_a_command_line(folder, trained):
    names = [str(path.relative_to(folder)) for root in ("outputs", "store") for path in (folder / root).rglob("*")]
    assert names and not [name for name in names if set(name) & set("=*@,'\" {}()[]")]


def test_the_same_command_again_loads_no_model_and_writes_nothing(folder, extracted):
    def state():
        return {path: path.stat().st_mtime_ns for path in (folder / "store").rglob("*") if path.name != ".lock"}

    before = state()
    done = run("extract.py", *settings(), cwd=folder, die=ENGINE_STARTS)
    assert done.code == 0 and "Hidden states are ready (reused)" in done.output
    assert state() == before


def test_a_finished_training_is_reused_by_a_fresh_process_too(folder, trained):
    run_dir, _ = trained

    def state():
        files = [path for path in run_dir.rglob("*") if path.name not in ("train.log", ".lock")]
        return {path: path.stat().st_mtime_ns for path in files if path.parent.name != ".hydra" and path.is_file()}

    before = state()
    command = [sys.executable, str(ROOT / "train.py"), *settings()]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The drafter is trained (reused)" in done.stdout
    assert state() == before


def test_a_store_that_is_gone_is_made_again_though_its_run_had_finished(folder, extracted):
    told = settings(store="gone", extraction__limit=4, extraction__max_new_tokens=8)
    succeed("extract.py", *told, cwd=folder)
    (folder / "gone").rename(folder / "gone.away")
    assert "(reused)" not in succeed("extract.py", *told, cwd=folder).output
    assert verify(folder / "gone").faults == []


@pytest.mark.skipif(not (ROOT / "evaluate.py").exists(), reason="there is no evaluate.py")
def test_evaluation_decodes_with_the_trained_drafter_and_is_reused(folder, trained):
    done = succeed("evaluate.py", *settings(), cwd=folder)
    (run_dir,) = (folder / "outputs" / "evaluate").iterdir()
    summary = json.loads((run_dir / "summary.json").read_text())
    assert 1 <= summary["accept_len"] <= 1 + 7
    assert f"{summary['accept_len']:.3f}" in done.output or f"{summary['accept_len']:.2f}" in done.output
    assert "reused" in succeed("evaluate.py", *settings(), cwd=folder).output


# Killed


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
        ("eagle3.checkpoints:_fsync", 5, "after"),  # checkpoint 12 is whole, but has no name yet
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


# Refused


def test_another_config_is_refused_in_a_run_directory_with_the_keys_that_differ(folder, trained):
    run_dir, _ = trained
    before = (run_dir / "run.json").read_bytes()
    changed = {"optimizer__epochs": 2, "optimizer__batch_tokens": 1600, "hydra__run__dir": run_dir}
    done = run("train.py", *settings(**changed), cwd=folder)
    assert done.code == 1 and "belongs to another run" in done.output and "Traceback" not in done.output
    assert "optimizer.batch_tokens: 800 there, 1600 now" in done.output
    assert "optimizer.epochs: 4 there, 2 now" in done.output
    assert (run_dir / "run.json").read_bytes() == before


def test_resume_with_other_settings_beside_it_is_refused(folder, trained):
    done = run("train.py", f"resume={trained[0]}", "optimizer.lr=1", cwd=folder)
    assert done.code == 1 and "leave out optimizer.lr=1" in done.output


def test_a_relative_path_is_read_from_the_working_directory_or_told_in_full(folder, extracted):
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    done = run("extract.py", *settings(), cwd=elsewhere)
    assert done.code == 1 and str(elsewhere / "p.jsonl") in done.output
    there = settings(**{"extraction__prompts": "../p.jsonl", "verifier__path": "../v", "store": "../store"})
    done = run("extract.py", *there, cwd=elsewhere, die=ENGINE_STARTS)
    assert done.code == 0 and "done by an earlier run" in done.output, "the same store, from another directory"
    done = run("extract.py", *settings(), "hydra.job.chdir=true", cwd=folder)
    assert done.code == 1 and str(folder / "outputs") in done.words() and "p.jsonl" in done.words()


def test_a_broken_interpolation_is_told_in_one_line(folder):
    done = run("train.py", *settings(optimizer__lr="${oc.env:NO_SUCH_RATE}"), cwd=folder)
    assert done.code == 1 and "Traceback" not in done.output
    assert "train: optimizer.lr cannot be resolved" in done.output and "conf/optimizer/adamw_cosine.yaml" in done.output


def test_dry_run_plans_and_writes_no_result(folder, trained):
    done = succeed("train.py", *settings(optimizer__lr=1, dry_run="true", hydra__run__dir="dry"), cwd=folder)
    assert "Training plan" in done.output
    assert not (folder / "dry" / "run.json").exists()


@pytest.mark.parametrize("lost", ["drafter", "checkpoints"])
def test_a_finished_training_without_its_drafter_is_not_finished(folder, trained, lost):
    run_dir = folder / f"lost-{lost}"
    told = settings(optimizer__epochs=1, hydra__run__dir=run_dir.name)
    succeed("train.py", *told, cwd=folder)
    weights = (run_dir / "drafter" / "model.safetensors").read_bytes()
    (run_dir / lost).rename(folder / f"{lost}.away")
    done = succeed("train.py", *told, cwd=folder)
    assert "(reused)" not in done.output
    assert ("train: 100%" in done.output) == (lost == "checkpoints"), "only what is lost is made again"
    assert (run_dir / "drafter" / "model.safetensors").read_bytes() == weights


# Obeyed


@pytest.mark.parametrize("max_len", [32, 64])
def test_samples_are_as_long_as_the_config_says(folder, extracted, max_len):
    longest = max(ref.tokens for ref in open_store(folder / "store").samples)
    assert longest > 64
    told = settings(
        store=f"len-{max_len}", extraction__max_len=max_len, extraction__max_new_tokens=20, optimizer__batch_tokens=640
    )
    succeed("extract.py", *told, cwd=folder)
    assert max(ref.tokens for ref in open_store(folder / f"len-{max_len}").samples) == max_len


def test_a_warm_start_keeps_the_vocabulary_and_begins_where_the_drafter_was(folder, trained):
    source = trained[0] / "drafter"
    told = settings(drafter__init_from=source, optimizer__epochs=1, hydra__run__dir="warm")
    succeed("train.py", *told, cwd=folder)
    assert torch.equal(read_vocab(folder / "warm" / "drafter").target_ids, read_vocab(source).target_ids)
    cold, warm = values_by_step(trained[0], "train")[1]["loss"], values_by_step(folder / "warm", "train")[1]["loss"]
    assert warm < cold


# Seen


def test_in_a_file_a_line_appears_within_ten_seconds_and_a_second_run_is_refused_meanwhile(folder):
    told = settings(store="slow", extraction__limit=4, hydra__run__dir="slow-run")
    slow = Script("extract.py", *told, cwd=folder, stall_s=60)
    try:
        wait_for(lambda: (folder / "slow-run" / "run.json").exists(), 60)
        began = time.monotonic()
        second = run("extract.py", *told, cwd=folder)
        assert second.code == 1 and "another process is working in" in second.output
        wait_for(lambda: "respond: 0% 0/" in slow.output(), 15 - (time.monotonic() - began))
    finally:
        slow.kill()
    assert "0 of them in the journal" in succeed("extract.py", *told, cwd=folder).output, "the dead hold no lock"


def wait_for(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:.0f} s"
        time.sleep(0.05)


# Sweeps


def test_a_sweep_gives_a_run_for_each_value_and_a_table(folder, extracted):
    told = settings(optimizer__lr="1e-3,1e-4", optimizer__epochs=1, tracking="offline")
    done = succeed("train.py", "-m", *told, cwd=folder)
    (sweep,) = (folder / "multirun" / "train").iterdir()
    configs = [json.loads((sweep / job / "run.json").read_text())["config"] for job in ("0", "1")]
    assert [config["optimizer"]["lr"] for config in configs] == [1e-3, 1e-4]
    assert "2 jobs in multirun/train" in done.output and done.output.count("★") == 1
    rows = (sweep / "summary.csv").read_text().splitlines()
    assert len(rows) == 3 and all("finished" in row for row in rows[1:])
    logged = sorted(sweep.glob("*/wandb/offline-run-*/run-*.wandb"))
    assert [read_wandb(path).exit_code for path in logged] == [0, 0]
    assert all(sweep.name.encode() in path.read_bytes() for path in logged), "one W&B group"


def test_a_sweep_goes_on_after_a_failed_and_a_killed_job(folder, extracted):
    told = settings(drafter__draft_vocab_size="64,999,32", optimizer__epochs=2, hydra__sweep__dir="broken")
    first = run("train.py", "-m", *told, cwd=folder, die=("eagle3.checkpoints:Checkpoints._prune", 3, "after"))
    sweep = folder / "broken"
    status = {job: json.loads((sweep / job / "status.json").read_text()) for job in ("0", "1", "2")}
    assert [s["status"] for s in status.values()] == ["finished", "failed", "running"], first.output
    assert "drafter.draft_vocab_size=999" in status["1"]["reason"]
    kept = (sweep / "0" / "metrics.jsonl").read_bytes()
    resumed_at = checkpoints(sweep / "2")[-1].step
    again = run("train.py", "-m", *told, cwd=folder)
    assert again.code != 0
    assert (sweep / "0" / "metrics.jsonl").read_bytes() == kept, "the finished job was left alone"
    rows = [json.loads(line) for line in (sweep / "2" / "metrics.jsonl").read_text().splitlines()]
    again_steps = [row["step"] for row in rows if row["attempt"] == 2 and row["split"] == "train"]
    assert again_steps[0] == resumed_at + 1 == 5, "the killed job went on where it was"
    assert "drafter.draft_vocab_size=999" in (sweep / "1" / "train.log").read_text()
    assert "Traceback" in (sweep / "1" / "train.log").read_text()
    table = (sweep / "summary.md").read_text()
    assert table.count("| finished |") == 2 and table.count("| failed |") == 1


def test_the_same_sweep_twice_at_once_never_shares_a_directory(folder, extracted):
    told = settings(optimizer__epochs=1, hydra__sweep__dir="twice")
    both = [script.wait() for script in [Script("train.py", "-m", *told, cwd=folder) for _ in range(2)]]
    assert 0 in [done.code for done in both]
    for done in both:
        assert done.code == 0 or "another process is working in" in done.output
    rows = [json.loads(line) for line in (folder / "twice" / "0" / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if row["split"] == "train"]
    assert steps == list(range(1, len(steps) + 1)), "one of them trained, once"


def test_a_sweep_over_several_devices_is_refused(folder, extracted):
    told = settings(hardware="cpu_x2", optimizer__batch_tokens=640, seed="0,1", hydra__sweep__dir="devices")
    done = run("train.py", "-m", *told, cwd=folder)
    assert done.code != 0 and "a sweep (-m) trains on one device a job" in done.output
    assert not list((folder / "devices").rglob("run.json"))
