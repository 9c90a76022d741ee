"""A sweep of serve.py: each setting against the untuned server, alone and under load, and what each gain costs.

`TuningSummary` is a Hydra callback. Before the jobs it measures the untuned server, which is the same command without
what it varies, as one more job in the directory `baseline`.
"""

import csv
import fcntl
import io
import json
import logging
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig
from rich import box, get_console
from rich.table import Table
from rich.text import Text

from eagle3.compare import STATUS_NAME, Job, code_note, read_sweep
from eagle3.serving.figures import short
from eagle3.serving.phases import told
from eagle3.serving.report import gain
from eagle3.sweep import SweepSummary
from extract.durable import replace_file

log = logging.getLogger(__name__)

BASELINE = "baseline"
GOALS = {"single": "decode_tok_s", "load": "load_tok_s"}
"""What a server can be tuned for, and the figure that says how well."""


@dataclass(frozen=True)
class Trial:
    """One setting, and what came of it."""

    job: Job
    summary: dict[str, Any]
    """Empty where it failed."""
    phase: str
    """In which it failed; empty where it did not, or before all phases."""
    why: str
    """In one line."""

    @property
    def name(self) -> str:
        return self.job.directory.name

    @property
    def sound(self) -> bool:
        """Whether it can be the best: it ended, and answered every request."""
        return bool(self.summary) and self.job.status != "failed" and not self.summary["failed"]

    def spread(self, goal: str) -> tuple[float, float]:
        """Least and greatest of the repeats."""
        if goal == "single":
            return self.summary["decode_tok_s_low"], self.summary["decode_tok_s_high"]
        top = self.summary["load"][-1]
        return top["tok_s_low"], top["tok_s_high"]


def read_trials(sweep_dir: Path) -> list[Trial]:
    """The untuned server first, then the fastest alone, then those that failed. ValueError if there is no job."""
    trials = []
    for job in read_sweep(sweep_dir):
        file, status = job.directory / "summary.json", job.directory / STATUS_NAME
        done = job.status == "finished" and file.exists()
        kept = json.loads(status.read_text()) if status.exists() else {}
        phase, why = told(kept["reason"]) if "reason" in kept else ("", job.reason)  # there it still has its lines
        trials.append(Trial(job, json.loads(file.read_text()) if done else {}, phase, why))
    return sorted(
        trials, key=lambda t: (t.name != BASELINE, not t.summary, -t.summary.get(GOALS["single"], 0.0), t.name)
    )


def best_of(trials: Sequence[Trial], goal: str) -> Trial | None:
    """The fastest of those that are sound, the untuned server among them."""
    return max((t for t in trials if t.sound), key=lambda t: t.summary[GOALS[goal]], default=None)


def sentences(trials: Sequence[Trial]) -> list[str]:
    """For each goal: which setting is the best, what it gains, and what that costs the other."""
    base = next((t for t in trials if t.name == BASELINE and t.summary), None)
    lines = []
    for goal in GOALS:
        if (best := best_of(trials, goal)) is None:
            continue
        if base is None:
            lines.append(f"best {goal}: job {best.name}; there is no untuned server to compare it with")
        elif best is base:
            lines.append(f"best {goal}: the untuned server")
        else:
            alone, load = (gain(base.summary[name], best.summary[name]) for name in GOALS.values())
            clients = best.summary["concurrency"]
            doubt = "; within the spread of the repeats" if best.spread(goal)[0] <= base.spread(goal)[1] else ""
            lines.append(
                f"best {goal}: job {best.name}, single stream {alone} tokens/s, {clients} at once {load}{doubt}"
            )
    for trial in trials:
        if not trial.summary:
            where = f" in phase {trial.phase}" if trial.phase else ""
            lines.append(f"job {trial.name} {trial.job.status}{where}: {trial.why}")
        elif trial.summary["failed"]:
            failed = f"{trial.summary['failed']} of {trial.summary['requests']} requests failed"
            lines.append(f"job {trial.name} cannot be the best: {failed}: {'; '.join(trial.summary['reasons'])}")
    return lines


def commands(sweep_dir: Path, trials: Sequence[Trial]) -> list[str]:
    """How the best settings become files in conf/server/."""
    where = shlex.quote(os.path.relpath(sweep_dir))
    found = {goal: best_of(trials, goal) for goal in GOALS}
    return [f"python -m eagle3.serving.tuned {where} --best {goal} --name NAME"
            for goal, best in found.items() if best is not None and best.name != BASELINE]  # fmt: skip


HEADER = ("best", "job", "setting", "single tok/s", "at once", "load tok/s", "prefill tok/s", "first token ms",
          "accept_len", "failed requests", "status", "phase", "reason")  # fmt: skip


def cells(trials: Sequence[Trial]) -> list[list[str]]:
    """One line a trial, under `HEADER`; figures in full."""
    marks = {goal: best_of(trials, goal) for goal in GOALS}
    lines = []
    for trial, setting in zip(trials, settings_of(trials), strict=True):
        mark = " ".join(goal for goal, best in marks.items() if best is trial)
        names = (GOALS["single"], "concurrency", GOALS["load"], "prefill_tok_s", "ttft_ms", "accept_len", "failed")
        figures = [repr(trial.summary[name]) if name in trial.summary else "" for name in names]
        lines.append([mark, trial.name, " ".join(setting), *figures, trial.job.status, trial.phase, trial.why])
    return lines


