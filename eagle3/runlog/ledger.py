"""The ledger: one JSON line per split and step in `metrics.jsonl`, written before any mirror sees the row.

A row is handed to the kernel before `emit` returns, so it survives SIGKILL; `sync` adds power loss.
Rows are never deleted: an attempt that resumes writes a marker row first, and readers drop what it outdates.
"""

import fcntl
import json
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import IO

log = logging.getLogger(__name__)

LEDGER_NAME = "metrics.jsonl"
MARKER = "attempt"  # the split of the row with which a resumed attempt begins; its step is the checkpoint's
FIELDS = ("run", "attempt", "seq", "split", "step", "wall", "values")
NONFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True)
class Declared:
    """What a row of one split holds. Names come without the split: `loss_0`, not `train/loss_0`."""

    names: frozenset[str]
    """In every row."""
    optional: frozenset[str] = frozenset()
    """May be absent from a row: rates whose denominator can be empty."""
    integer: frozenset[str] = frozenset()
    """Those of the above that are whole numbers, such as token counts."""

    def __post_init__(self) -> None:
        everything = self.names | self.optional
        assert not self.names & self.optional, f"both required and optional: {self.names & self.optional}"
        assert self.integer <= everything, f"integer but not declared: {self.integer - everything}"
        assert not any("/" in name for name in everything), f"names come without their split: {everything}"


@dataclass(frozen=True)
class Row:
    """One line of the ledger."""

    run: str
    attempt: int
    seq: int
    split: str
    step: int
    wall: float
    """Seconds since the epoch."""
    values: Mapping[str, int | float] = field(default_factory=dict)

    def flat(self) -> dict[str, int | float]:
        """The values under their full names, such as `train/loss`."""
        return {f"{self.split}/{name}": value for name, value in self.values.items()}

    def to_line(self) -> bytes:
        values = {name: v if math.isfinite(v) else str(float(v)) for name, v in self.values.items()}
        fields = {name: getattr(self, name) for name in FIELDS} | {"values": values}
        return json.dumps(fields, allow_nan=False).encode() + b"\n"

    @staticmethod
    def from_line(line: bytes) -> "Row":
        """Raises ValueError (json), KeyError or TypeError for a line that is no row."""
        fields = json.loads(line)
        values = {name: NONFINITE[v] if isinstance(v, str) else v for name, v in fields["values"].items()}
        return Row(**{name: fields[name] for name in FIELDS} | {"values": values})


class RowCheck:
    """Holds every row against the declaration, on all ranks, so that a wrong name fails on each of them."""

    def __init__(self, declared: Mapping[str, Declared]) -> None:
        assert MARKER not in declared, f"the split name {MARKER!r} is the ledger's own"
        self.declared = dict(declared)
        self._last_step: dict[str, int] = {}

    def __call__(self, split: str, step: int, values: Mapping[str, float]) -> dict[str, int | float]:
        """The values as plain numbers. Raises ValueError if undeclared, missing, doubled or no number."""
        if split not in self.declared:
            raise ValueError(f"split {split!r} was not declared; declared are {sorted(self.declared)}")
        want, got = self.declared[split], set(values)
        missing, extra = want.names - got, got - want.names - want.optional
        if missing or extra:
            raise ValueError(f"{split} step {step}: missing {sorted(missing)}, not declared {sorted(extra)}")
        if not isinstance(step, Integral) or isinstance(step, bool) or step < 0:
            raise ValueError(f"{split}: step must be a whole number >= 0, got {step!r}")
        last = self._last_step.get(split, -1)
        if step <= last:
            fault = "doubled" if step == last else f"after step {last}; steps of a split only rise"
            raise ValueError(f"{split} step {step}: {fault}")
        numbers = {name: _number(f"{split}/{name}", v, name in want.integer) for name, v in values.items()}
        self._last_step[split] = int(step)
        return numbers


def _number(name: str, value: object, whole: bool) -> int | float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} must be a number, got {type(value).__name__} {value!r} (of a tensor: .item())")
    if not whole:
        return float(value)
    if not isinstance(value, Integral):
        raise ValueError(f"{name} is declared a whole number, got {value!r}")
    return int(value)


