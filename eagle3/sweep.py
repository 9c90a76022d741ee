"""Sweeps: what a `-m` run of train.py keeps, notices and tells beside its jobs, and the table of any runs.

    python -m eagle3.sweep DIR...      sweeps or single runs: table, chart, and what their configs differ in

`SweepSummary` is a Hydra callback. sweep.json says what the sweep varies and which config files it began with: Hydra
composes each job when its turn comes, so a file that was edited meanwhile would make another config of it.
"""

import argparse
import atexit
import hashlib
import json
import logging
import os
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.console import Console
from rich.text import Text

from eagle3.compare import (
    OVERRIDES_NAME,
    STATUS_NAME,
    Job,
    best_of,
    code_note,
    commands,
    config_differences,
    failures,
    read_runs,
    read_sweep,
    summary_table,
    update_summary,
)
from extract.durable import replace_file
from extract.rundir import owned, read_object

log = logging.getLogger(__name__)

SWEEP_NAME = "sweep.json"


class SweepSummary(Callback):
    """Writes summary.csv and summary.md after every job, and prints the table at the end of the sweep."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        sweep_dir = Path(config.hydra.sweep.dir).absolute()
        begin_sweep(sweep_dir, config.hydra)
        # Hydra does not call on_multirun_end when a job failed, but this process ends in either case.
        atexit.register(self.print_at_end, sweep_dir)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        if str(config.hydra.mode).rpartition(".")[2] != "MULTIRUN":
            return
        directory = Path(config.hydra.runtime.output_dir)
        try:
            with owned(directory):
                _record_status(directory, job_return)
        except ValueError:
            return  # this job was refused because another process works there, which tells itself how it ends
        try:
            self.update(directory.parent)
        except (OSError, ValueError) as err:
            # Hydra turns what a callback raises into a warning without a traceback.
            log.exception("the summary of %s could not be written: %s", directory.parent, err)

    def update(self, sweep_dir: Path) -> None:
        """Reads all jobs and writes the summary anew."""
        update_summary(sweep_dir)

    def print_at_end(self, sweep_dir: Path) -> None:
        """The table, if there is a job to be shown."""
        _print_at_end(sweep_dir)


def begin_sweep(sweep_dir: Path, hydra: Any) -> None:
    """Writes sweep.json: the keys that vary, and the config files as they are now."""
    parsed = OverridesParser.create().parse_overrides(list(hydra.overrides.task))
    varied = [override.get_key_element() for override in parsed if override.is_sweep_override()]
    params = hydra.sweeper.params if "params" in hydra.sweeper else None
    varied += [str(key) for key in params or {}]
    sweep_dir.mkdir(parents=True, exist_ok=True)
    told = {"varied": varied, "config_files": config_files(hydra)}
    replace_file(sweep_dir / SWEEP_NAME, json.dumps(told, indent=2).encode() + b"\n")


def config_files(hydra: Any) -> dict[str, str]:
    """Hash of each file from which the jobs are composed."""
    (main,) = [Path(source.path) for source in hydra.runtime.config_sources if source.provider == "main"]
    return {str(file.relative_to(main)): hashlib.sha256(file.read_bytes()).hexdigest()
            for file in sorted(main.rglob("*.yaml"))}  # fmt: skip


def require_unchanged(sweep_dir: Path, hydra: Any) -> None:
    """Raises ValueError, before a job begins, if its config would be composed from other files than the first one's."""
    if not (sweep_dir / SWEEP_NAME).exists():
        return  # an application without the callback
    before, now = _saved_sweep(sweep_dir)["config_files"], config_files(hydra)
    changed = [name for name in sorted(before.keys() | now.keys()) if (name, before.get(name)) != (name, now.get(name))]
    if changed:
        raise ValueError(
            f"config files have changed since this sweep began: {', '.join(changed)}; its jobs would not be "
            "comparable. Put them back and run the same command again, or begin another sweep"
        )


