"""Stands between a server and the process that wants it, so that nothing of the server outlives that process.

    python warden.py GRACE_S COMMAND...

It runs the command and holds a pipe (its standard input) to its parent. When the parent writes to the pipe, closes it
or dies, of kill -9 too, all that the command has started is told to end (SIGTERM), and what is left GRACE_S later is
killed. When the command ends by itself, what it leaves is killed at once. The warden's exit code is the command's,
128 + n for signal n.

Processes that detach themselves, even into a session of their own, stay below the warden: it is their reaper (Linux's
PR_SET_CHILD_SUBREAPER). Needs Linux and the standard library, and runs as a file under any Python.
"""

import contextlib
import ctypes
import math
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
TICK_S = 0.1


def main() -> int:
    grace_s, command = float(sys.argv[1]), sys.argv[2:]
    parent = os.getppid()
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda got, _: signals.append(got))
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL),  # kill -9 of the warden ends the server too
    )
    ended: dict[int, int] = {}
    # A process that our parent has forked holds the pipe open after the parent's death; then getppid() tells.
    while server.pid not in ended and not signals and os.getppid() == parent:
        if select.select([sys.stdin], [], [], TICK_S)[0]:
            break
        ended |= _reap()
    if server.pid not in ended:
        _end_all(signal.SIGTERM, ended, grace_s)
    _end_all(signal.SIGKILL, ended, math.inf)
    code = ended[server.pid]
    return code if code >= 0 else 128 - code


def _end_all(number: signal.Signals, ended: dict[int, int], within_s: float) -> None:
    """Sends a signal once to every process below, and waits until all are gone or the time is over."""
    deadline = time.monotonic() + within_s
    told: set[int] = set()
    while True:
        ended |= _reap()
        below = _below(os.getpid())
        if not below or time.monotonic() > deadline:
            return
        for pid in below - told:
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                os.kill(pid, number)
        told |= below
        time.sleep(TICK_S / 2)


def _reap() -> dict[int, int]:
    """Exit codes of the children that have ended, adopted ones among them; negative: the signal that killed it."""
    ended = {}
    with contextlib.suppress(ChildProcessError):  # no child is left
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = os.waitstatus_to_exitcode(found[1])
    return ended


def _below(root: int) -> set[int]:
    """All processes that descend from `root`."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            # "pid (name) state ppid ...", and a name may hold anything
            parent = int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found, new = set(), [root]
    while new:
        new = [child for pid in new for child in children.get(pid, [])]
        found.update(new)
    return found


if __name__ == "__main__":
    sys.exit(main())