class Ledger:
    """The one writer of a ledger file; a second process is refused.

    `attempt` starts at 1 and must exceed every attempt in the file. An attempt after the first says with
    `resumed_from_step` up to which step the earlier rows stay valid.
    Raises ValueError for an attempt that is not new, a damaged file, a second writer, OSError on a full disk.
    """

    def __init__(
        self,
        path: Path,
        declared: Mapping[str, Declared],
        *,
        run: str,
        attempt: int = 1,
        resumed_from_step: int | None = None,
    ) -> None:
        assert attempt >= 1 and (attempt > 1) == (resumed_from_step is not None), (attempt, resumed_from_step)
        self.path, self.run, self.attempt = path, run, attempt
        self.check = RowCheck(declared)
        self.emitted: Counter[str] = Counter({split: 0 for split in declared})
        self.nonfinite: Counter[str] = Counter()
        self.last: Row | None = None
        self.inherited: list[Row] = []
        """Rows of earlier attempts that still count: those up to the step from which this one goes on."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(path.with_suffix(".lock"))
        try:
            rows = self._recover()
            self._seq = len(rows)
            self._file = path.open("ab", buffering=0)
            self._size = path.stat().st_size
            if resumed_from_step is not None:
                counted = current_rows(rows)
                self.inherited = [row for row in counted if row.step <= resumed_from_step]
                log.info("attempt %d goes on after step %d", attempt, resumed_from_step)
                log.info("%d rows of earlier attempts are superseded", len(counted) - len(self.inherited))
                self._append(self._row(MARKER, resumed_from_step, {}))
        except BaseException:
            self._lock.close()
            raise

    def _recover(self) -> list[Row]:
        if not self.path.exists():
            return []
        _set_torn_line_aside(self.path)
        rows = read_rows(self.path)
        newest = max((row.attempt for row in rows), default=0)
        if self.attempt <= newest:
            raise ValueError(f"{self.path} already holds attempt {newest}: resume=RUN_DIR goes on with it")
        return rows

    def emit(self, split: str, step: int, values: Mapping[str, float]) -> Row:
        """Writes one row and returns it. Raises ValueError for a wrong row, OSError for a full disk."""
        row = self._append(self._row(split, step, self.check(split, step, values)))
        self.emitted[split] += 1
        self.nonfinite.update(name for name, value in row.flat().items() if not math.isfinite(value))
        return row

    def sync(self) -> None:
        """Makes every row so far survive the loss of power."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        if not self._file.closed:
            self.sync()
            self._file.close()
            self._lock.close()

    def _row(self, split: str, step: int, values: Mapping[str, int | float]) -> Row:
        return Row(self.run, self.attempt, self._seq + 1, split, int(step), round(time.time(), 3), values)

    def _append(self, row: Row) -> Row:
        line = memoryview(row.to_line())
        try:
            written = 0
            while written < len(line):
                written += self._file.write(line[written:]) or 0
        except OSError as err:
            # Half a line on a full disk must not become the beginning of the next row.
            self._file.truncate(self._size)
            raise OSError(
                err.errno, f"cannot write {row.split} step {row.step}: {err.strerror}", str(self.path)
            ) from err
        self._size += len(line)
        self._seq, self.last = row.seq, row
        return row


def _lock(path: Path) -> IO[str]:
    # lockf, not flock: loader workers forked from this process must not hold the lock after it was killed.
    # And on a file of its own: closing any handle of the ledger, as its readers do, gives a lockf lock up.
    handle = path.open("w")
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as err:
        handle.close()
        raise ValueError(f"{path.parent} is being written by another process; choose another directory") from err
    return handle


def _set_torn_line_aside(path: Path) -> None:
    """A line without its newline was never acknowledged: it moves to `metrics.torn`."""
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole == len(data):
        return
    aside = path.with_suffix(".torn")
    with aside.open("ab") as torn:
        torn.write(data[whole:] + b"\n")
        torn.flush()
        os.fsync(torn.fileno())
    os.truncate(path, whole)
    log.warning("%s ended in an unfinished line of %d bytes, now in %s", path, len(data) - whole, aside.name)


def read_rows(path: Path) -> list[Row]:
    """Every whole row of the file, superseded ones and markers too. ValueError names the damaged line."""
    *lines, _unfinished = path.read_bytes().split(b"\n")
    rows: list[Row] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = Row.from_line(line)
        except (ValueError, KeyError, TypeError, AttributeError) as err:
            raise ValueError(f"{path}:{number} is no ledger row ({err}); set the file aside: {line[:80]!r}") from err
        if row.seq != number:
            raise ValueError(f"{path}:{number} has seq {row.seq}: rows are missing or were inserted before it")
        rows.append(row)
    return rows


def current_rows(rows: Iterable[Row]) -> list[Row]:
    """The rows that count: one per split and step, without what a later attempt superseded."""
    kept: dict[tuple[str, int], Row] = {}
    for row in rows:
        if row.split == MARKER:
            kept = {key: old for key, old in kept.items() if old.step <= row.step}
        else:
            kept[row.split, row.step] = row
    return sorted(kept.values(), key=lambda row: row.seq)


def read_ledger(path: Path) -> list[Row]:
    """The rows that count of a ledger file, or of the `metrics.jsonl` in a run directory."""
    path = path / LEDGER_NAME if path.is_dir() else path
    if not path.exists():
        raise ValueError(f"{path.absolute()} does not exist; give a run directory written by train.py")
    return current_rows(read_rows(path))


def series(rows: Sequence[Row], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, such as `train/loss`; rows without it are left out."""
    split, key = name.split("/", 1)
    found = sorted((row.step, row.values[key]) for row in rows if row.split == split and key in row.values)
    return [step for step, _ in found], [value for _, value in found]


def metric_names(rows: Sequence[Row]) -> list[str]:
    """Full names of all metrics in the rows, sorted."""
    return sorted({name for row in rows for name in row.flat()})
