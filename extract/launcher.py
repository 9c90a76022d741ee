"""Starts an engine's server as a process of its own, waits until it is ready, and ends it with us, however we end.

Nothing here knows an engine: it is given a command, an environment and a question that tells whether it is ready.
After that nobody asks about health again, for a server at work may be too busy to answer that: what ends it is its own
exit, a request that takes too long, or us.
"""

import contextlib
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from extract.engines.base import EngineError
from extract.phases import Phases

log = logging.getLogger(__name__)

WARDEN = Path(__file__).with_name("warden.py")
TAIL_LINES, TAIL_BYTES = 30, 1 << 16
ASK_EVERY_S, TELL_EVERY_S = 0.25, 10.0
KILL_WITHIN_S = 5.0
"""How long after the grace `stop` waits for the warden to have killed everything."""
LEFT_OUT = {
    "PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV",
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK",
}  # fmt: skip
LEFT_OUT_PREFIXES = ("MASTER_", "GROUP_", "ROLE_", "TORCHELASTIC_", "PL_")
"""Our interpreter's paths, and what torchrun and Lightning tell the processes of a training."""

ALWAYS = {
    "PYTHONUNBUFFERED": "1",  # or the log lags behind what happens
    "PYTHONSAFEPATH": "1",  # or `-m` looks first into the working directory, where our scripts have names of packages
}


class ServerError(EngineError):
    """A server did not do what it should; the message ends with its log's last lines."""


class ServerDied(ServerError):
    """The server's process has ended."""


class ServerHung(ServerError):
    """The server's process lives, and did not answer in time."""


class Launched:
    """A running server. A context manager: all its processes are gone at the end of the block.

    Made by `launch`. `log_file` takes all that its processes write.
    """

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], log_file: Path, *, grace_s: float, scratch: Path | None
    ) -> None:
        self.log_file, self.grace_s = log_file, grace_s
        with log_file.open("wb") as output:
            self._warden = subprocess.Popen(
                [sys.executable, "-IS", str(WARDEN), str(grace_s), str(scratch or ""), *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=child_environment(env),
                bufsize=0,
                start_new_session=True,  # Ctrl-C is for us; the server is then ended in order
            )

    def __enter__(self) -> "Launched":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends every process of the server, within `grace_s` and a little; a second call does nothing."""
        assert self._warden.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            if not self._warden.stdin.closed:
                self._warden.stdin.write(b"\n")
        self._warden.stdin.close()
        try:
            self._warden.wait(self.grace_s + KILL_WITHIN_S)
        except subprocess.TimeoutExpired:
            # Left alone it goes on killing, and cleans up, as soon as the system lets those processes die.
            log.warning("some process of the server cannot even be killed yet; see ps, and its log %s", self.log_file)

    def death(self, within_s: float = 0.0, doing: str = "") -> ServerDied | None:
        """The error to raise if the server has ended, or does so within `within_s` seconds; None while it runs."""
        try:
            code = self._warden.wait(within_s)
        except subprocess.TimeoutExpired:
            return None
        return ServerDied(self.told(f"the server ended with {_exit_code(code)}{doing}"))

    def told(self, what: str) -> str:
        """`what`, followed by the end of the server's log."""
        return f"{what}; the last lines of {self.log_file}:\n{tail(self.log_file)}"

    def wait_until(self, healthy: Callable[[], bool], timeout_s: float, phases: Phases | None) -> None:
        """See `launch`."""
        began = time.monotonic()
        next_line_s = TELL_EVERY_S
        while True:
            overdue = None if phases is None else phases.overdue()
            if (died := self.death(doing="" if phases is None else f" in its phase {phases.name}")) is not None:
                raise died
            if healthy():
                log.info("the server is ready after %.0f s", time.monotonic() - began)
                return
            gone_s = time.monotonic() - began
            if overdue is not None or gone_s >= timeout_s:
                late = overdue or f"the server was not ready within {timeout_s:g} s"
                raise ServerHung(self.told(f"{late}, and is stopped"))
            if gone_s >= next_line_s:
                next_line_s += TELL_EVERY_S
                last = tail(self.log_file, 1)
                now = "" if phases is None else f"{phases.told()}: "
                log.info(
                    "the server has been starting for %.0f s, of at most %.0f s: %s%s", gone_s, timeout_s, now, last
                )
            time.sleep(ASK_EVERY_S)


def launch(
    command: Sequence[str],
    env: Mapping[str, str],
    log_file: Path,
    *,
    healthy: Callable[[], bool],
    timeout_s: float,
    grace_s: float = 10.0,
    phases: Phases | None = None,
    scratch: Path | None = None,
) -> Launched:
    """Starts `command` and returns when `healthy()` is true; if that never happens, nothing of it is left.

    The command line can be pasted: it is logged, and stands in command.txt beside `log_file`, which is written anew.

    Args:
        env: variables that the server gets on top of `child_environment`.
        healthy: asked a few times a second; it may raise, and must return soon.
        timeout_s: seconds until the server must be ready.
        grace_s: seconds that it has for an orderly end before it is killed.
        phases: what it does meanwhile, with a deadline for each.
        scratch: a folder that is deleted when the server has ended, however we end.

    Raises:
        ServerDied: it ended before it was ready.
        ServerHung: it was not ready in time.
    """
    log_file.parent.mkdir(parents=True, exist_ok=True)
    variables = (f"{name}={value}" for name, value in {**ALWAYS, **env}.items())
    line = shlex.join(["env", *variables, *command])
    log_file.with_name("command.txt").write_text(line + "\n")
    log.info("starting a server, which writes to %s:\n%s", log_file, line)
    launched = Launched(command, env, log_file, grace_s=grace_s, scratch=scratch)
    try:
        launched.wait_until(healthy, timeout_s, phases)
    except BaseException:
        launched.stop()
        raise
    return launched


def child_environment(env: Mapping[str, str]) -> dict[str, str]:
    """`env` on top of ours, without what misleads another interpreter or would make it a rank of our training."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in LEFT_OUT and not name.startswith(LEFT_OUT_PREFIXES)
    }
    return inherited | ALWAYS | dict(env)


def free_port() -> int:
    """A TCP port of this machine that nobody uses now; who comes first gets it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def tail(file: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log; a progress bar's earlier states count as lines."""
    with file.open("rb") as log_file:
        log_file.seek(max(0, file.stat().st_size - TAIL_BYTES))
        text = log_file.read().decode(errors="replace")
    return "\n".join(text.splitlines()[-lines:]) or "(it is empty)"


def _exit_code(code: int) -> str:
    names = {number.value: f" ({number.name})" for number in signal.Signals}
    number = -code if code < 0 else code - 128
    return f"exit code {code}{names.get(number, '')}"
