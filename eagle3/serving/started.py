"""A server for others, running: the phases of its start, and whom to ask."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from eagle3.serving.lines import Line
from eagle3.serving.phases import phase
from extract.config import Server
from extract.engines import sglang_server
from extract.engines.sglang_command import unknown_flags
from extract.launcher import Launched, ServerDied, launch
from extract.local_http import HEALTH_TIMEOUT_S, client_options, is_ready
from extract.phases import Phases

ANY = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}
"""Addresses to listen on, and where one reaches such a server from here."""


@contextmanager
def started(line: Line, server: Server, log_dir: Path, *, scratch: Path | None = None) -> Iterator[Launched]:
    """The server is ready; it and all its processes are gone at the end of the block.

    `log_dir` gets server.log and command.txt; `scratch` is deleted when the server has ended, however we end.

    Raises:
        ValueError: the engine does not know a flag.
        ServerError: it did not start, or somebody else answers on its port; the end of its log is in the message.
    """
    assert server.start_timeout_s, "checked by Server"
    log_file = log_dir / "server.log"
    phases = None
    if server.capture is not None:
        phases = Phases(log_file, sglang_server.PHASES, vars(server.capture.phase_timeouts_s))
    with httpx.Client(**client_options(url_of(line), HEALTH_TIMEOUT_S)) as client, phase("start"):
        try:
            launched = launch(line.command, line.env, log_file, healthy=lambda: is_ready(client, line.name),
                              timeout_s=server.start_timeout_s, phases=phases, scratch=scratch)  # fmt: skip
        except ServerDied as error:
            if words := unknown_flags(str(error)):
                raise ValueError(f"server.flags: {line.engine} does not know {words}; see {log_file}") from error
            raise
    with launched:
        yield launched


def url_of(line: Line) -> str:
    """Where it is reached from this machine."""
    return f"http://{ANY.get(line.host, line.host)}:{line.port}"
