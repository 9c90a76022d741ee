"""Runs side by side: best acceptance length first, with what sets them apart and why some failed.

Every figure is read from the runs' own directories, so the same table can be had at any time.
"""

import csv
import fcntl
import io
import json
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from rich.table import Table
from rich.text import Text

from eagle3.best import best_validation
from eagle3.labels import differing, labels
from eagle3.runlog.ledger import LEDGER_NAME, read_ledger
from extract.durable import replace_file
from extract.rundir import VOLATILE, flat, is_owned, read_object, saved_run

METRIC = "val/accept_len"
LOSS = "val/loss"
BESIDE = (LOSS, "val/acc_0")  # shown at the step of the best METRIC
STATUS_NAME = "status.json"
OVERRIDES_NAME = ".hydra/overrides.yaml"
SETTINGS_SHOWN = 4


@dataclass(frozen=True)
class Job:
    """One run directory: a job of a sweep, or a run of its own."""

    directory: Path
    overrides: tuple[str, ...]
    status: str
    """finished, failed, running, or stopped (killed, say)."""
    reason: str
    """Why it failed, in one line."""
    figures: Mapping[str, float]
    config: Mapping[str, Any] = field(default_factory=dict)
    """Every setting and input under its dotted name, without those that no result depends on."""
    code: str = ""
    """Which code ran last: beginning of a hash over its files."""

    @property
    def rank(self) -> tuple[int, float, float, str]:
        """The highest METRIC first, of equal ones the lowest LOSS, then runs without METRIC, then failed ones."""
        if self.status == "failed":
            return 2, 0.0, 0.0, self.directory.name
        if METRIC not in self.figures:
            return 1, 0.0, 0.0, self.directory.name
        loss = self.figures.get(LOSS, math.inf)
        return 0, -self.figures[METRIC], loss if math.isfinite(loss) else math.inf, self.directory.name


def read_job(directory: Path) -> Job:
    """What a run directory says about itself. A METRIC that is NaN everywhere is no figure."""
    known = (directory / "run.json").exists()
    record = saved_run(directory) if known else {"config": {}, "inputs": {}, "attempts": []}
    config = {key: value for key, value in record["config"].items() if key not in VOLATILE}
    code = str((record["attempts"] or [{}])[-1].get("source_sha256") or "")[:8]
    status, reason = _status(directory)
    return Job(directory, tuple(saved_overrides(directory)), status, reason, _figures(directory),
               flat(config) | flat({"input": record["inputs"]}), code)  # fmt: skip


def saved_overrides(directory: Path) -> list[str]:
    """What was said on the command line of a run's first attempt; ValueError names a file that does not say it.

    run.json knows; Hydra's own file may be that of a later command, which was refused.
    """
    file = directory / OVERRIDES_NAME
    try:
        told = yaml.safe_load(file.read_text()) if file.exists() else []
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{file.absolute()} cannot be read ({error}); restore it, or remove it") from error
    attempts = saved_run(directory)["attempts"] if (directory / "run.json").exists() else []
    if attempts and "overrides" in attempts[0]:
        file, told = directory / "run.json", attempts[0]["overrides"]
    if not isinstance(told, list) or not all(isinstance(override, str) for override in told):
        raise ValueError(f"{file.absolute()} is no list of overrides; restore it, or remove it")
    return told


def _status(directory: Path) -> tuple[str, str]:
    file = directory / STATUS_NAME
    told = read_object(file) if file.exists() else {"status": "running"}
    if not isinstance(told.get("status"), str):
        raise ValueError(f"{file.absolute()} says no status; restore it, or remove it")
    if told["status"] == "running" and (directory / ".lock").exists() and not is_owned(directory):
        return "stopped", "no process works here; the same command goes on with it"
    return told["status"], " ".join(str(told["reason"]).split()) if "reason" in told else ""


