"""Where an SGLang engine's servers come from: started here, for answers and then for states.

Answers want prefix cache and CUDA graphs, which spoil states; so each has a server of its own, started when it is first
needed. A server that dies or hangs is started again a few times: a request that does it every time is given up.
See `attached` for servers that somebody else has started.
"""

import logging
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from extract.config import Server
from extract.engines.base import EngineGone
from extract.engines.sglang_command import Life, data_parallel_groups
from extract.engines.sglang_server import SglangServer, open_sglang
from extract.launcher import ServerDied, ServerError, ServerHung
from extract.numbering import sglang_layer_ids
from extract.spool import Parts, Spool
from extract.verifier import VerifierSpec

log = logging.getLogger(__name__)

RESTARTS = 5
"""Servers that are started in place of such as died or hung, in one extraction."""


class Servers(Protocol):
    """What an engine asks for its server, one at a time. `serve` is never called by two threads at once.

    Attributes:
        name: for messages.
        version: of SGLang.
        prefix: of the requests whose states are wanted.
        concurrency: requests under way at once.
        budget_bytes: that states may take on their way.
        restarts: servers started again so far.
    """

    name: str
    version: str
    prefix: str
    concurrency: int
    budget_bytes: int
    restarts: int

    def serve(self, life: Life) -> SglangServer:
        """The server of this life, which is started if need be; EngineError if there is none any more."""

    def now(self) -> tuple[SglangServer, Parts | None]:
        """What runs at this moment, with the folder of its states; ServerError if nothing does."""

    def close(self) -> None:
        """Ends requests and servers, in the middle of a start too."""


class OwnServers:
    """Servers that are started and ended here. See `Servers`."""

    def __init__(
        self, name: str, spec: VerifierSpec, server: Server, *, version: str, capture_layers: Sequence[int],
        dtype: str, env: Mapping[str, str], log_dir: Path,
    ) -> None:  # fmt: skip
        assert server.capture is not None, "checked by Server"
        self.name, self.version, self.restarts = name, version, 0
        self.prefix = new_prefix()
        self.concurrency, self.budget_bytes = server.capture.concurrency, server.capture.spool_mib << 20
        self.server, self.log_dir = server, log_dir
        self._spec, self._dtype, self._env = spec, dtype, env
        self._layers = list(capture_layers)
        self._running: tuple[Life, SglangServer, Spool | None] | None = None
        self._closed = False

    def serve(self, life: Life) -> SglangServer:
        if self._running is None or self._running[0] != life or self._died():
            self._stop()
            self._start(life)
        return self.now()[0]

    def now(self) -> tuple[SglangServer, Spool | None]:
        running = self._running
        if running is None:
            raise ServerError("the server is being started again")
        return running[1:]

    def close(self) -> None:
        self._closed = True
        self._stop()

    def _stop(self) -> None:
        if (running := self._running) is not None:
            self._running = None
            _, server, spool = running
            server.close()
            if spool is not None:
                spool.close()

    def _died(self) -> bool:
        """Whether the server that runs has ended or hangs; EngineGone if that has happened too often."""
        assert self._running is not None
        try:
            self._running[1].alive()
        except (ServerDied, ServerHung) as error:
            if self.restarts >= RESTARTS:
                raise EngineGone(f"{self.restarts} servers were started in place of others; {error}") from error
            self.restarts += 1
            log.warning("started again (%d of at most %d times): %s", self.restarts, RESTARTS, error)
            return True
        return False

    def _start(self, life: Life) -> None:
        assert self.server.capture is not None
        spool = None
        if life == "capture":
            spool = told_spool(self._spec, self.server, version=self.version, layers=self._layers, prefix=self.prefix)
        try:
            server = open_sglang(
                self.server, self._spec, life, dtype=self._dtype, env=self._env, log_dir=self.log_dir / life,
                spool=spool, wanted=lambda: not self._closed,
            )  # fmt: skip
        except BaseException:
            if spool is not None:
                spool.close()
            raise
        self._running = life, server, spool
        if self._closed:  # since it was last asked
            self._stop()
            raise EngineGone("the engine was closed while its server started")


def told_spool(spec: VerifierSpec, server: Server, *, version: str, layers: Sequence[int], prefix: str) -> Spool:
    """A new folder for the states of a server that is about to be started, told what to capture.

    Raises:
        ValueError: the folder cannot be made, or this SGLang cannot name these layers.
    """
    assert server.capture is not None, "checked by Server"
    layer_ids = sglang_layer_ids(spec.model_type, version, layers)
    spool = Spool(Path(server.capture.spool), budget_bytes=server.capture.spool_mib << 20)
    groups, _ = data_parallel_groups(server)
    spool.tell(layers=layers, layer_ids=layer_ids, prefix=prefix, groups=groups)
    return spool


def new_prefix() -> str:
    """Of requests whose states are wanted; no other server's."""
    return f"hs-{secrets.token_hex(4)}-"
