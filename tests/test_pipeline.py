"""The scripts as a user runs them, on a tiny verifier: whole, again, from elsewhere, and with other settings."""

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
from tiny_job import settings
from whole_job import ENGINE_STARTS, named_run, values_by_step

from eagle3.export.directory import read_vocab
from extract.store import open_store, verify

INTERRUPTED = {"extract": "extract.journal:Journal.append", "train": "eagle3.record:Record._emit_train"}


def test_extraction_leaves_a_sound_store_and_names_the_next_command(folder, extracted):
    assert verify(folder / "store").faults == []
    store = open_store(folder / "store", need_teacher=True, need_complete=True)
    counts = store.manifest["counts"]
    assert counts["samples"] >= 24 and counts["shards"] >= 2, "several shards, or the kills test little"
    run_dir, done = extracted
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["tokens"] == counts["tokens"] and summary["respond_tokens_per_s"] > 0
    assert "next: python train.py verifier=hf" in done.output
    assert "⟦ ⟧ is supervised" in done.output and f"{counts['tokens']:,} tokens" in done.output


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
    val = values_by_step(run_dir, "val")
    accept_len = {step: values["accept_len"] for step, values in val.items()}
    best = max(accept_len, key=lambda step: (accept_len[step], -val[step]["loss"], -step))
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


def test_evaluation_decodes_with_the_trained_drafter_and_is_reused(folder, trained):
    run_dir, done = named_run("evaluate", folder)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert 1 <= summary["accept_len"] <= 1 + 7
    assert f"{summary['accept_len']:.3f}" in done.output or f"{summary['accept_len']:.2f}" in done.output
    assert "reused" in succeed("evaluate.py", *settings(), cwd=folder).output


def test_settings_of_later_stages_do_not_stop_an_earlier_one(folder, trained):
    assert "(reused)" in succeed("extract.py", *settings(optimizer__lr=1e-5, hardware__threads=1), cwd=folder).output
    assert "(reused)" in succeed("train.py", *settings(evaluation__bootstrap=60), cwd=folder).output


@pytest.mark.parametrize("hurt", ["shard", "index"])
def test_a_finished_store_that_was_damaged_is_mended_by_the_same_command(folder, hurt):
    told = settings(store=f"hurt-{hurt}", extraction__limit=4, extraction__max_new_tokens=8)
    succeed("extract.py", *told, cwd=folder)
    store = folder / f"hurt-{hurt}"
    file = store / {"shard": "shards/00000.safetensors", "index": "index.jsonl"}[hurt]
    file.write_bytes(file.read_bytes()[:-20])
    done = succeed("extract.py", *told, cwd=folder)
    assert "(reused)" not in done.output and verify(store).faults == []


def test_another_extraction_in_place_of_the_finished_one_is_not_taken_for_it(folder):
    told = {"store": "taken", "extraction__limit": 4, "extraction__max_new_tokens": 8}
    succeed("extract.py", *settings(**told), cwd=folder)
    shutil.rmtree(folder / "taken")
    succeed("extract.py", *settings(**told | {"extraction__max_new_tokens": 6}), cwd=folder)
    done = run("extract.py", *settings(**told), cwd=folder)
    assert done.code == 1 and "sampling.max_new_tokens: 6 -> 8" in done.output and "Traceback" not in done.output


def test_an_evaluation_is_not_reused_for_other_prompts_of_the_same_name(folder, trained):
    told = settings(evaluation__prompts="changing.jsonl", evaluation__limit=2)
    (folder / "changing.jsonl").write_text((folder / "e.jsonl").read_text())
    succeed("evaluate.py", *told, cwd=folder)
    (folder / "changing.jsonl").write_text('{"prompt": "Who?"}\n{"prompt": "Where?"}\n')
    assert "(reused)" not in succeed("evaluate.py", *told, cwd=folder).output
    assert "(reused)" in succeed("evaluate.py", *told, cwd=folder).output