def settings_of(trials: Sequence[Trial]) -> list[list[str]]:
    """What each sets beyond the untuned server; without one, what not all of them set."""
    told = {t.name: [override.lstrip("+") for override in t.job.overrides] for t in trials}
    common = set(told.get(BASELINE) or set.intersection(*map(set, told.values())))
    return [[word for word in told[t.name] if word not in common] or ["untuned"] for t in trials]


def table(trials: Sequence[Trial], title: str) -> Table:
    """For a terminal: rounded, each figure also as a multiple of the untuned one."""
    base = next((t.summary for t in trials if t.name == BASELINE and t.summary), {})
    shown = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    shown.add_column("job", overflow="fold")
    shown.add_column("setting", overflow="fold")
    for name in ("single\ntokens/s", "load\ntokens/s", "prefill\ntokens/s", "failed"):
        shown.add_column(name, justify="right", overflow="fold")
    for trial, line, setting in zip(trials, cells(trials), settings_of(trials), strict=True):
        figures = []
        for name in (*GOALS.values(), "prefill_tok_s"):
            value, before = trial.summary.get(name), base.get(name)
            times = f"\nx{value / before:.2f}" if value and before and trial.name != BASELINE else ""
            figures.append(f"{short(value)}{times}" if value else "")
        words = [word[word.rfind(".", 0, word.find("=") + 1) + 1 :] for word in setting]
        if not trial.summary:
            words.append(f"{trial.job.status}{f' in {trial.phase}' if trial.phase else ''}")
        marked = [trial.name, *(f"★ {goal}" for goal in line[0].split())]
        failed = str(trial.summary["failed"]) if trial.summary else ""
        told_here = Text("\n".join(marked)), Text("\n".join(words))
        shown.add_row(*told_here, *figures, failed, style="bold" if line[0] else "")
    return shown


def write_summary(sweep_dir: Path, trials: Sequence[Trial]) -> None:
    """summary.csv and summary.md beside the job directories."""
    lines = cells(trials)
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows([HEADER, *lines])
    replace_file(sweep_dir / "summary.csv", text.getvalue().encode())
    body = [list(HEADER), ["---"] * len(HEADER), *lines]
    markdown = "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in body)
    below = [*(f"- {line}" for line in sentences(trials)), "", *(f"    {one}" for one in commands(sweep_dir, trials))]
    whole = "\n".join([f"# {len(trials)} servers against the untuned one\n", markdown, *below])
    replace_file(sweep_dir / "summary.md", whole.rstrip().encode() + b"\n")


class TuningSummary(SweepSummary):
    """Measures the untuned server first, keeps the summary, and prints the table at the end of the sweep."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        super().on_multirun_start(config, **kwargs)
        if "dry_run=true" not in config.hydra.overrides.task and not side_by_side(config.hydra):
            measure_baseline(config)

    def update(self, sweep_dir: Path) -> None:
        with (sweep_dir / ".summary.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            write_summary(sweep_dir, read_trials(sweep_dir))

    def print_at_end(self, sweep_dir: Path) -> None:
        if not any(sweep_dir.glob("*/run.json")):
            return  # a dry run, or nothing could begin
        trials = read_trials(sweep_dir)
        write_summary(sweep_dir, trials)
        console = get_console()
        console.print(table(trials, f"{len(trials)} servers in {os.path.relpath(sweep_dir)}"))
        notes = [note for note in [code_note([t.job for t in trials])] if note]
        for line in [*sentences(trials), *notes, f"summary: {os.path.relpath(sweep_dir / 'summary.md')}"]:
            console.print(Text(line), soft_wrap=True)
        for command in commands(sweep_dir, trials):
            console.print(Text(f"write it: {command}"), soft_wrap=True)


def measure_baseline(config: DictConfig) -> None:
    """Runs the same command without what it varies, as a job of the same sweep; its failure is a row like others'."""
    hydra = config.hydra
    parsed = OverridesParser.create().parse_overrides(list(hydra.overrides.task))
    fixed = [override.input_line for override in parsed if not override.is_sweep_override()]
    fixed += [word for word in hydra.overrides.hydra if word.startswith(("hydra/launcher", "hydra.launcher"))]
    (main,) = [source.path for source in hydra.runtime.config_sources if source.provider == "main"]
    folders = [source.path for source in hydra.runtime.config_sources if source.provider == "command-line"]
    command = [
        sys.executable, sys.argv[0], "-m", "--config-path", main, *(f"--config-dir={folder}" for folder in folders),
        *(word for word in fixed if word is not None), "~hydra.callbacks.summary",
        f"hydra.sweep.dir={Path(hydra.sweep.dir).absolute()}", f"hydra.sweep.subdir={BASELINE}",
    ]  # fmt: skip
    log.info("the untuned server comes first: %s", shlex.join(command))
    if subprocess.run(command, check=False).returncode != 0:
        log.error("the untuned server could not be measured; the settings are compared with each other alone")


def require_alone() -> None:
    """ValueError if jobs of a sweep would run side by side on this machine: they would measure each other."""
    hydra = HydraConfig.get()
    if hydra.mode == RunMode.MULTIRUN and side_by_side(hydra):
        raise ValueError(
            "hydra/launcher=joblib: servers that run side by side on one machine spoil each other's figures"
        )


def side_by_side(hydra: Any) -> bool:
    """Whether a sweep's jobs would run on this machine at the same time."""
    return "joblib" in str(hydra.launcher._target_)
