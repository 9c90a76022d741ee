"""serve.py as a whole, on a server that speaks SGLang's HTTP: measured, held, refused, and every failure told."""

import json
import os
import signal
import socket
import sys
import time

import httpx
import pytest
from fake_sglang import installed
from scripts import Script, run, succeed
from tiny import tiny_verifier
from tiny_job import SUBJECTS, settings, write_prompts
from tiny_serve import answered, ours, serve_settings, untrained_drafter

from eagle3.runlog.ledger import read_ledger
from eagle3.runlog.wandb_log import read_wandb


@pytest.fixture
def job(tmp_path):
    """The command line of a benchmark in `tmp_path`."""
    return serve_settings(tmp_path)


def output_of(folder):
    (found,) = (folder / "outputs" / "serve").iterdir()
    return found


def summary_of(folder):
    return json.loads((output_of(folder) / "summary.json").read_text())


def test_a_benchmark_ends_in_ledger_summary_and_wandb_and_is_reused(job, tmp_path):
    done = succeed("serve.py", *job, "tracking=offline", cwd=tmp_path)
    where = output_of(tmp_path)
    rows = [(row.split, row.step) for row in read_ledger(where)]
    assert rows == [
        ("single", 1),
        ("single", 2),
        ("prefill", 1),
        ("prefill", 2),
        ("load", 1),
        ("load", 3),
        ("result", 1),
    ]
    assert json.loads((where / "reconcile.json").read_text())["ok"]
    (log,) = where.glob("wandb/offline-run-*/run-*.wandb")
    assert read_wandb(log).exit_code == 0 and len(read_wandb(log).rows) == len(rows)
    summary = summary_of(tmp_path)
    # Three rounds of each, the warm-up among them: 2 single, 2 long, 2 x 1 and 2 x 3 at once.
    assert (summary["requests"], summary["failed"]) == (3 * (2 + 2 + 2 + 6), 0) and "accept_len" not in summary
    assert [at["concurrency"] for at in summary["load"]] == [1, 3] and summary["concurrency"] == 3
    assert all(len(at["repeats"]) == 2 and at["tok_s_low"] <= at["tok_s"] <= at["tok_s_high"] for at in summary["load"])
    assert {row.split: dict(row.values) for row in read_ledger(where)}["result"]["load_tok_s"] == summary["load_tok_s"]
    assert "3 at once" in done.output and "36, 0 failed" in done.output and not ours(tmp_path)
    again = succeed("serve.py", *job, "tracking=offline", cwd=tmp_path)
    assert "is measured (reused)" in again.output and "starting a server" not in again.output


def test_with_a_drafter_the_engine_drafts_and_its_count_is_told(job, tmp_path):
    drafter = untrained_drafter(tmp_path)
    done = succeed("serve.py", *job, f"drafter_dir={drafter}", cwd=tmp_path)
    line = (output_of(tmp_path) / "command.txt").read_text()
    assert "--speculative-algorithm EAGLE3" in line and f"--speculative-draft-model-path {drafter}" in line
    assert "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4" in line
    # Answers of six tokens: three verifications accept two drafts.
    assert summary_of(tmp_path)["accept_len"] == pytest.approx(1 + 2 / 3) and "1.667" in done.output


def test_a_drafter_that_the_server_does_not_use_is_a_failure(job, tmp_path):
    done = run("serve.py", *job, f"drafter_dir={untrained_drafter(tmp_path)}", "server.env.FAKE=silent", cwd=tmp_path)
    assert done.code == 1 and "it does not draft" in done.output and not ours(tmp_path)


def test_a_dry_run_prints_the_line_with_its_environment_and_starts_nothing(job, tmp_path):
    done = succeed("serve.py", *job, "dry_run=true", "hardware=rtx_pro_6000_x8", "server.env.B=2", cwd=tmp_path)
    (line,) = [line for line in done.output.splitlines() if "sglang.launch_server" in line]
    words = line.split()
    assert {"NCCL_PROTO=LL", "NCCL_ALGO=Ring", "B=2", "PYTHONUNBUFFERED=1"} <= set(words)
    assert "--tp-size 8 --attention-backend triton" in line and f"--model-path {tmp_path / 'v'}" in line
    assert not list(tmp_path.rglob("server.log")) and not list(tmp_path.rglob("run.json"))


def test_requests_that_fail_are_counted_and_their_time_is_not_saved(job, tmp_path):
    done = succeed("serve.py", *job, "server.env.FAKE='fails_every=5'", cwd=tmp_path)
    summary = summary_of(tmp_path)
    assert (summary["requests"], summary["failed"]) == (36, 7)
    assert sum(at["failed"] for at in summary["load"]) <= 7 and "FAILED" in done.output
    assert summary["reasons"] == ['the server answered with 500: {"error": {"message": "out of luck"}}']


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("dies", "start: the server ended with exit code 3 in its phase weights"),
        ("hangs_in_weights", "start: its phase weights took more than 1 s"),
        ("dies_at=2", "single: the server ended with exit code"),
        ("hangs_at=8", "prefill: the server has not answered a request of 60 tokens within 2 s"),
        ("dies_at=30", "load at 3: the server ended with exit code"),
        ("fails_from=13", "load at 1: none of 2 requests was answered"),
        ("breaks_off", "single: none of 2 requests was answered; the first: an answer of 5 tokens instead of 6"),
    ],
)
def test_a_server_that_hangs_dies_or_fails_is_told_with_its_phase_and_leaves_nothing(job, tmp_path, fault, told):
    limits = ["server.request_timeout_s=2", "server.capture.phase_timeouts_s.weights=1"]
    done = run("serve.py", *job, *limits, f"server.env.FAKE='{fault}'", cwd=tmp_path)
    assert done.code == 1 and told in done.output, done.output
    status = json.loads((output_of(tmp_path) / "status.json").read_text())
    assert status["status"] == "failed" and told in status["reason"]
    assert not ours(tmp_path) and not (output_of(tmp_path) / "summary.json").exists()


