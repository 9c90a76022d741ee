"""Runs side by side: order, what sets them apart, what became of them, and which commands go on with the best."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.lines import Line2D
from omegaconf import OmegaConf
from rich.console import Console

from eagle3 import charts
from eagle3.charts import draw
from eagle3.compare import apart, code_note, commands, names_of, read_runs, read_sweep, summary_table, update_summary
from eagle3.runlog.ledger import Declared, Ledger
from eagle3.sweep import begin_sweep, require_unchanged, varied_keys
from extract.rundir import owned

ROOT = Path(__file__).resolve().parents[1]
DECLARED = {"train": Declared(frozenset({"loss"})), "val": Declared(frozenset({"accept_len", "loss"}))}


def a_run(folder, overrides=(), *, accept_len=1.5, loss=2.0, config=None, code="", status="finished"):
    """A run directory with one validation."""
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "overrides.yaml").write_text(json.dumps(overrides))
    (folder / "status.json").write_text(json.dumps({"status": status}))
    ledger = Ledger(folder / "metrics.jsonl", DECLARED, run=folder.name)
    for step in (1, 2):
        ledger.emit("train", step, {"loss": 3.0 / step})
    ledger.emit("val", 2, {"accept_len": accept_len, "loss": loss})
    ledger.close()
    record = {"stage": "train", "config": config or {}, "inputs": {"store": "abc"},
              "attempts": [{"source_sha256": code}]}  # fmt: skip
    (folder / "run.json").write_text(json.dumps(record))
    return folder


def names(jobs):
    return [job.directory.name for job in jobs]


def test_equal_lengths_are_ordered_by_validation_loss(tmp_path):
    for name, accept_len, loss in (("0", 1.5, 3.0), ("1", 1.5, 2.0), ("2", 1.4, 1.0), ("3", 1.5, float("nan"))):
        a_run(tmp_path / name, accept_len=accept_len, loss=loss)
    assert names(read_sweep(tmp_path)) == ["1", "0", "3", "2"]


def test_only_overrides_that_differ_are_shown(tmp_path):
    a_run(tmp_path / "0", ["store=s", "lr=1e-3", "decay=0.8"], accept_len=1.2)
    a_run(tmp_path / "1", ["store=s", "lr=3e-4", "decay=0.8", "noise=0"])
    assert apart(read_sweep(tmp_path)) == [{"lr": "3e-4", "noise": "0"}, {"lr": "1e-3"}]
    update_summary(tmp_path)
    told = (tmp_path / "summary.md").read_text() + (tmp_path / "summary.csv").read_text()
    assert "store=s" not in told and "decay" not in told


LONG = "/data/projects/speculative/stores/llama31_8b/ultrachat"


@pytest.mark.parametrize(
    ("told", "short"),
    [
        ([["optimizer.lr=1e-3"], ["optimizer.lr=1e-4"]], ["lr=1e-3", "lr=1e-4"]),
        ([["a.lr=1", "b.lr=2"], ["a.lr=3", "b.lr=4"]], ["a.lr=1 b.lr=2", "a.lr=3 b.lr=4"]),
        ([[f"store={LONG}/one"], [f"store={LONG}/two/"]], ["store=one", "store=two"]),
        ([["store=/a/same"], ["store=/b/same"]], ["store=/a/same", "store=/b/same"]),
        ([["betas=[0.9,0.95]"], ["betas=[0.8,0.9]"]], ["betas=[0.9,0.95]", "betas=[0.8,0.9]"]),
        ([[f"text={'x' * 40}{end}"] for end in "ab"], [f"text={'x' * 15}…{'x' * 15}{end}" for end in "ab"]),
        ([[f"text={'x' * 30}{middle}{'x' * 30}"] for middle in "ab"], [f"text={'x' * 30}{m}{'x' * 30}" for m in "ab"]),
        ([["seed=1", "lr=1"], ["seed=1"]], ["lr=1", ""]),
    ],
)  # fmt: skip
def test_names_are_as_short_as_they_can_be_without_two_alike(tmp_path, monkeypatch, told, short):
    for number, overrides in enumerate(told):
        a_run(tmp_path / str(number), [*overrides, "same=for-all"], accept_len=2 - number / 10)
    jobs = read_sweep(tmp_path)
    assert names_of(jobs) == short
    console = Console(width=200, file=io.StringIO())
    console.print(summary_table("jobs", jobs))
    drawn = []
    monkeypatch.setattr(charts, "_entry", lambda label, *_: drawn.append(label) or Line2D([], [], label=label))
    draw([job.directory for job in jobs], tmp_path / "charts")
    if all(short):
        assert all(line in console.file.getvalue() for name in short for line in name.split())
        assert drawn == short, "the legend says the same"


def test_runs_that_differ_in_everything_are_told_by_a_few_settings(tmp_path):
    for number in (0, 1):
        a_run(tmp_path / str(number), config={"drafter": {f"key_{n}": number for n in range(20)}})
    assert [len(name.split()) for name in names_of(read_runs([tmp_path / "0", tmp_path / "1"]))] == [4, 4]


@pytest.mark.parametrize("file", ["run.json", "status.json", "sweep.json", ".hydra/overrides.yaml"])
@pytest.mark.parametrize("content", ["[]", "{}", '{"stage": "train", "config": ', '"x"', "null", "\x00: [", "[1]"])
def test_a_damaged_file_is_named_and_met_with_no_traceback(tmp_path, file, content):
    for name in ("0", "1"):
        a_run(tmp_path / "sweep" / name, ["lr=1"])
    hydra = hydra_node(tmp_path / "sweep", tmp_path / "sweep")
    begin_sweep(tmp_path / "sweep", hydra)
    damaged = tmp_path / "sweep" / file if file == "sweep.json" else tmp_path / "sweep" / "1" / file
    damaged.parent.mkdir(exist_ok=True)
    damaged.write_text(content)
    calls = (lambda: varied_keys(tmp_path / "sweep"),) if file == "sweep.json" else (
        lambda: read_runs([tmp_path / "sweep"]), lambda: update_summary(tmp_path / "sweep"),
        lambda: read_runs([tmp_path / "sweep" / "1"]),
    )  # fmt: skip
    for call in calls:
        if (file, content) == (".hydra/overrides.yaml", "[]"):
            call()  # nothing was overridden
            continue
        with pytest.raises(ValueError, match=str(damaged if file != "run.json" else damaged.parent)):
            call()


def test_the_summary_ends_with_commands_for_the_best(tmp_path, monkeypatch):
    a_run(tmp_path / "sweep" / "0", ["lr=1"], accept_len=1.2)
    a_run(tmp_path / "sweep" / "1", ["lr=2"])
    monkeypatch.chdir(tmp_path)
    update_summary(tmp_path / "sweep")
    assert (tmp_path / "sweep" / "summary.md").read_text().splitlines()[-2:] == [
        "    python train.py from_run=sweep/1", "    python -m eagle3.export sweep/1",
    ]  # fmt: skip
    assert commands(read_sweep(tmp_path / "sweep")[0])[0] == "python train.py from_run=sweep/1"


def test_a_job_whose_process_is_gone_is_not_shown_as_running(tmp_path):
    a_run(tmp_path / "0", ["lr=1"], status="running")
    with owned(tmp_path / "0"):
        assert read_sweep(tmp_path)[0].status == "running"
    assert read_sweep(tmp_path)[0].status == "stopped"


def test_jobs_that_ran_on_other_code_are_told(tmp_path):
    for name, code in (("0", "aaaa"), ("1", "aaaa"), ("2", "bbbb")):
        a_run(tmp_path / name, [f"lr={name}"], code=code)
    jobs = read_sweep(tmp_path)
    assert code_note(jobs) == "the code differs: 0, 1 ran aaaa; 2 ran bbbb"
    assert code_note([job for job in jobs if job.code == "aaaa"]) == ""
    update_summary(tmp_path)
    assert "the code differs" in (tmp_path / "summary.md").read_text()


def hydra_node(conf, sweep_dir, overrides=("a=1,2", "b=3"), params=None):
    sources = [{"path": str(conf), "provider": "main"}, {"path": "pkg", "provider": "hydra"}]
    return OmegaConf.create({"overrides": {"task": list(overrides)}, "runtime": {"config_sources": sources},
                             "sweeper": {"params": params}, "sweep": {"dir": str(sweep_dir)}})  # fmt: skip


def test_a_config_file_that_changes_during_a_sweep_stops_the_jobs_to_come(tmp_path):
    conf, sweep_dir = tmp_path / "conf", tmp_path / "sweep"
    (conf / "group").mkdir(parents=True)
    file = conf / "group" / "a.yaml"
    file.write_text("x: 1\n")
    hydra = hydra_node(conf, sweep_dir, params={"optimizer.lr": "1,2"})
    begin_sweep(sweep_dir, hydra)
    assert varied_keys(sweep_dir) == ["a", "optimizer.lr"]
    require_unchanged(sweep_dir, hydra)
    file.write_text("x: 2\n")
    with pytest.raises(ValueError, match=r"config files have changed since this sweep began: group/a.yaml"):
        require_unchanged(sweep_dir, hydra)
    file.write_text("x: 1\n")
    (conf / "more.yaml").write_text("")
    with pytest.raises(ValueError, match=r"more\.yaml"):
        require_unchanged(sweep_dir, hydra)
    begin_sweep(sweep_dir, hydra)  # the same command again begins with what is there now
    require_unchanged(sweep_dir, hydra)


def command(*arguments, cwd):
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "COLUMNS": "120"}
    line = [sys.executable, "-m", "eagle3.sweep", *map(str, arguments)]
    return subprocess.run(line, cwd=cwd, capture_output=True, text=True, env=environment)


def test_any_runs_are_compared_in_table_chart_and_config(tmp_path):
    tracked = {"mode": "local"}
    a_run(tmp_path / "one", config={"optimizer": {"lr": 1e-3, "eps": 1e-8}, "tracking": tracked}, code="aaaa")
    a_run(tmp_path / "two", config={"optimizer": {"lr": 3e-4, "eps": 1e-8}, "seed": 1}, code="bbbb", accept_len=1.7)
    a_run(tmp_path / "sweep" / "0", ["lr=1"], accept_len=1.1)
    done = command("one", "two", "--out", "charts", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.index("two") < done.stdout.index("one") and done.stdout.count("★") == 1
    lines = done.stdout.splitlines()
    assert {"optimizer.lr  two: 0.0003, one: 0.001", "seed  two: 1, one: absent", "code  two: bbbb, one: aaaa"} <= set(
        lines
    )
    assert not [line for line in lines if line.startswith(("tracking", "optimizer.eps", "input"))]
    assert (tmp_path / "charts" / "compare.png").stat().st_size > 1000 and "chart: charts/compare.png" in lines
    assert names(read_runs([tmp_path / "sweep", tmp_path / "one"])) == ["one", "0"], "sweeps and runs together"
    assert not list(tmp_path.glob("summary.*"))


@pytest.mark.parametrize("wrong", ["nowhere", "empty"])
def test_a_wrong_directory_is_named_and_left_alone(tmp_path, wrong):
    (tmp_path / "empty").mkdir()
    done = command(wrong, cwd=tmp_path)
    assert done.returncode == 2 and str(tmp_path / wrong) in done.stderr and "Traceback" not in done.stderr
    assert not list((tmp_path / "empty").iterdir()) and not (tmp_path / "nowhere").exists()