def test_the_next_command_of_a_resumed_run_finds_its_drafter(folder, extracted):
    told = settings(optimizer__epochs=2, hydra__run__dir="stopped", tracking="offline")
    killed("train.py", *told, cwd=folder, die=("eagle3.record:Record._emit_train", 2, "after"))
    done = succeed("train.py", "resume=stopped", cwd=folder)
    words = done.output[done.output.index("next: ") :].replace("\\\n", "").split()
    assert {"verifier=hf", "optimizer.epochs=2", "drafter_dir=stopped/drafter"} <= set(words)
    assert "resume=stopped" not in words
    succeed("evaluate.py", *words[3:], "evaluation.limit=1", cwd=folder)


# Refused


def test_capture_layers_that_the_store_lacks_are_refused(folder, extracted):
    done = run("train.py", *settings(verifier__capture_layers="[1,2,3]"), cwd=folder)
    assert done.code == 1 and "verifier.capture_layers=[1, 2, 3]" in done.output, done.output


def test_another_chat_template_than_the_stores_is_refused(folder, extracted):
    (folder / "other.jinja").write_text("{{ messages[0].content }}")
    done = run("train.py", *settings(verifier__chat_template="other.jinja"), cwd=folder)
    assert done.code == 1 and "another chat template" in done.output


def test_prompts_that_all_leave_no_room_are_told_why(folder):
    told = {"extraction__max_len": 8, "extraction__max_new_tokens": 4, "evaluation__max_new_tokens": 4}
    done = run("extract.py", *settings(store="short", **told), cwd=folder)
    assert done.code == 1 and "leaves no room for an answer in 8" in done.output


def test_a_store_that_is_a_file_is_told_in_one_line(folder):
    done = run("extract.py", *settings(store="p.jsonl"), cwd=folder)
    assert done.code == 1 and "store=p.jsonl" in done.output and "Traceback" not in done.output


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
    done = run("train.py", f"resume={trained[0]}", "optimizer.lr=1", "optimizer.epochs=4", "experiment=quickstart",
               cwd=folder)  # fmt: skip
    assert done.code == 1 and "optimizer.lr: 0.003 there, 1.0 now" in done.output and "Traceback" not in done.output
    assert "experiment brings settings" in done.output and "optimizer.epochs" not in done.output, "only what differs"
    done = run("train.py", "resume=nowhere", cwd=folder)
    assert done.code == 1 and f"{folder}/nowhere is no directory; give the run directory" in done.output
    assert not (folder / "nowhere").exists()
    done = run("extract.py", *settings(), f"resume={trained[0]}", cwd=folder)
    assert done.code == 1 and "resume: train.py takes one of them" in done.output


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
    assert not (folder / "dry").exists()


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


@pytest.mark.parametrize("stage", ["extract", "train"])
def test_ctrl_c_is_one_line_and_the_same_command_goes_on(folder, extracted, stage):
    done = run(f"{stage}.py", *settings(store=f"ctrl-c-{stage}" if stage == "extract" else "store",
               hydra__run__dir=f"ctrl-c-{stage}-run"), cwd=folder, die=(INTERRUPTED[stage], 2, "ctrl-c"))  # fmt: skip
    assert done.code == 130 and f"{stage}: interrupted" in done.output and "Traceback" not in done.output
    assert "KeyboardInterrupt" in (folder / f"ctrl-c-{stage}-run" / "status.json").read_text()


def test_a_full_disk_in_training_is_one_line(folder, extracted):
    told = settings(hydra__run__dir="full-disk")
    done = run("train.py", *told, cwd=folder, die=("eagle3.checkpoints:save_drafter", 1, "full disk"))
    assert done.code == 1 and "make room and run the same command again" in done.output
    assert "Traceback" not in done.output
    succeed("train.py", *told, cwd=folder)


# Obeyed


@pytest.mark.parametrize("max_len", [32, 64])
def test_samples_are_as_long_as_the_config_says(folder, extracted, max_len):
    longest = max(ref.tokens for ref in open_store(folder / "store").samples)
    assert longest > 64
    told = settings(
        store=f"len-{max_len}",
        extraction__max_len=max_len,
        extraction__max_new_tokens=20,
        evaluation__max_new_tokens=20,
        optimizer__batch_tokens=640,
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