def test_one_broken_connection_is_a_failed_request_and_no_more(job, tmp_path):
    succeed("serve.py", *job, "server.env.FAKE='cuts_at=20'", cwd=tmp_path)
    summary = summary_of(tmp_path)
    assert summary["failed"] == 1 and "broke off" in summary["reasons"][0]


def refused(tmp_path, job, *more):
    done = run("serve.py", *job, *more, cwd=tmp_path)
    assert done.code == 1 and "Traceback" not in done.output and not list(tmp_path.rglob("server.log")), done.output
    return done.output


def test_what_cannot_be_served_is_refused_before_anything_starts(job, tmp_path):
    alone = [word for word in job if "server" not in word]
    assert "inprocess is no server" in refused(tmp_path, alone, "server=inprocess")
    assert "topk=1: one chain is 4 tokens" in refused(tmp_path, job, "server.speculation.draft_tokens=8")
    said = refused(tmp_path, job, "server.flags.speculative_num_steps=3")
    assert "speculative-num-steps is set by this program" in said and "set server.speculation" in said
    assert "without a drafter" in refused(tmp_path, job, "server.flags.speculative_attention_mode=decode")
    assert "is no drafter directory" in refused(tmp_path, job, "drafter_dir=site")
    assert "serving.prefill_tokens=600" in refused(tmp_path, job, "serving.prefill_tokens=600")
    assert "must rise" in refused(tmp_path, job, "serving.concurrencies=[4,2]")


def test_a_drafter_that_the_engine_would_misread_is_refused(job, tmp_path):
    drafter = untrained_drafter(tmp_path)
    config = json.loads((drafter / "config.json").read_text())
    (drafter / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    said = refused(tmp_path, job, f"drafter_dir={drafter}")
    assert "cannot be served by sglang" in said and "tie_word_embeddings" in said


def test_a_flag_that_the_engine_does_not_know_is_told_in_its_words(job, tmp_path):
    done = run("serve.py", *job, "server.flags.warp_speed=9", cwd=tmp_path)
    assert done.code == 1 and "sglang does not know --warp-speed 9" in done.output


def test_the_verifier_is_no_drafter_for_itself(job, tmp_path):
    done = run("serve.py", *job, "drafter_dir=v", cwd=tmp_path)
    assert done.code == 1 and "v cannot be served by sglang" in done.output and not list(tmp_path.rglob("server.log"))


def wait_until_ready(script, within_s=60.0):
    deadline = time.monotonic() + within_s
    while "next:" not in script.output():
        assert time.monotonic() < deadline and script.process.is_alive(), script.output()
        time.sleep(0.05)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_in_the_foreground_it_stays_until_ctrl_c_and_ends_cleanly(job, tmp_path):
    port = free_port()
    told = [*job, "serving=foreground", f"serving.port={port}"]
    script = Script("serve.py", *told, cwd=tmp_path)
    wait_until_ready(script)
    assert f"http://127.0.0.1:{port}/v1/chat/completions" in script.output()
    assert answered(port) == 200 and len(ours(tmp_path)) >= 1
    second = run("serve.py", *told, cwd=tmp_path)
    assert second.code == 1 and f"serving.port={port} cannot be had" in second.output
    os.kill(script.process.pid, signal.SIGINT)
    done = script.wait(timeout_s=30)
    assert done.code == 0 and "Traceback" not in done.output and not ours(tmp_path), done.output
    with pytest.raises(httpx.TransportError):
        answered(port)


def test_a_server_that_ends_by_itself_in_the_foreground_is_told(job, tmp_path):
    port = free_port()
    told = [*job, "serving=foreground", f"serving.port={port}", "server.env.FAKE='dies_at=1'"]
    script = Script("serve.py", *told, cwd=tmp_path)
    wait_until_ready(script)
    with pytest.raises(httpx.TransportError):
        answered(port)
    done = script.wait(timeout_s=30)
    assert done.code == 1 and "the server ended with exit code" in done.output


def test_ctrl_c_in_a_benchmark_ends_server_and_requests_at_once(job, tmp_path):
    script = Script("serve.py", *job, "server.env.FAKE='hangs_at=3'", cwd=tmp_path)
    deadline = time.monotonic() + 60
    while not any("fired up" in log.read_text() for log in tmp_path.rglob("server.log")):
        assert time.monotonic() < deadline, script.output()
        time.sleep(0.05)
    time.sleep(1)  # it hangs now, or soon: either must end
    os.kill(script.process.pid, signal.SIGINT)
    began = time.monotonic()
    done = script.wait(timeout_s=30)
    assert done.code == 130 and time.monotonic() - began < 15 and not ours(tmp_path), done.output


def test_the_fake_is_installed_for_this_interpreter(tmp_path):
    """Else every refusal above would be that of a missing engine."""
    tiny_verifier(tmp_path / "v")
    write_prompts(tmp_path / "p.jsonl", [[subject] for subject in SUBJECTS])
    told = settings(server="sglang", server__python=sys.executable)
    done = run("serve.py", *told, "dry_run=true", cwd=tmp_path)
    assert done.code == 1 and "has no SGLang" in done.output
    installed(tmp_path / "site")
    succeed("serve.py", *told, "dry_run=true", f"server.env.PYTHONPATH={tmp_path / 'site'}", cwd=tmp_path)
