"""Mirrors: copies of the ledger's rows for people to look at. The ledger can rebuild every one of them.

A mirror may fail in any way without stopping training; `Guarded` counts its failures, and reconcile makes
them fatal at the end. Every mirror can say afterwards which rows it really holds.
"""

import csv
import logging
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Protocol, TypeVar

from eagle3.runlog.ledger import Declared, Row

log = logging.getLogger(__name__)

Held = Counter[tuple[str, int, int]]
"""(split, step, number of values) of each row that a mirror holds."""

LOGGED_FAILURES = 3

T = TypeVar("T")


class Mirror(Protocol):
    name: str

    def emit(self, row: Row) -> None: ...

    def close(self, ok: bool) -> None:
        """`ok` false marks the run as failed where the mirror can say so."""

    def held(self) -> Held:
        """Read back from disk after `close`: the rows of this attempt."""

    def where(self) -> str | None:
        """Where people can look at it, or how to get it there; None if that is the run directory itself."""
        return None


class Guarded:
    """Keeps a mirror's failures away from training, and remembers them."""

    def __init__(self, mirror: Mirror) -> None:
        self.mirror, self.name = mirror, mirror.name
        self.failures: list[str] = []

    def emit(self, row: Row) -> None:
        self._try(f"{row.split} step {row.step}", lambda: self.mirror.emit(row))

    def close(self, ok: bool) -> None:
        self._try("close", lambda: self.mirror.close(ok))

    def held(self) -> Held:
        return self._try("read back", self.mirror.held) or Held()

    def _try(self, doing: str, action: Callable[[], T]) -> T | None:
        try:
            return action()
        except Exception as err:  # whatever a mirror raises, training goes on and reconcile tells
            self.failures.append(f"{doing}: {type(err).__name__}: {err}")
            if len(self.failures) <= LOGGED_FAILURES:
                log.error("mirror %s failed at %s; training goes on", self.name, doing, exc_info=True)
            return None


def writable_dir(path: Path) -> Path:
    """Makes the directory if need be. Raises ValueError when nothing can be written there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        # Asking the file system, not os.access, which is wrong for root and on read-only mounts.
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as err:
        raise ValueError(f"cannot write metrics to {path.absolute()}: {err.strerror}; choose another run dir") from err


class CsvMirror(Mirror):
    """`<split>.csv` with one column per declared name, so that no header is ever rewritten."""

    name = "csv"

    def __init__(self, directory: Path, declared: Mapping[str, Declared], attempt: int) -> None:
        self.attempt, self.directory = attempt, writable_dir(directory)
        self.columns = {s: sorted(d.names) + sorted(d.optional) for s, d in declared.items()}
        self._files = {split: self._open(split) for split in declared}

    def _open(self, split: str) -> IO[str]:
        path = self.directory / f"{split}.csv"
        header = ["attempt", "step", "wall", *self.columns[split]]
        if path.exists() and path.stat().st_size:
            with path.open(newline="") as file:
                found = next(csv.reader(file))
            if found != header:
                raise ValueError(f"{path} has the columns {found}, this run has {header}; set the file aside")
            return path.open("a", newline="")
        file = path.open("w", newline="")
        csv.writer(file).writerow(header)
        return file

    def emit(self, row: Row) -> None:
        cells = [row.values.get(name, "") for name in self.columns[row.split]]
        csv.writer(self._files[row.split]).writerow([row.attempt, row.step, row.wall, *cells])
        self._files[row.split].flush()

    def close(self, ok: bool) -> None:
        for file in self._files.values():
            file.close()

    def held(self) -> Held:
        held = Held()
        for split, columns in self.columns.items():
            with (self.directory / f"{split}.csv").open(newline="") as file:
                for line in csv.DictReader(file):
                    if line["attempt"] == str(self.attempt):
                        held[split, int(line["step"]), sum(line[name] != "" for name in columns)] += 1
        return held


class TensorBoardMirror(Mirror):
    """Event files under `<directory>/attempt_<n>`."""

    name = "tensorboard"

    def __init__(self, directory: Path, attempt: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as err:
            raise ValueError("tensorboard is not installed: pip install tensorboard, or switch the mirror off") from err
        self.directory = writable_dir(directory / f"attempt_{attempt}")
        self._writer = SummaryWriter(str(self.directory))

    def emit(self, row: Row) -> None:
        for name, value in row.flat().items():
            self._writer.add_scalar(name, value, row.step, walltime=row.wall)

    def close(self, ok: bool) -> None:
        self._writer.close()

    def held(self) -> Held:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

        values: Counter[tuple[str, int]] = Counter()
        for path in self.directory.glob("events.out.tfevents.*"):
            for event in EventFileLoader(str(path)).Load():
                values.update((value.tag.split("/", 1)[0], event.step) for value in event.summary.value)
        return Held({(split, step, count): 1 for (split, step), count in values.items()})
