"""Progress of a long stage, and the table at its end.

On a terminal: one live bar with rate and time left. In a file or a pipe: plain lines, the first within
`every_s` seconds and then one every `every_s` seconds, written by a thread, so that one comes also while a
single batch takes longer than that.
"""

import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from rich import box, get_console
from rich import progress as bars
from rich.table import Column, Table
from rich.text import Text

TABLE_WIDTH = 80


class Progress:
    """Counts what is done of `total` and says so; a context manager.

    Args:
        title: what is done, e.g. "capture".
        total: how many units there are in all.
        unit: what is counted; it names the rate too ("tokens" gives "tokens/s").
        every_s: seconds between two lines where output is no terminal.
        initial: units that an earlier run has done; they do not count for the rate.
        waited_s: tells the seconds so far in which nothing could be done; they do not count for the rate either.
    """

    def __init__(
        self, title: str, total: int, unit: str = "tokens", every_s: float = 10.0, initial: int = 0,
        waited_s: Callable[[], float] = lambda: 0.0,
    ) -> None:  # fmt: skip
        self.title, self.total, self.unit, self.every_s = title, total, unit, every_s
        self.count = self.initial = initial
        self.fields: dict[str, object] = {}
        self._waited_s = waited_s
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._began = time.monotonic()
        self._bar: bars.Progress | None = None
        self._thread: threading.Thread | None = None

    def advance(self, n: int, **fields: object) -> None:
        """`n` more units are done; `fields` (e.g. loss=2.31) stay beside the count until given anew."""
        with self._lock:
            self.count += n
            self.fields |= fields
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self.count, text=self._figures())

    def skip(self, n: int) -> None:
        """`n` units were done by an earlier run: they count, but not for the rate."""
        with self._lock:
            self.initial += n
        self.advance(n)

    def __enter__(self) -> "Progress":
        self._began = time.monotonic()
        console = get_console()
        if console.is_terminal:
            self._bar = bars.Progress(
                bars.TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
                bars.BarColumn(bar_width=8),
                bars.TaskProgressColumn(),
                # What does not fit into the line is cut at its end, so what matters least stands last.
                bars.TextColumn(
                    "{task.fields[text]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")
                ),
                console=console,
            )
            self._bar.add_task(self.title, total=self.total, completed=self.count, text=self._figures())
            self._bar.start()
        self._thread = threading.Thread(target=self._tick, daemon=True, name=f"progress {self.title}")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        assert self._thread is not None
        self._thread.join()
        if self._bar is not None:
            self._bar.stop()
        else:
            self._write_line("stopped" if kind else "done")

    def _tick(self) -> None:
        """A line in a file now and then; on a terminal the clock goes on while one batch takes long."""
        while not self._stopped.wait(self.every_s if self._bar is None else 1.0):
            if self._bar is None:
                self._write_line("")
            else:
                self._bar.update(self._bar.task_ids[0], text=self._figures())

    def _write_line(self, state: str) -> None:
        share = f"{self.count / self.total:.0%}" if self.total else "100%"
        sys.stdout.write(f"{self.title}: {share} {self._figures()}{' ' * bool(state)}{state}\n")
        sys.stdout.flush()

    def _figures(self) -> str:
        with self._lock:
            count, fields = self.count, dict(self.fields)
        elapsed_s = time.monotonic() - self._began
        worked_s = elapsed_s - self._waited_s()
        rate = (count - self.initial) / worked_s if worked_s > 0 else 0.0
        parts = [f"{count:,}/{self.total:,} {self.unit}", f"{_short(rate)} {self.unit}/s"]
        parts.append(f"{_clock(elapsed_s)} gone")
        if rate > 0 and count < self.total:
            parts.append(f"{_clock((self.total - count) / rate)} left")
        parts += [f"{name} {_short(value) if isinstance(value, float) else value}" for name, value in fields.items()]
        return ", ".join(parts)


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def shown_path(path: Path | str) -> str:
    """A path as people would type it: relative where it lies below the working directory."""
    absolute = Path(path).absolute()
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(path)


def closing_table(title: str, rows: list[tuple[str, str]], next_command: str | None) -> None:
    """Print a stage's figures in at most 80 columns, values folded and never cut off, and the next command.

    A long command is broken at spaces with backslashes, so that it can still be pasted.
    """
    console = get_console()
    table = Table(title=Text(title, overflow="fold"), title_justify="left", box=box.ROUNDED, show_header=False)
    table.add_column(overflow="fold", no_wrap=False, style="bold")
    table.add_column(overflow="fold", no_wrap=False)
    for name, value in rows:
        table.add_row(Text(name, overflow="fold"), Text(value, overflow="fold"))
    console.print(table, width=min(TABLE_WIDTH, console.width))
    if next_command is not None:
        console.print(Text("next:"), Text(_pasteable(next_command)), soft_wrap=True)


def _pasteable(command: str) -> str:
    lines = [""]
    for word in re.findall(r"""(?:[^\s'"]|'[^']*'|"[^"]*")+""", command):  # no break inside quotes
        if lines[-1] and len(lines[-1]) + len(word) > TABLE_WIDTH - 10:
            lines.append("   ")
        lines[-1] += f" {word}" if lines[-1] else word
    return " \\\n".join(lines)
