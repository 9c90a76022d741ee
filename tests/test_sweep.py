import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from eagle3.compare import read_sweep, summary_table, update_summary
from eagle3.runlog.ledger import Declared, Ledger
from eagle3.sweep import show
from extract.rundir import owned

ROOT = Path(__file__).resolve().parents[1]
APP = """
import sys
from pathlib import Path

sys.path.insert(0, {root!r})
import hydra
from hydra.core.hydra_config import HydraConfig
from eagle3.runlog import Declared, open_runlog
from eagle3.runlog.wandb_log import read_wandb

@hydra.main(version_base="1.3", config_path=".", config_name="app")
def main(cfg):
    run_dir = Path(HydraConfig.get().runtime.output_dir)
    declared = {{"val": Declared(frozenset({{"accept_len"}})), "train": Declared(frozenset({{"loss"}}))}}
    with open_runlog(run_dir, declared, mode=cfg.mode, project="p", group="g", name=f"lr={{cfg.lr}}",
                     job_type="train", config={{"lr": cfg.lr}}) as log:
        log.emit("train", 1, {{"loss": 1.0}})
        if cfg.lr == 2:
            raise RuntimeError("lr 2 | is\\nbad")
        for step in (1, 2, 3):
            log.emit("val", step, {{"accept_len": 1 + cfg.lr / 10 + (step == 2) / 100}})

main()
"""
CONFIG = """
lr: 1
mode: local
hydra:
  job: {chdir: false}
  sweep: {dir: sweep}
  callbacks:
    summary: {_target_: eagle3.sweep.SweepSummary}
"""


def sweep(folder, *arguments):
    (folder / "app.py").write_text(APP.format(root=str(ROOT)))
    (folder / "app.yaml").write_text(CONFIG)
    command = [sys.executable, "app.py", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def read_csv(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_jobs_are_listed_best_first_at_the_best_step(tmp_path):
    done = sweep(tmp_path, "-m", "lr=1,4,3")
    assert done.returncode == 0, done.stderr
    rows = read_csv(tmp_path / "sweep" / "summary.csv")
    assert [(row["best"], row["job"], row["overrides"]) for row in rows] == [
        ("yes", "1", "lr=4"),
        ("", "2", "lr=3"),
        ("", "0", "lr=1"),
    ]
    assert float(rows[0]["val/accept_len"]) == pytest.approx(1.41) and rows[0]["best_step"] == "2"
    assert {row["status"] for row in rows} == {"finished"}
    assert "| ★ | 1 | lr=4 | 1.41 |" in (tmp_path / "sweep" / "summary.md").read_text()
    assert done.stdout.count("★") == 1 and "3 jobs in sweep" in done.stdout
    assert "summary: sweep/summary.md" in done.stdout


def test_a_failed_job_is_listed_with_its_reason_and_its_own_traceback(tmp_path):
    done = sweep(tmp_path, "-m", "lr=1,2,3", "mode=offline")
    assert done.returncode != 0
    rows = read_csv(tmp_path / "sweep" / "summary.csv")
    assert [(row["job"], row["status"]) for row in rows] == [
        ("2", "finished"),
        ("0", "finished"),
        ("1", "failed"),
    ]
    assert rows[2]["reason"] == "RuntimeError: lr 2 | is bad" and rows[2]["best"] == ""
    assert "lr 2 \\| is bad |" in (tmp_path / "sweep" / "summary.md").read_text()
    assert "3 jobs in sweep, 1 failed" in done.stdout and "job 1 failed: RuntimeError: lr 2" in done.stdout
    job_log = (tmp_path / "sweep" / "1" / "app.log").read_text()
    assert "Traceback" in job_log and "lr 2 | is" in job_log
    assert "Traceback" not in (tmp_path / "sweep" / "2" / "app.log").read_text()
    # Three jobs of one process are three W&B runs, each closed with its own exit code.
    from eagle3.runlog.wandb_log import read_wandb

    exits = {}
    for path in (tmp_path / "sweep").glob("*/wandb/offline-run-*/run-*.wandb"):
        exits.setdefault(path.relative_to(tmp_path).parts[1], []).append(read_wandb(path).exit_code)
    assert exits == {"0": [0], "1": [1], "2": [0]}


def test_jobs_of_several_processes_fill_one_table(tmp_path):
    several = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    done = sweep(tmp_path, "-m", "lr=1,2,3", *several)
    assert done.returncode != 0, "a failed job is a failed sweep"
    rows = read_csv(tmp_path / "sweep" / "summary.csv")
    assert [(row["best"], row["job"], row["overrides"], row["status"]) for row in rows] == [
        ("yes", "2", "lr=3", "finished"),
        ("", "0", "lr=1", "finished"),
        ("", "1", "lr=2", "failed"),
    ]
    assert "job 1 failed: RuntimeError: lr 2" in done.stdout and done.stdout.count("3 jobs in sweep") == 1
    assert "Traceback" in (tmp_path / "sweep" / "1" / "app.log").read_text()


def test_when_every_job_fails_there_is_no_best(tmp_path):
    done = sweep(tmp_path, "-m", "lr=2,2.0")
    assert done.returncode != 0 and "★" not in done.stdout and "2 failed" in done.stdout
    assert {row["best"] for row in read_csv(tmp_path / "sweep" / "summary.csv")} == {""}


def test_a_refused_job_leaves_the_status_of_a_running_one_alone(tmp_path):
    job = tmp_path / "sweep" / "0"
    job.mkdir(parents=True)
    (job / "status.json").write_text('{"status": "running"}')
    with owned(job):
        assert sweep(tmp_path, "-m", "lr=2").returncode != 0
        assert (job / "status.json").read_text() == '{"status": "running"}'
    assert sweep(tmp_path, "-m", "lr=2").returncode != 0
    assert json.loads((job / "status.json").read_text())["status"] == "failed"


def test_a_single_run_writes_no_summary(tmp_path):
    done = sweep(tmp_path, "hydra.run.dir=one")
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("summary.*")) and "jobs in" not in done.stdout


def job(folder, overrides, *, status="finished", reason=None, accept_len=None, summary=None):
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "overrides.yaml").write_text(json.dumps(overrides))
    if status is not None:
        (folder / "status.json").write_text(json.dumps({"status": status} | ({"reason": reason} if reason else {})))
    if accept_len is not None:
        ledger = Ledger(folder / "metrics.jsonl", {"val": Declared(frozenset({"accept_len"}))}, run="r")
        for step, value in enumerate(accept_len):
            ledger.emit("val", step, {"accept_len": value})
        ledger.close()
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))


