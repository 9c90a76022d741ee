"""The end of a run: expected, emitted, on-disk and mirrored rows must agree, or the process fails."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from eagle3.runlog.guard import Guarded
from eagle3.runlog.ledger import MARKER, Ledger, Row, read_rows
from eagle3.runlog.mirrors import Held
from extract.durable import replace_file

REPORT_NAME = "reconcile.json"
SHOWN_STEPS = 8


class MetricsLost(RuntimeError):
    """Some metric did not reach a place where it should be."""


@dataclass
class Report:
    """What `reconcile.json` holds; counts are of this attempt's rows."""

    ok: bool
    run: str
    attempt: int
    splits: dict[str, dict[str, int | None]]
    """By split: expected (None: not said, or stopped early), emitted, on_disk, inherited (rows of earlier attempts that
    count), and one entry per mirror, which holds the last two."""
    nonfinite: dict[str, int]
    """How often each metric was NaN or infinite; stored as such, no gap."""
    gaps: list[str] = field(default_factory=list)

    def write(self, run_dir: Path) -> None:
        replace_file(run_dir / REPORT_NAME, json.dumps(asdict(self), indent=2).encode() + b"\n")


class Reconciler:
    """Compares one closed ledger with its mirrors, one after another."""

    def __init__(self, ledger: Ledger, expected: Mapping[str, int]) -> None:
        self.rows, self.gaps = _on_disk(ledger)
        self.inherited = ledger.inherited
        on_disk, before = (Counter(row.split for row in rows) for rows in (self.rows, self.inherited))
        self.report = Report(True, ledger.run, ledger.attempt, {}, dict(ledger.nonfinite), self.gaps)
        for split, emitted in ledger.emitted.items():
            want = expected.get(split)
            self.report.splits[split] = {
                "expected": want, "emitted": emitted, "on_disk": on_disk[split], "inherited": before[split],
            }  # fmt: skip
            if want is not None and want != emitted:
                self.gaps.append(f"{split}: {want} rows expected, {emitted} emitted")
            if on_disk[split] != emitted:
                self.gaps.append(f"{split}: {emitted} rows emitted, {on_disk[split]} on disk")

    @property
    def counted(self) -> list[Row]:
        """The rows that every mirror should hold."""
        return [*self.inherited, *self.rows]

    def compare(self, mirror: Guarded) -> None:
        """Holds a closed mirror's rows against the ledger's."""
        held, gaps = mirror_gaps(mirror, self.counted)
        self.gaps += gaps
        for split, counts in self.report.splits.items():
            counts[mirror.name] = sum(n for (held_split, _, _), n in held.items() if held_split == split)

    def finish(self, run_dir: Path) -> Report:
        self.report.ok = not self.gaps
        self.report.write(run_dir)
        return self.report


def held_of(rows: Sequence[Row]) -> Held:
    return Held((row.split, row.step, len(row.values)) for row in rows)


def mirror_gaps(mirror: Guarded, rows: Sequence[Row]) -> tuple[Held, list[str]]:
    """What a closed mirror holds, and where that differs from the rows that it should hold."""
    held, want = mirror.held(), held_of(rows)
    told = {"missing or incomplete": want - held, "that the ledger lacks": held - want}
    gaps = [
        f"{mirror.name}: {len(steps)} {split} rows {what} at {_shown(steps)}"
        for what, differing in told.items()
        for split, steps in _by_split(differing).items()
    ]
    if mirror.failures:
        gaps.append(f"{mirror.name}: {len(mirror.failures)} calls failed, first {mirror.failures[0]}")
    return held, gaps


def metrics_lost(report: Report, run_dir: Path) -> MetricsLost:
    gaps = "\n".join(f"  - {gap}" for gap in report.gaps)
    return MetricsLost(f"metrics of {run_dir} do not agree (see {REPORT_NAME}):\n{gaps}")


def _on_disk(ledger: Ledger) -> tuple[list[Row], list[str]]:
    """This attempt's rows as the file has them, and what is wrong with the file."""
    try:
        rows = read_rows(ledger.path)
    except (OSError, ValueError) as err:
        return [], [f"the ledger cannot be read back: {err}"]
    gaps = []
    if ledger.last is not None and (not rows or rows[-1].to_line() != ledger.last.to_line()):
        gaps.append(f"the last row on disk is not the last one emitted (seq {ledger.last.seq})")
    return [row for row in rows if row.attempt == ledger.attempt and row.split != MARKER], gaps


def _by_split(rows: Held) -> dict[str, list[int]]:
    splits: dict[str, list[int]] = {}
    for split, step, _ in sorted(rows.elements()):
        splits.setdefault(split, []).append(step)
    return splits


def _shown(steps: Sequence[int]) -> str:
    shown = ", ".join(str(step) for step in steps[:SHOWN_STEPS])
    return f"step {shown}" + (" …" if len(steps) > SHOWN_STEPS else "")
