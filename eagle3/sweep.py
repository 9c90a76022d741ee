"""Compares the jobs of a `-m` sweep: best acceptance length first, failed jobs with their reason.

`SweepSummary` is a Hydra callback; every figure is read from the jobs' own directories, so that
`python -m eagle3.sweep DIR` gives the same table later.
"""

import argparse
import atexit
import csv
import fcntl
import io
import json
import logging
import math
import os
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from rich.console import Console
from rich.table import Table
from rich.text import Text

from eagle3.runlog.ledger import LEDGER_NAME, read_ledger, series
from extract.rundir import owned

log = logging.getLogger(__name__)

METRIC = "val/accept_len"
BESIDE = ("val/loss", "val/acc_0")  # shown at the step of the best METRIC
STATUS_NAME = "status.json"
SUMMARY_NAME = "summary.json"
OVERRIDES_NAME = ".hydra/overrides.yaml"


@dataclass(frozen=True)
class Job:
    """One job directory of a sweep."""

    directory: Path
    overrides: tuple[str, ...]
    status: str
    """finished, failed or running."""
    reason: str
    """Why it failed, in one line."""
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def rank(self) -> tuple[int, float, str]:
        """Finished jobs with the highest METRIC first, then those without one, then failed ones."""
        if self.status == "failed":
            return 2, 0.0, self.directory.name
        if METRIC not in self.figures:
            return 1, 0.0, self.directory.name
        return 0, -self.figures[METRIC], self.directory.name


def read_job(directory: Path) -> Job:
    """What a job directory says about itself. A METRIC that is NaN everywhere is no figure."""
    overrides = directory / OVERRIDES_NAME
    told = yaml.safe_load(overrides.read_text()) if overrides.exists() else []
    status = directory / STATUS_NAME
    state = json.loads(status.read_text()) if status.exists() else {"status": "running"}
    reason = " ".join(str(state["reason"]).split()) if "reason" in state else ""
    return Job(directory, tuple(told), state["status"], reason, _figures(directory))


