"""A sweep of serve.py: the untuned server beside every setting, the best of each goal, its price, and its file."""

import csv
import json
import shutil
from contextlib import nullcontext

import pytest
import yaml
from composed import CONF, composed, config
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from scripts import run, succeed
from tiny_serve import ours, serve_settings

from eagle3.serving import phases
from eagle3.serving.phases import phase
from eagle3.serving.tuned import write_tuned
from eagle3.serving.tuning import best_of, commands, read_trials, require_alone, sentences, table, write_summary
from extract.launcher import ServerDied, ServerHung

OVERRIDES = ("server=sglang", "name=mine", "server.env.NCCL_PROTO={}", "server.flags.attention_backend={}")
SETTINGS = {"0": ("LL", "triton"), "1": ("Simple", "triton"), "2": ("LL", "flashinfer")}


def trial(sweep, name, single=None, load=None, *, spread=0.5, failed=0, status="finished", reason=None):
    """A job's directory with what is read of it."""
    folder = sweep / name
    (folder / ".hydra").mkdir(parents=True)
    overrides = (
        [word.format(one) for word, one in zip(OVERRIDES[2:], SETTINGS[name], strict=True)] if name in SETTINGS else []
    )
    (folder / ".hydra" / "overrides.yaml").write_text(json.dumps([*OVERRIDES[:2], *overrides]))
    choices = {"server": "sglang", "hardware": "rtx_pro_6000_x8", "verifier": "hf"}
    (folder / ".hydra" / "hydra.yaml").write_text(yaml.safe_dump({"hydra": {"runtime": {"choices": choices}}}))
    proto, backend = SETTINGS.get(name, (None, None))
    server = {"engine": "sglang", "env": {"NCCL_PROTO": proto}, "flags": {"attention_backend": backend, "tp_size": 8}}
    (folder / "run.json").write_text(
        json.dumps({"stage": "serve", "config": {"server": server}, "inputs": {}, "attempts": [{"source_sha256": "a"}]})
    )
    (folder / "status.json").write_text(json.dumps({"status": status} | ({"reason": reason} if reason else {})))
    if single is not None:
        at = {"concurrency": 128, "tok_s": load, "tok_s_low": load - spread, "tok_s_high": load + spread}
        told = {
            "decode_tok_s": single, "decode_tok_s_low": single - spread, "decode_tok_s_high": single + spread,
            "load_tok_s": load, "prefill_tok_s": 9000.0, "ttft_ms": 50.0, "concurrency": 128, "load": [at],
            "requests": 100, "failed": failed, "reasons": ["the server answered with 500"] if failed else [],
        }  # fmt: skip
        (folder / "summary.json").write_text(json.dumps(told))


DEATH = (
    "ServerHung: start: its phase ready took more than 600 s, and is stopped; the last lines of /a/b/server.log:\n"
    "Capturing CUDA graphs\nwaiting for rank 3\n"
)


@pytest.fixture
def first_run(tmp_path):
    """The figures of a tuning that has been done, and a setting that hung."""
    trial(tmp_path, "baseline", 63.6, 2370.0)
    trial(tmp_path, "0", 90.0, 2320.0)
    trial(tmp_path, "1", 64.0, 2371.0)
    trial(tmp_path, "2", status="failed", reason=DEATH)
    return tmp_path


def test_each_goal_has_its_best_and_the_price_of_each_gain_is_told(first_run):
    trials = read_trials(first_run)
    assert [t.name for t in trials] == ["baseline", "0", "1", "2"]
    assert (best_of(trials, "single").name, best_of(trials, "load").name) == ("0", "1")
    told = sentences(trials)
    assert (
        told[0] == "best single: job 0, single stream 63.6 → 90.0 (+41.5%) tokens/s, 128 at once 2,370 → 2,320 (-2.1%)"
    )
    assert told[1].startswith("best load: job 1, single stream 63.6 → 64.0") and told[1].endswith(
        "spread of the repeats"
    )
    assert told[2] == (
        "job 2 failed in phase start: its phase ready took more than 600 s, and is stopped; "
        "its log ends: waiting for rank 3"
    )
    assert [command.split()[-3:-2] for command in commands(first_run, trials)] == [["single"], ["load"]]


def test_the_table_has_every_figure_beside_the_untuned_one_and_fits(first_run):
    console = Console(width=80, record=True)
    console.print(table(read_trials(first_run), "4 servers"))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    for part in ("untuned", "63.6", "2,370", "★ single", "90.0", "x1.42", "x0.98", "NCCL_PROTO=LL", "failed in"):
        assert part in text, part


def test_the_summary_files_say_the_same_in_full(first_run):
    write_summary(first_run, read_trials(first_run))
    with (first_run / "summary.csv").open(newline="") as file:
        rows = {row["job"]: row for row in csv.DictReader(file)}
    assert rows["0"]["best"] == "single" and rows["1"]["best"] == "load" and rows["baseline"]["setting"] == "untuned"
    assert rows["0"]["setting"] == "server.env.NCCL_PROTO=LL server.flags.attention_backend=triton"
    assert (rows["2"]["phase"], rows["2"]["single tok/s"], rows["2"]["status"]) == ("start", "", "failed")
    text = (first_run / "summary.md").read_text()
    assert "+41.5%" in text and "--best single --name NAME" in text and text.count("\n| ") == 6


