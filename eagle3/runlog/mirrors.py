"""Mirrors: copies of the ledger's rows for people to look at. The ledger can rebuild every one of them.

A mirror holds the rows that count, and no others: a resumed attempt begins its mirrors anew with the rows that it
inherits, so each reads as one curve. Every mirror can say afterwards which rows it really holds.
"""

import csv
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from eagle3.runlog.ledger import Declared, Row

Held = Counter[tuple[str, int, int]]
"""(split, step, number of values) of each row that a mirror holds."""


class Mirror(Protocol):
    name: str
    patience_s: float = 60.0
    """How long the end of a run waits for it."""

    def emit(self, row: Row) -> None: ...

    def settle(self, want: Held) -> None:
        """Before `close`, of a run that is well so far: raises if these rows are not there and `close` would hide it.

        Only for a mirror that says of a run whether it went well, and cannot say otherwise once it is closed.
        """
        return None

    def close(self, ok: bool) -> None:
        """`ok` false marks the run as failed where the mirror can say so."""

    def held(self) -> Held:
        """Read back from disk after `close`."""

    def attach(self, kind: str, path: Path) -> None:
        """Keeps a directory beside the rows, where the mirror has a place for it."""
        return None

    def where(self) -> str | None:
        """Where people can look at it, or how to get it there; None if that is the run directory itself."""
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

    def __init__(self, directory: Path, declared: Mapping[str, Declared]) -> None:
        self.directory = writable_dir(directory)
        self.columns = {s: sorted(d.names) + sorted(d.optional) for s, d in declared.items()}
        self._files = {split: (directory / f"{split}.csv").open("w", newline="") for split in declared}
        for split, file in self._files.items():
            csv.writer(file).writerow(["attempt", "step", "wall", *self.columns[split]])

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
                    held[split, int(line["step"]), sum(line[name] != "" for name in columns)] += 1
        return held


class TensorBoardMirror(Mirror):
    """Event files in `directory`, which is emptied first."""

    name = "tensorboard"

    def __init__(self, directory: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as err:
            raise ValueError("tensorboard is not installed: pip install tensorboard, or switch the mirror off") from err
        shutil.rmtree(directory, ignore_errors=True)
        self.directory = writable_dir(directory)
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