def _figures(directory: Path) -> dict[str, float]:
    """From the ledger where there is one, else the numbers in summary.json."""
    if (directory / LEDGER_NAME).exists():
        rows = read_ledger(directory)
        steps, values = series(rows, METRIC)
        finite = [(value, -step) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
        figures: dict[str, float] = {}
        if finite:
            best, step = max(finite)[0], -max(finite)[1]
            figures = {METRIC: best, "best_step": step}
            beside = {name: dict(zip(*series(rows, name), strict=True)) for name in BESIDE}
            figures |= {name: found[step] for name, found in beside.items() if step in found}
        figures["steps"] = max((row.step for row in rows if row.split == "train"), default=0)
        return figures
    if (directory / SUMMARY_NAME).exists():
        summary = json.loads((directory / SUMMARY_NAME).read_text())
        return {k: v for k, v in summary.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    return {}


def read_sweep(sweep_dir: Path) -> list[Job]:
    """All jobs below a sweep directory, best first. Raises ValueError if there are none."""
    found = sorted({path.parent.parent for path in sweep_dir.glob(f"*/{OVERRIDES_NAME}")})
    if not found:
        raise ValueError(f"{sweep_dir.absolute()} holds no sweep jobs (looked for */{OVERRIDES_NAME})")
    return sorted((read_job(path) for path in found), key=lambda job: job.rank)


def write_summary(sweep_dir: Path, jobs: Sequence[Job]) -> None:
    """Writes summary.csv and summary.md beside the job directories."""
    header, lines = _cells(jobs)
    table = io.StringIO(newline="")
    csv.writer(table, lineterminator="\n").writerows([header, *lines])
    _replace(sweep_dir / "summary.csv", table.getvalue())
    header, lines = _cells(jobs, shown=True)
    body = [header, ["---"] * len(header), *lines]
    markdown = "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in body)
    _replace(sweep_dir / "summary.md", f"# Sweep of {len(jobs)} jobs, best {METRIC} first\n\n{markdown}")


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text)
    temporary.replace(path)


def _cells(jobs: Sequence[Job], *, shown: bool = False) -> tuple[list[str], list[list[str]]]:
    """Header and lines; `shown` rounds the figures and marks the best for human readers."""
    names = list(dict.fromkeys(name for job in jobs for name in job.figures))
    names.sort(key=lambda name: name != METRIC)
    lines = []
    for place, job in enumerate(jobs):
        best = place == 0 and METRIC in job.figures and job.status != "failed"
        figures = [_figure(job.figures[name], shown) if name in job.figures else "" for name in names]
        mark = "★" if shown and best else "yes" if best else ""
        lines.append([mark, job.directory.name, " ".join(job.overrides), *figures, job.status, job.reason])
    return ["best", "job", "overrides", *names, "status", "reason"], lines


def _figure(value: float, shown: bool) -> str:
    return f"{value:.4g}" if shown and isinstance(value, float) else repr(value)


def summary_table(sweep_dir: Path, jobs: Sequence[Job]) -> Table:
    """The same as summary.md for a terminal; the reasons of failed jobs stand below their overrides."""
    title = f"{len(jobs)} jobs in {os.path.relpath(sweep_dir)}"
    failed = sum(job.status == "failed" for job in jobs)
    table = Table(title=f"{title}, {failed} failed" if failed else title)
    header, lines = _cells(jobs, shown=True)
    for name in header[:-2]:
        numeric = name not in ("best", "job", "overrides")
        table.add_column("" if name == "best" else name, justify="right" if numeric else "left", overflow="fold")
    for job, line in zip(jobs, lines, strict=True):
        told = Text(line[2])
        if job.status != "finished":
            told.append(f"\n{job.status}{': ' if job.reason else ''}{job.reason}", style="red")
        table.add_row(*line[:2], told, *line[3:-2], style="bold" if line[0] else "")
    return table


class SweepSummary(Callback):
    """Writes summary.csv and summary.md after every job, and prints the table at the end of the sweep."""

    def on_multirun_start(self, config: Any, **_: Any) -> None:
        # Hydra does not call on_multirun_end when a job failed, but this process ends in either case.
        atexit.register(_print_at_end, Path(config.hydra.sweep.dir).absolute())

    def on_job_end(self, config: Any, job_return: JobReturn, **_: Any) -> None:
        if str(config.hydra.mode).rpartition(".")[2] != "MULTIRUN":
            return
        directory = Path(config.hydra.runtime.output_dir)
        try:
            with owned(directory):
                _record_status(directory, job_return)
        except ValueError:
            return  # this job was refused because another process works there, which tells itself how it ends
        try:
            update_summary(directory.parent)
        except (OSError, ValueError) as err:
            # Hydra turns what a callback raises into a warning without a traceback.
            log.exception("the summary of %s could not be written: %s", directory.parent, err)


def _record_status(directory: Path, job_return: JobReturn) -> None:
    """status.json says how the job ended; a traceback goes to its own log, as Hydra shows only the first."""
    if job_return.status is JobStatus.COMPLETED:
        state = {"status": "finished"}
    else:
        error = job_return._return_value
        log.error("job %s failed\n%s", directory.name, "".join(traceback.format_exception(error)))
        state = {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
    path = directory / STATUS_NAME
    told = json.loads(path.read_text()) if path.exists() else {}
    if told.get("status") == "finished" and state["status"] == "failed":
        return  # this job was refused; what an earlier one has finished here stays finished
    kept = {key: value for key, value in told.items() if key != "reason"}
    _replace(path, json.dumps(kept | state, indent=2))


def update_summary(sweep_dir: Path) -> list[Job]:
    """Reads all jobs again and rewrites the summary; jobs that end at the same time take turns."""
    with (sweep_dir / ".summary.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        jobs = read_sweep(sweep_dir)
        write_summary(sweep_dir, jobs)
    return jobs


def _print_at_end(sweep_dir: Path) -> None:
    if any(sweep_dir.glob(f"*/{OVERRIDES_NAME}")):
        Console().print(summary_table(sweep_dir, read_sweep(sweep_dir)))
        Console().print(f"summary: {os.path.relpath(sweep_dir / 'summary.md')}", soft_wrap=True, highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m eagle3.sweep", description=__doc__.splitlines()[0])
    parser.add_argument("sweep_dir", type=Path, metavar="SWEEP_DIR")
    sweep_dir = parser.parse_args().sweep_dir
    try:
        Console().print(summary_table(sweep_dir, update_summary(sweep_dir)))
    except (OSError, ValueError) as err:
        parser.exit(2, f"error: {err}\n")


if __name__ == "__main__":
    main()