def varied_keys(sweep_dir: Path) -> list[str]:
    """What the sweep varies, by what its command and config say."""
    return _saved_sweep(sweep_dir)["varied"] if (sweep_dir / SWEEP_NAME).exists() else []


def _saved_sweep(sweep_dir: Path) -> dict[str, Any]:
    told = read_object(sweep_dir / SWEEP_NAME)
    if not isinstance(told.get("varied"), list) or not isinstance(told.get("config_files"), dict):
        raise ValueError(f"{sweep_dir / SWEEP_NAME} is no sweep's; remove it and run the same command again")
    return told


def _record_status(directory: Path, job_return: JobReturn) -> None:
    """status.json says how the job ended; a traceback goes to its own log, as Hydra shows only the first."""
    if job_return.status is JobStatus.COMPLETED:
        state = {"status": "finished"}
    else:
        error = job_return._return_value
        log.error("job %s failed\n%s", directory.name, "".join(traceback.format_exception(error)))
        state = {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
    path, told = directory / STATUS_NAME, {}
    with suppress(ValueError):  # there is none, or none that says anything
        told = read_object(path)
    if told.get("status") == "finished" and state["status"] == "failed":
        return  # this job was refused; what an earlier one has finished here stays finished
    kept = {key: value for key, value in told.items() if key != "reason"}
    replace_file(path, json.dumps(kept | state, indent=2).encode())


def _print_at_end(sweep_dir: Path) -> None:
    if any(sweep_dir.glob(f"*/{OVERRIDES_NAME}")):
        try:
            show(f"in {os.path.relpath(sweep_dir)}", read_sweep(sweep_dir))
        except (OSError, ValueError) as error:  # the process ends: nobody is left to raise it to
            log.error("the table of %s cannot be shown: %s", sweep_dir, error)
            return
        Console().print(f"summary: {os.path.relpath(sweep_dir / 'summary.md')}", soft_wrap=True, highlight=False)


def show(where: str, jobs: Sequence[Job]) -> None:
    """The table, and the commands that go on with its best; each command in one piece, to be pasted."""
    console = Console()
    console.print(summary_table(f"{len(jobs)} jobs {where}", jobs))
    best, note = best_of(jobs), code_note(jobs)
    for line in [*failures(jobs), *([note] if note else [])]:
        console.print(Text(line, style="red"), soft_wrap=True)
    for command in commands(best) if best else []:
        console.print(Text(f"best: {command}"), soft_wrap=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m eagle3.sweep", description="Compares sweeps and runs.")
    parser.add_argument("directories", type=Path, metavar="DIR", nargs="+", help="of a sweep, or of a run")
    parser.add_argument("--out", type=Path, help="where the chart goes; by default beside the runs")
    told = parser.parse_args()
    try:
        jobs = read_runs(told.directories)
        sweep = told.directories[0] if len(told.directories) == 1 and jobs[0].directory != told.directories[0] else None
        if sweep:
            jobs = update_summary(sweep)
        show(f"in {sweep}" if sweep else "compared", jobs)
        _show_differences(jobs)
        _draw(jobs, told.out or Path(os.path.commonpath([job.directory.absolute().parent for job in jobs])))
    except (OSError, ValueError) as err:
        parser.exit(2, f"error: {err}\n")


def _show_differences(jobs: Sequence[Job]) -> None:
    lines = config_differences(jobs)
    for line in lines or ["their configs are equal"]:
        Console().print(Text(line), soft_wrap=True)


def _draw(jobs: Sequence[Job], out: Path) -> None:
    from eagle3.charts import draw

    drawn = [job.directory for job in jobs if job.figures.get("steps")]
    for path in draw(drawn, out) if drawn else []:
        Console().print(f"chart: {os.path.relpath(path)}", soft_wrap=True, highlight=False)


if __name__ == "__main__":
    main()
