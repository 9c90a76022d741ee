"""Keeps a mirror's failures away from training: each mirror works in a thread of its own, and all it does is counted.

A mirror that raises, hangs or falls behind without end costs training nothing but the hand-over of a row. What it
did not do is a failure, told at once and again by reconcile.
"""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Full, Queue
from threading import Thread

from eagle3.runlog.ledger import Row
from eagle3.runlog.mirrors import Held, Mirror

log = logging.getLogger(__name__)

LOGGED_FAILURES = 3
WAITING_ROWS = 10_000
"""Rows handed over and not yet taken; more are refused, so that a mirror that hangs does not fill the memory."""
STALLED_S = 60.0
"""One call that lasts longer is told while it lasts."""

Task = tuple[str, Callable[[], None]]


class Guarded:
    """One mirror behind its thread. `first` are the rows that count from earlier attempts; it gets them before all."""

    def __init__(self, mirror: Mirror, first: Sequence[Row] = ()) -> None:
        self.mirror, self.name = mirror, mirror.name
        self.failures: list[str] = []
        self.hangs = False
        self._doing: tuple[str, float] | None = None
        self._told_stall = False
        self._tasks: Queue[Task | None] = Queue(WAITING_ROWS)
        self._thread = Thread(target=self._work, args=(first,), name=f"mirror {self.name}", daemon=True)
        self._thread.start()

    def emit(self, row: Row) -> None:
        """Hands a row over, without waiting."""
        doing = _name(row)
        try:
            self._tasks.put_nowait((doing, lambda: self.mirror.emit(row)))
        except Full:
            self._fail(f"{doing}: {WAITING_ROWS} rows wait already{self._stall()}")
        if self._stall() and not self._told_stall:
            self._told_stall = True
            log.error("mirror %s hangs%s; training goes on", self.name, self._stall())

    def attach(self, kind: str, path: Path) -> None:
        """Hands over a directory to be kept beside the run."""
        self._put((f"artifact {path.name}", lambda: self.mirror.attach(kind, path)))

    def close(self, ok: bool, want: Held) -> None:
        """Waits until all is done, as long as the mirror asks for. `ok` counts only if it has the rows `want`."""
        if ok:
            self._put(("rows before the end", lambda: self.mirror.settle(want)))
        self._put(("close", lambda: self.mirror.close(ok and not self.failures)))
        self._put(None)
        self._thread.join(self.mirror.patience_s)
        if self._thread.is_alive():
            self.hangs = True
            self._fail(f"close: not done after {self.mirror.patience_s:.0f} s{self._stall()}")

    def held(self) -> Held:
        """What the closed mirror holds; nothing if it hangs or cannot be read."""
        if self.hangs:
            return Held()
        held: list[Held] = []
        self._try("read back", lambda: held.append(self.mirror.held()))
        return held[0] if held else Held()

    def _put(self, task: Task | None) -> None:
        try:
            self._tasks.put(task, timeout=self.mirror.patience_s)
        except Full:
            self._fail(f"{task[0] if task else 'end'}: {WAITING_ROWS} rows wait already{self._stall()}")

    def _work(self, first: Sequence[Row]) -> None:
        for row in first:
            self._try(_name(row), lambda row=row: self.mirror.emit(row))  # type: ignore[misc]  # bound in the loop
        while task := self._tasks.get():
            self._try(*task)

    def _try(self, doing: str, action: Callable[[], None]) -> None:
        self._doing = doing, time.monotonic()
        try:
            action()
        except Exception as err:  # whatever a mirror raises, training goes on and reconcile tells
            self.failures.append(f"{doing}: {type(err).__name__}: {err}")
            if len(self.failures) <= LOGGED_FAILURES:
                log.error("mirror %s failed at %s; training goes on", self.name, doing, exc_info=True)
        self._doing = None

    def _fail(self, told: str) -> None:
        self.failures.append(told)
        if len(self.failures) <= LOGGED_FAILURES:
            log.error("mirror %s failed at %s; training goes on", self.name, told)

    def _stall(self) -> str:
        """What the thread has been at for too long, in words; nothing if it moves."""
        doing = self._doing
        lasted = time.monotonic() - doing[1] if doing else 0.0
        return f" ({doing[0]} has lasted {lasted:.0f} s)" if doing and lasted > STALLED_S else ""


def _name(row: Row) -> str:
    return f"{row.split} step {row.step}"
