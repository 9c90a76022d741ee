"""`-m` with the real training script: a run for each value, failures that stay their own, and going on."""

import json
import shutil
import time

from scripts import ROOT, Script, run, succeed
from tiny_job import settings

from eagle3.checkpoints import checkpoints
from eagle3.runlog.wandb_log import read_wandb


def test_a_sweep_gives_a_run_for_each_value_and_a_table(folder, extracted):
    told = settings(optimizer__lr="1e-3,1e-4", optimizer__epochs=1, tracking="offline")
    done = succeed("train.py", "-m", *told, cwd=folder)
    (sweep,) = (folder / "multirun" / "train").iterdir()  # one directory for all jobs
    configs = [json.loads((sweep / job / "run.json").read_text())["config"] for job in ("0", "1")]
    assert [config["optimizer"]["lr"] for config in configs] == [1e-3, 1e-4]
    assert "2 jobs in multirun/train" in done.output and done.output.count("★") == 1
    assert f"drafter_dir={sweep.relative_to(folder)}/1/drafter" in done.output.replace("\\\n", "").split()
    rows = (sweep / "summary.csv").read_text().splitlines()
    assert len(rows) == 3 and all("finished" in row for row in rows[1:])
    logged = sorted(sweep.glob("*/wandb/offline-run-*/run-*.wandb"))
    assert [read_wandb(path).exit_code for path in logged] == [0, 0]
    shown = [json.loads((sweep / job / "runlog.json").read_text()) for job in ("0", "1")]
    assert [one["name"] for one in shown] == ["lr=0.001", "lr=0.0001"], "what varies, not what was said besides"
    assert {(one["group"], one["job_type"]) for one in shown} == {(sweep.name, "train")}
    assert all({"tiny"} <= set(one["tags"]) and one["config"]["optimizer"]["lr"] for one in shown)
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


def test_a_config_file_edited_during_a_sweep_fails_the_jobs_to_come(folder, extracted):
    conf = folder / "conf"  # a copy, to be edited while the first of two jobs runs
    shutil.copytree(ROOT / "conf", conf)
    told = settings(seed="0,1", optimizer__epochs=1, hydra__sweep__dir="edited")
    script = Script("train.py", "-m", "--config-path", str(conf), *told, cwd=folder)
    while not (folder / "edited" / "0" / "run.json").exists():
        assert script.process.is_alive(), script.output()
        time.sleep(0.005)
    with (conf / "drafter" / "eagle3.yaml").open("a") as file:
        file.write("# edited\n")
    done = script.wait()
    status = [json.loads((folder / "edited" / job / "status.json").read_text()) for job in ("0", "1")]
    assert [one["status"] for one in status] == ["finished", "failed"] and done.code != 0, done.output
    assert "have changed since this sweep began: drafter/eagle3.yaml" in status[1]["reason"]


def test_a_sweep_over_several_devices_is_refused(folder, extracted):
    told = settings(hardware="cpu_x2", optimizer__batch_tokens=640, seed="0,1", hydra__sweep__dir="devices")
    done = run("train.py", "-m", *told, cwd=folder)
    assert done.code != 0 and "a sweep (-m) trains on one device a job" in done.output
    assert not list((folder / "devices").rglob("run.json"))


def test_another_sweep_in_its_directory_is_refused_and_changes_nothing_of_the_table(folder, extracted):
    told = settings(optimizer__epochs=1, hydra__sweep__dir="shared", seed="0,1")
    succeed("train.py", "-m", *told, cwd=folder)
    table = (folder / "shared" / "summary.csv").read_text()
    assert "seed=1" in table
    done = run("train.py", "-m", *[t for t in told if not t.startswith("seed")], "seed=7,1", cwd=folder)
    assert done.code != 0 and "seed: 0 there, 7 now" in done.output
    assert (folder / "shared" / "summary.csv").read_text() == table