def test_a_setting_that_lost_requests_is_never_the_best(tmp_path):
    trial(tmp_path, "baseline", 60.0, 2000.0)
    trial(tmp_path, "0", 99.0, 3000.0, failed=1)
    trials = read_trials(tmp_path)
    assert best_of(trials, "single").name == best_of(trials, "load").name == "baseline"
    assert "job 0 cannot be the best: 1 of 100 requests failed: the server answered with 500" in sentences(trials)
    assert commands(tmp_path, trials) == []


def test_where_the_untuned_server_hangs_the_others_are_still_compared(tmp_path):
    trial(tmp_path, "baseline", status="failed", reason=DEATH)
    trial(tmp_path, "0", 90.0, 2320.0)
    trials = read_trials(tmp_path)
    assert "there is no untuned server to compare it with" in sentences(trials)[0]
    console = Console(width=80, record=True)
    console.print(table(trials, "2 servers"))
    assert "failed in start" in " ".join(console.export_text().split())


def test_the_winner_becomes_a_server_that_composes_to_what_was_measured(first_run, tmp_path):
    conf = tmp_path / "conf"
    shutil.copytree(CONF, conf)
    file = write_tuned(first_run, "single", None, "fast", conf / "server")
    text = file.read_text()
    assert "63.6 → 90.0 (+41.5%)" in text and "hardware=rtx_pro_6000_x8" in text
    assert yaml.safe_load(text) == {
        "defaults": ["sglang", "_self_"], "env": {"NCCL_PROTO": "LL"}, "flags": {"attention_backend": "triton"}
    }  # fmt: skip
    done = succeed("serve.py", "--config-path", str(conf), "server=fast", "--cfg", "job", cwd=tmp_path)
    server = yaml.safe_load(done.output)["server"]
    plain = config("server=sglang", script="serve").server
    assert server["env"] == {"NCCL_PROTO": "LL"} and server["flags"] == {"attention_backend": "triton"}
    assert server["engine"] == "sglang" and server["start_timeout_s"] == plain.start_timeout_s
    with pytest.raises(ValueError, match="is there already"):
        write_tuned(first_run, "single", None, "fast", conf / "server")


@pytest.mark.parametrize(
    ("goal", "job", "name", "told"),
    [
        ("single", None, "Fast!", "use small letters"),
        (None, "2", "x", "no such job with figures; there are baseline, 0, 1"),
        (None, "7", "x", "no such job"),
    ],
)
def test_what_cannot_be_written_is_told(first_run, goal, job, name, told):
    with pytest.raises(ValueError, match=told):
        write_tuned(first_run, goal, job, name, first_run)


def test_the_untuned_server_is_not_written_as_a_winner(tmp_path):
    trial(tmp_path, "baseline", 99.0, 2000.0)
    trial(tmp_path, "0", 90.0, 2001.0)
    with pytest.raises(ValueError, match="no setting is better than the untuned server"):
        write_tuned(tmp_path, "single", None, "x", tmp_path)
    assert write_tuned(tmp_path, "load", None, "x", tmp_path).exists()


@given(
    st.sampled_from(["start", "single", "prefill", "load at 64"]),
    st.sampled_from([ServerDied, ServerHung]),
    st.text(alphabet="abc :;\n", min_size=1, max_size=30),
)
def test_a_phase_comes_back_from_the_reason_that_a_run_keeps(name, kind, words):
    with pytest.raises(kind) as caught, phase(name):
        raise kind(words)
    found, why = phases.told(f"{kind.__name__}: {caught.value}")
    assert found == name and why == words
    assert phases.told("ValueError: nothing of a phase") == ("", "ValueError: nothing of a phase")


def test_a_sweep_measures_the_untuned_server_once_and_every_setting_that_lives(tmp_path):
    job = [*serve_settings(tmp_path), "tracking=offline", "server.capture.phase_timeouts_s.weights=1"]
    told = ["-m", *job, "server.env.FAKE='','dies_at=30',hangs_in_weights", "hydra.sweep.dir=sweep"]
    done = run("serve.py", *told, cwd=tmp_path)
    assert done.code != 0, "a failed job is a failed sweep"
    with (tmp_path / "sweep" / "summary.csv").open(newline="") as file:
        rows = {row["job"]: row for row in csv.DictReader(file)}
    assert [row["status"] for row in rows.values()] == ["finished", "finished", "failed", "failed"], done.output
    assert {name: row["phase"] for name, row in rows.items()} == {
        "baseline": "", "0": "", "1": "load at 3", "2": "start"
    }  # fmt: skip
    assert "took more than 1 s" in rows["2"]["reason"] and float(rows["baseline"]["load tok/s"]) > 0
    assert "4 servers in sweep" in done.output and done.output.count("best single:") == 1
    groups = {json.loads(file.read_text())["group"] for file in (tmp_path / "sweep").glob("*/runlog.json")}
    assert groups == {"sweep"}, "one W&B group, the untuned server in it"
    before = (tmp_path / "sweep" / "baseline" / "metrics.jsonl").read_bytes()
    again = run("serve.py", *told, cwd=tmp_path)
    assert (tmp_path / "sweep" / "baseline" / "metrics.jsonl").read_bytes() == before
    assert again.output.count("is measured (reused)") == 2 and not ours(tmp_path)


@pytest.mark.parametrize(("launcher", "alone"), [("basic", True), ("joblib", False)])
def test_servers_that_would_measure_each_other_are_refused(launcher, alone):
    composed(f"hydra/launcher={launcher}", "hydra.mode=MULTIRUN", script="serve")
    with nullcontext() if alone else pytest.raises(ValueError, match="spoil each other's figures"):
        require_alone()
