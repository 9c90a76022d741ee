"""What a starting server does right now, read off its log, and how long each of that may take.

A server that loads for nine minutes and one that hangs look alike from outside; its log tells them apart.
"""

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path


class Phases:
    """The phases of a start, in order.

    Args:
        log_file: what the server writes.
        ends: name of each phase, with what the log says when it is over; the last ends when the server is ready.
        timeouts_s: seconds that each phase may take, by name.
    """

    def __init__(
        self, log_file: Path, ends: Sequence[tuple[str, re.Pattern[bytes]]], timeouts_s: Mapping[str, float]
    ) -> None:
        self._file, self._ends, self._timeouts_s = log_file, ends, timeouts_s
        self._read = self._number = 0
        self._since = time.monotonic()
        self.took_s: dict[str, float] = {}

    @property
    def name(self) -> str:
        """Of the phase that runs."""
        return self._ends[self._number][0]

    @property
    def lasts_s(self) -> float:
        """For how long it has run."""
        return time.monotonic() - self._since

    def overdue(self) -> str | None:
        """Reads on; a sentence if the phase that runs has run for too long."""
        self._read_on()
        most = self._timeouts_s[self.name]
        return f"its phase {self.name} took more than {most:g} s" if self.lasts_s > most else None

    def told(self) -> str:
        """The phase that runs, for how long, and how long it may."""
        return f"{self.name} for {self.lasts_s:.0f} s of at most {self._timeouts_s[self.name]:g} s"

    def _read_on(self) -> None:
        with self._file.open("rb") as file:
            file.seek(self._read)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._read += len(whole) + len(newline)
        for number in range(len(self._ends) - 2, self._number - 1, -1):
            if self._ends[number][1].search(whole):
                self.took_s[self.name] = self.lasts_s
                self._number, self._since = number + 1, time.monotonic()
                return