def _figures(directory: Path) -> dict[str, float]:
    """From the ledger where there is one, else the numbers in summary.json."""
    if (directory / LEDGER_NAME).exists():
        rows = read_ledger(directory)
        figures: dict[str, float] = {}
        if best := best_validation(rows):
            figures = {METRIC: best.flat()[METRIC], "best_step": best.step}
            figures |= {name: value for name, value in best.flat().items() if name in BESIDE}
        figures["steps"] = max((row.step for row in rows if row.split == "train"), default=0)
        return figures
    if (directory / "summary.json").exists():
        summary = read_object(directory / "summary.json")
        return {k: v for k, v in summary.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    return {}


def read_sweep(sweep_dir: Path) -> list[Job]:
    """All jobs below a sweep directory, best first. Raises ValueError if there are none."""
    found = sorted({path.parent.parent for path in sweep_dir.glob(f"*/{OVERRIDES_NAME}")})
    if not found:
        what = "holds no run and no sweep job" if sweep_dir.is_dir() else "is no directory"
        raise ValueError(f"{sweep_dir.absolute()} {what} (looked for {LEDGER_NAME} and */{OVERRIDES_NAME})")
    return sorted((read_job(path) for path in found), key=lambda job: job.rank)


def read_runs(directories: Sequence[Path]) -> list[Job]:
    """The runs that are given, and the jobs of the sweeps that are given, best first. ValueError names a wrong one."""
    jobs: list[Job] = []
    for path in directories:
        alone = (path / LEDGER_NAME).exists() or (path / "run.json").exists()
        jobs += [read_job(path)] if alone else read_sweep(path)
    return sorted(jobs, key=lambda job: job.rank)


def apart(jobs: Sequence[Job]) -> list[dict[str, str]]:
    """What sets each job apart: the overrides that are not the same in all; without any, the first differing settings.

    Of one job it is all that was overridden. `config_differences` tells all settings.
    """
    told = [dict(_pair(override) for override in job.overrides) for job in jobs]
    if len(jobs) == 1:
        return told
    keys = differing(told)
    if not keys:
        told = [{key: _text(value) for key, value in job.config.items()} for job in jobs]
        keys = differing(told)[:SETTINGS_SHOWN]
    return [{key: one[key] for key in keys if key in one} for one in told]


def names_of(jobs: Sequence[Job]) -> list[str]:
    """The same in few words, for tables and legends."""
    told = apart(jobs)
    return labels(told, list(dict.fromkeys(key for one in told for key in one)))


def _pair(override: str) -> tuple[str, str]:
    key, _, value = override.partition("=")
    return key, value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def config_differences(jobs: Sequence[Job]) -> list[str]:
    """One line a setting, input or code that is not the same in all runs that say what they are."""
    known = [job for job in jobs if job.config]
    codes: list[dict[str, str]] = [{"code": job.code} if job.code else {} for job in known]
    told = [{key: _text(value) for key, value in job.config.items()} | code
            for job, code in zip(known, codes, strict=True)]  # fmt: skip
    lines = []
    for key in sorted(differing(told)):
        values = [f"{job.directory.name}: {one.get(key, 'absent')}" for job, one in zip(known, told, strict=True)]
        lines.append(f"{key}  {', '.join(values)}")
    return lines


def code_note(jobs: Sequence[Job]) -> str:
    """A warning if the code changed while the jobs ran; else nothing."""
    by_code: dict[str, list[str]] = {}
    for job in jobs:
        if job.code:
            by_code.setdefault(job.code, []).append(job.directory.name)
    if len(by_code) < 2:
        return ""
    return "the code differs: " + "; ".join(f"{', '.join(sorted(names))} ran {code}" for code, names in by_code.items())


def best_of(jobs: Sequence[Job]) -> Job | None:
    """The first of ranked jobs, if it is one that can be the best."""
    return jobs[0] if jobs and METRIC in jobs[0].figures and jobs[0].status != "failed" else None


def commands(job: Job) -> list[str]:
    """How to train a job once more, and how to write its drafter out."""
    path = shlex.quote(os.path.relpath(job.directory))
    return [f"python train.py from_run={path}", f"python -m eagle3.export {path}"]


def write_summary(sweep_dir: Path, jobs: Sequence[Job]) -> None:
    """Writes summary.csv and summary.md beside the job directories."""
    header, lines = _cells(jobs)
    table = io.StringIO(newline="")
    csv.writer(table, lineterminator="\n").writerows([header, *lines])
    replace_file(sweep_dir / "summary.csv", table.getvalue().encode())
    header, lines = _cells(jobs, shown=True)
    body = [header, ["---"] * len(header), *lines]
    markdown = "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in body)
    best = best_of(jobs)
    below = [f"Note: {note}" for note in [code_note(jobs)] if note]
    below += ["The best again, and its drafter:\n", *(f"    {command}" for command in commands(best))] if best else []
    text = "\n".join([f"# Sweep of {len(jobs)} jobs, best {METRIC} first\n", markdown, *below])
    replace_file(sweep_dir / "summary.md", text.rstrip().encode() + b"\n")


def update_summary(sweep_dir: Path) -> list[Job]:
    """Reads all jobs again and rewrites the summary; jobs that end at the same time take turns."""
    jobs = read_sweep(sweep_dir)  # first: a directory that is no sweep stays untouched
    with (sweep_dir / ".summary.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        jobs = read_sweep(sweep_dir)
        write_summary(sweep_dir, jobs)
    return jobs


def _cells(jobs: Sequence[Job], *, shown: bool = False) -> tuple[list[str], list[list[str]]]:
    """Header and lines; `shown` rounds the figures and marks the best for human readers."""
    names = list(dict.fromkeys(name for job in jobs for name in job.figures))
    names.sort(key=lambda name: name != METRIC)
    lines = []
    whole = [" ".join(f"{key}={value}" for key, value in one.items()) for one in apart(jobs)]
    for job, told in zip(jobs, names_of(jobs) if shown else whole, strict=True):
        figures = [_figure(job.figures[name], shown) if name in job.figures else "" for name in names]
        mark = "" if job is not best_of(jobs) else "★" if shown else "yes"
        lines.append([mark, job.directory.name, told, *figures, job.status, job.reason])
    return ["best", "job", "overrides", *names, "status", "reason"], lines


def _figure(value: float, shown: bool) -> str:
    return f"{value:.4g}" if shown and isinstance(value, float) else repr(value)


def summary_table(title: str, jobs: Sequence[Job]) -> Table:
    """The same as summary.md for a terminal, with one override a line; why jobs failed stands in `failures`."""
    failed = sum(job.status == "failed" for job in jobs)
    table = Table(title=f"{title}, {failed} failed" if failed else title)
    header, lines = _cells(jobs, shown=True)
    for name in header[:-2]:
        numeric = name not in ("best", "job", "overrides")
        table.add_column("" if name == "best" else name, justify="right" if numeric else "left", overflow="fold")
    for job, line in zip(jobs, lines, strict=True):
        told = Text("\n".join(line[2].split(" ")))
        if job.status != "finished":
            told.append(f"\n{job.status}", style="red")
        table.add_row(*line[:2], told, *line[3:-2], style="bold" if line[0] else "")
    return table


def failures(jobs: Sequence[Job]) -> list[str]:
    """One line a job that failed or was stopped, and why."""
    return [f"job {job.directory.name} {job.status}: {job.reason}" for job in jobs if job.reason]
