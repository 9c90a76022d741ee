"""Stands between a server and the process that wants it, so that nothing of the server outlives that process.

    python warden.py GRACE_S SCRATCH COMMAND...

It runs the command and holds a pipe (its standard input) to its parent. When the parent writes to the pipe, closes it
or dies, of kill -9 too, the command is told to end (SIGTERM): it alone, for a server takes the end of a worker for a
crash. What is left when it has ended, or GRACE_S later, is killed, as is what it leaves when it ends by itself. The
warden's exit code is the command's, 128 + n for signal n.

Shared memory that they leave in /dev/shm is deleted, and at the very end the folder SCRATCH, unless that is an empty
word.

Processes that detach themselves, even into a session of their own, stay below the warden: it is their reaper (Linux's
PR_SET_CHILD_SUBREAPER). Needs Linux and the standard library, and runs as a file under any Python.
"""

import contextlib
import ctypes
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
TICK_S, LOOK_EVERY_S = 0.1, 1.0
SHARED = "/dev/shm/"


def main() -> int:
    grace_s, scratch, command = float(sys.argv[1]), sys.argv[2], sys.argv[3:]
    parent, began = os.getppid(), time.time()
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
    shared: set[Path] = set()
    looked = -math.inf
    while server.pid not in ended and not signals and os.getppid() == parent:
        if select.select([sys.stdin], [], [], TICK_S)[0]:
            break
        if time.monotonic() - looked > LOOK_EVERY_S:
            shared, looked = shared | _shared_by(_below(os.getpid())), time.monotonic()
        ended |= _reap()
    shared |= _shared_by(_below(os.getpid()))
    if server.pid not in ended:
        with contextlib.suppress(ProcessLookupError):  # Popen's own way would reap it, unseen by us
            os.kill(server.pid, signal.SIGTERM)
        _wait_for(server.pid, ended, grace_s)
    _kill_all(ended)
    for file in shared:
        with contextlib.suppress(FileNotFoundError):
            if file.stat().st_ctime >= began:  # what was there before belongs to others
                file.unlink()
    if scratch:
        shutil.rmtree(scratch, ignore_errors=True)
    code = ended[server.pid]
    return code if code >= 0 else 128 - code


def _wait_for(pid: int, ended: dict[int, int], within_s: float) -> None:
    """Until it has ended, or the time is over."""
    deadline = time.monotonic() + within_s
    while pid not in ended and time.monotonic() < deadline:
        time.sleep(TICK_S / 2)
        ended |= _reap()


def _kill_all(ended: dict[int, int]) -> None:
    """Kills every process below, and waits until all are gone."""
    while True:
        ended |= _reap()
        below = _below(os.getpid())
        if not below:
            return
        for pid in below:
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                os.kill(pid, signal.SIGKILL)
        time.sleep(TICK_S / 2)


def _shared_by(pids: set[int]) -> set[Path]:
    """Files of /dev/shm that these processes have mapped: semaphores, and memory that they share."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it ended meanwhile
            for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                if SHARED in line and not line.endswith(" (deleted)"):
                    found.add(Path(SHARED + line.partition(SHARED)[2]))
    return found


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