def test_nan_never_wins_and_a_failed_job_is_never_the_best(tmp_path):
    job(tmp_path / "0", ["a=0"], accept_len=[float("nan"), float("nan")])
    job(tmp_path / "1", ["a=1"], accept_len=[1.2, float("nan"), 1.3])
    job(tmp_path / "2", ["a=2"], status="failed", reason="out of memory", accept_len=[9.0])
    job(tmp_path / "3", ["a=3"], status=None)
    assert [j.directory.name for j in read_sweep(tmp_path)] == ["1", "0", "3", "2"]
    update_summary(tmp_path)
    rows = read_csv(tmp_path / "summary.csv")
    assert [row["best"] for row in rows] == ["yes", "", "", ""]
    assert [row["status"] for row in rows] == ["finished", "finished", "running", "failed"]
    assert rows[0]["val/accept_len"] == "1.3" and rows[1]["val/accept_len"] == ""


def test_jobs_without_a_ledger_show_the_numbers_of_their_summary(tmp_path):
    job(tmp_path / "0", ["a=0"], summary={"accept_len": 1.5, "prompts": 24, "name": "x", "same": True})
    (found,) = read_sweep(tmp_path)
    assert found.figures == {"accept_len": 1.5, "prompts": 24}


def test_the_table_fits_80_columns_and_cuts_nothing(tmp_path, capsys):
    long = "drafter.a_very_long_key_that_goes_on_and_on=1e-3"
    job(tmp_path / "0", [long, "b=[1,2]"], accept_len=[1.2])
    job(tmp_path / "1", ["a=1"], status="failed", reason="ValueError: [red]markup[/red] stays as it is")
    console = Console(width=80, record=True)
    console.print(summary_table("2 jobs", read_sweep(tmp_path)))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    assert "and_on=1e-3" in text and "b=[1,2]" in text, "folded, not cut"
    show("in a sweep", read_sweep(tmp_path))
    assert "job 1 failed: ValueError: [red]markup[/red] stays as it is\n" in capsys.readouterr().out


def test_a_directory_without_jobs_is_named(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "eagle3.sweep", str(tmp_path)], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 2 and str(tmp_path) in done.stderr and "Traceback" not in done.stderr
