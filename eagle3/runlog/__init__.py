"""Metrics of a run: every row goes to the ledger, then to the mirrors, and at the end all must agree.

with open_runlog(run_dir, {"train": Declared(...)}, ...) as runlog:
    runlog.emit("train", step, {"loss": 2.5, ...})
    runlog.expect("train", total_steps)
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from eagle3.runlog.guard import Guarded
from eagle3.runlog.ledger import (
    LEDGER_NAME,
    Declared,
    Ledger,
    Row,
    RowCheck,
    metric_names,
    read_ledger,
    series,
)
from eagle3.runlog.mirrors import Mirror, writable_dir
from eagle3.runlog.provenance import git_diff, git_state, provenance
from eagle3.runlog.reconcile import MetricsLost, Reconciler, Report, held_of, metrics_lost
from eagle3.runlog.shown import MirrorName, Shown, open_mirror, plain

__all__ = [
    "LEDGER_NAME",
    "Declared",
    "MetricsLost",
    "Row",
    "RunLog",
    "SilentRunLog",
    "check_wandb_ready",
    "git_diff",
    "git_state",
    "metric_names",
    "open_runlog",
    "provenance",
    "read_ledger",
    "series",
]

log = logging.getLogger(__name__)


def check_wandb_ready(mode: str) -> None:
    """Raises ValueError before anything is loaded if `mode` online lacks a key or a server that answers."""
    if mode == "online":
        from eagle3.runlog.wandb_mirror import check_online

        check_online()


class RunLog:
    """Ledger and mirrors of one attempt, on rank 0."""

    def __init__(self, ledger: Ledger, mirrors: Sequence[Mirror]) -> None:
        self.ledger = ledger
        self.mirrors = [Guarded(mirror, ledger.inherited) for mirror in mirrors]
        self.report: Report | None = None
        self._expected: dict[str, int] = {}

    def emit(self, split: str, step: int, values: Mapping[str, float]) -> None:
        """One row for a split and step. Raises ValueError for a wrong row, OSError if the disk refuses it."""
        row = self.ledger.emit(split, step, values)
        for mirror in self.mirrors:
            mirror.emit(row)

    def sync(self) -> None:
        """Call after validation and before a checkpoint: no row up to here is lost with the power."""
        self.ledger.sync()

    def attach(self, kind: str, path: Path) -> None:
        """A directory that the mirrors keep beside the rows; W&B does, as an artifact of this type."""
        for mirror in self.mirrors:
            mirror.attach(kind, path)

    def expect(self, split: str, count: int) -> None:
        """How many rows of `split` this attempt must have written when it ends without an exception."""
        assert split in self.ledger.emitted, split
        self._expected[split] = count

    def where(self) -> str | None:
        """The W&B link or the command that uploads the offline run; None without W&B."""
        return next((where for m in self.mirrors if (where := m.mirror.where())), None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        report = self._close(stopped_early=error is not None)
        if report.ok:
            return
        lost = metrics_lost(report, self.ledger.path.parent)
        if error is None:
            raise lost
        # The first error is the one to see; the loss is told beside it.
        log.error("%s", lost)
        error.add_note(str(lost))

    def _close(self, stopped_early: bool) -> Report:
        self.ledger.close()
        reconciler = Reconciler(self.ledger, {} if stopped_early else self._expected)
        # W&B last: a gap found anywhere else still marks its run as failed; a finished run cannot be marked.
        for mirror in sorted(self.mirrors, key=lambda m: m.name == "wandb"):
            mirror.close(not (stopped_early or reconciler.gaps), held_of(reconciler.counted))
            reconciler.compare(mirror)
        self.report = reconciler.finish(self.ledger.path.parent)
        return self.report


class SilentRunLog:
    """What every other rank holds: it checks rows as rank 0 does and writes nothing."""

    def __init__(self, declared: Mapping[str, Declared]) -> None:
        self._check = RowCheck(declared)

    def emit(self, split: str, step: int, values: Mapping[str, float]) -> None:
        self._check(split, step, values)

    def sync(self) -> None: ...

    def attach(self, kind: str, path: Path) -> None: ...

    def expect(self, split: str, count: int) -> None:
        assert split in self._check.declared, split

    def where(self) -> None:
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


def open_runlog(
    run_dir: Path,
    declared: Mapping[str, Declared],
    *,
    mode: Literal["offline", "online", "local"],
    project: str,
    group: str,
    name: str,
    job_type: str,
    tags: Sequence[str] = (),
    config: Mapping[str, object],
    entity: str | None = None,
    csv: bool = False,
    tensorboard: bool = False,
    attempt: int = 1,
    resumed_from_step: int | None = None,
    rank: int = 0,
) -> RunLog | SilentRunLog:
    """Opens the ledger `run_dir/metrics.jsonl` and the mirrors asked for.

    `mode` is offline, online or local (no W&B). `config` is a nested dict, shown in W&B with the provenance.
    Raises ValueError when a directory cannot be written, W&B cannot start, or the ledger has this attempt.
    """
    if mode not in ("offline", "online", "local"):
        raise ValueError(f"tracking mode must be offline, online or local, got {mode!r}")
    if rank != 0:
        return SilentRunLog(declared)
    ledger = Ledger(
        writable_dir(run_dir) / LEDGER_NAME,
        declared,
        run=name,
        attempt=attempt,
        resumed_from_step=resumed_from_step,
    )
    told = {**config, "attempt": attempt, "provenance": provenance()}
    if resumed_from_step is not None:
        told |= {"resumed_from_step": resumed_from_step, "supersedes": wandb_runs(run_dir)}
    columns = {split: [sorted(d.names), sorted(d.optional)] for split, d in declared.items()}
    shown = Shown(mode, project, entity, group, name, job_type, tuple(tags), plain(told), columns)
    names: dict[MirrorName, bool] = {"csv": csv, "tensorboard": tensorboard, "wandb": mode != "local"}
    try:
        shown.write(run_dir)
        mirrors = [open_mirror(mirror, run_dir, shown) for mirror, wanted in names.items() if wanted]
    except BaseException:
        ledger.close()
        raise
    return RunLog(ledger, mirrors)


def wandb_runs(run_dir: Path) -> list[str]:
    """Ids of the W&B runs of a run directory."""
    return sorted(path.stem.removeprefix("run-") for path in run_dir.glob("wandb/*run-*/run-*.wandb"))
