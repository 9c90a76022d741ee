"""A running SGLang: how it is started, what it must say of itself, and how it is asked."""

import contextlib
import logging
import re
import secrets
import shlex
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import httpx

from extract import plugin
from extract.config import Server
from extract.engines.base import EngineGone
from extract.engines.sglang_command import (
    ENVIRONMENT,
    Life,
    data_parallel_groups,
    installed_sglang,
    sglang_command,
    unknown_flags,
)
from extract.launcher import ServerDied, ServerError, ServerHung, free_port, launch
from extract.local_http import HEALTH_TIMEOUT_S, client_options, is_ready
from extract.phases import Phases
from extract.spool import Parts, Spool
from extract.verifier import VerifierSpec

log = logging.getLogger(__name__)

DYING_S = 3.0
"""A broken engine answers with 500 or not at all, and its process ends a moment later."""

PHASES = (
    ("process", re.compile(rb"Init (torch distributed|parallel) begin")),
    ("distributed", re.compile(rb"Init (torch distributed|parallel) ends?\b|Load weight begin")),
    ("weights", re.compile(rb"Load weight end")),
    ("kv_cache", re.compile(rb"Memory pool end")),
    ("graphs", re.compile(rb"max_total_num_tokens=")),
    ("ready", re.compile(rb"$^")),
)
"""What SGLang's log says when a phase of its start is over; 0.5.16 and 0.5.23 were read."""

MUST_BE: Mapping[str, Sequence[Any]] = {
    "disable_radix_cache": (True,),
    "disable_cuda_graph": (True,),
    "pp_size": (1,),
    "speculative_algorithm": (None,),
    "enable_two_batch_overlap": (False,),
    "enable_attn_tp_input_scattered": (False,),
    "enable_layernorm_sp": (False, None),
}
"""What /server_info must say of a server that captures; a key that a version lacks, it cannot switch on."""


def open_sglang(
    server: Server, spec: VerifierSpec, life: Life, *, dtype: str, env: Mapping[str, str], log_dir: Path,
    spool: Spool | None, wanted: Callable[[], bool],
) -> "SglangServer":  # fmt: skip
    """Starts a server and waits until it is ready.

    `log_dir` gets server.log and command.txt. With a `spool`, which must have been told what to capture, the plugin
    is in it, and every rank has said so. As soon as the server is not `wanted` any more, the start ends in EngineGone.

    Raises:
        ValueError: the interpreter is missing or has no SGLang, or a flag is unknown to it or not to be chosen.
        ServerError: it did not start, it is not as it was asked to be, or somebody else answers on its port.
    """
    assert server.capture and server.start_timeout_s and server.request_timeout_s, "checked by Server"
    python, version = installed_sglang(server)
    name, port = f"{spec.name}-{secrets.token_hex(4)}", free_port()
    command = sglang_command(python, spec, server, life, port=port, name=name, dtype=dtype, version=version)
    client = httpx.Client(**client_options(f"http://127.0.0.1:{port}", server.request_timeout_s))
    log_file = log_dir / "server.log"

    def healthy() -> bool:
        if not wanted():
            raise EngineGone("the engine was closed while its server started")
        return is_ready(client, name)

    try:
        launched = launch(
            command, server_environment(server, env, spool), log_file,
            healthy=healthy, timeout_s=server.start_timeout_s,
            phases=Phases(log_file, PHASES, vars(server.capture.phase_timeouts_s)),
            scratch=None if spool is None else spool.folder,
        )  # fmt: skip
    except ServerDied as error:
        if words := unknown_flags(str(error)):
            raise ValueError(f"server.flags: SGLang {version} does not know {words}; see {log_file}") from error
        raise
    opened = SglangServer(launched, client, name=name)
    try:
        opened.check(version, server, spool)
    except BaseException:
        opened.close()
        raise
    return opened


def server_environment(server: Server, env: Mapping[str, str], spool: Spool | None) -> dict[str, str]:
    """`env` (the hardware's), then server.env, then ours; the plugin is put before a PYTHONPATH that is there."""
    told = {**env, **{key: str(value) for key, value in server.env.items()}}
    if spool is None:
        return ENVIRONMENT | told
    path = ":".join([str(spool.site), *filter(None, [told.get("PYTHONPATH")])])
    return ENVIRONMENT | told | {"PYTHONPATH": path, plugin.VARIABLE: str(spool.told)}


def command_lines(spec: VerifierSpec, server: Server, dtype: str, env: Mapping[str, str]) -> tuple[str, ...]:
    """Both servers of an extraction as they will be started, but for port, name and the folder in memory."""
    python, version = installed_sglang(server)
    lives: tuple[Life, Life] = ("respond", "capture")
    return tuple(
        shlex.join([
            "env", *(f"{key}={value}" for key, value in server_environment(server, env, None).items()),
            *sglang_command(python, spec, server, life, port="PORT", name=spec.name, dtype=dtype, version=version),
        ])
        for life in lives
    )  # fmt: skip


class Process(Protocol):
    """What there is to know and to do about a server's process; `extract.launcher.Launched` is one of our own."""

    def death(self, within_s: float = 0.0) -> ServerDied | None:
        """The error to raise if it has ended, or does so within that time."""

    def told(self, what: str) -> str:
        """`what`, with the end of its log."""

    def stop(self) -> None:
        """Ends it, if that is ours to do."""


class SglangServer:
    """A running SGLang; a context manager that ends it. Several threads may ask at once.

    Attributes:
        info: what /server_info says.
        hung: the error of the first request that was not answered in time.
    """

    def __init__(self, launched: Process, client: httpx.Client, *, name: str) -> None:
        self._launched, self._client, self.name = launched, client, name
        self.info: dict[str, Any] = {}
        self.hung: ServerHung | None = None
        self._stopped = False
        self._connecting, self._sockets = threading.Lock(), list[socket.socket]()
        client.event_hooks = {"request": [self._watch]}

    def __enter__(self) -> "SglangServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends it, if it is ours; requests under way break off. Connections are closed with the last of them."""
        self._stopped = True
        self._launched.stop()
        with self._connecting:
            for connected in self._sockets:
                with contextlib.suppress(OSError):  # it is closed already
                    connected.shutdown(socket.SHUT_RDWR)  # a thread that waits for an answer wakes up

    @property
    def url(self) -> str:
        """Where it listens, without a slash at the end."""
        return str(self._client.base_url).rstrip("/")

    @property
    def page_size(self) -> int:
        """Tokens of a page of its cache."""
        return int(self.info["page_size"] or 1)

    @property
    def max_input(self) -> int:
        """The longest prompt that it takes, in tokens."""
        return int(self.info["max_req_input_len"]) - 1  # it refuses one of that very length

    def check(self, version: str, server: Server, spool: Spool | None) -> None:
        """Reads /server_info, and with a spool what the ranks said; ServerError if it is not as asked for."""
        self.info = self.ask("GET", "/server_info")
        if (said := self.info["version"]) != version:
            raise ServerError(self._launched.told(f"the server is SGLang {said}, and {server.python} has {version}"))
        if spool is not None:
            self.check_capture(*data_parallel_groups(server), spool)

    def check_capture(self, groups: int, ranks: int, parts: Parts) -> None:
        """ServerError unless all flags and all ranks are as capture needs them."""
        wrong = {
            key: self.info[key] for key, right in MUST_BE.items() if key in self.info and self.info[key] not in right
        }
        if wrong:
            raise ServerError(self._launched.told(f"the server runs with {wrong}, which would spoil the capture"))
        ready = parts.ready()
        writers = sum(word["writes"] for word in ready)
        if len(ready) != ranks or writers < groups:
            raise ServerError(
                self._launched.told(
                    f"{len(ready)} of {ranks} ranks are ready to capture, {writers} of them to write: "
                    "SGLang has not loaded the plugin eagle3_capture"
                )
            )

    def alive(self) -> None:
        """Raises ServerDied if the server has ended, and ServerHung once it has not answered a request in time."""
        if (fault := self._launched.death() or self.hung) is not None:
            raise fault

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The JSON that it answers with.

        Raises:
            ServerDied: it has ended (with exit code and log).
            ServerHung: it has not answered within server.request_timeout_s.
            ServerError: it broke off or failed.
            ValueError: it refused the request, with its words.
        """
        if self._stopped:
            raise ServerError("the server has been stopped")
        try:
            response = self._client.request(method, path, json=body)
        except httpx.TimeoutException as error:
            hung = f"the server has not answered {path} within {self._client.timeout.read:g} s"
            self.hung = self.hung or ServerHung(self._launched.told(hung))
            raise (self._launched.death() or self.hung) from error
        except httpx.TransportError as error:
            if self._stopped:
                raise ServerError(f"the server was stopped while it worked on {path}") from error
            broke = f"the server broke off {path} ({error})"
            raise (self._launched.death(DYING_S) or ServerError(self._launched.told(broke))) from error
        if response.status_code >= 500:
            failed = f"the server answered {path} with {response.status_code}: {response.text[:500]}"
            raise self._launched.death(DYING_S) or ServerError(self._launched.told(failed))
        if response.status_code != 200:
            raise ValueError(f"the server refused {path} with {response.status_code}: {response.text[:500]}")
        return response.json()

    def abort(self, rid: str) -> None:
        """Tells it to drop a request that nobody waits for any more."""
        with contextlib.suppress(httpx.HTTPError, ServerError):
            self.alive()
            self._client.post("/abort_request", json={"rid": rid}, timeout=HEALTH_TIMEOUT_S)

    def _watch(self, request: httpx.Request) -> None:
        request.extensions["trace"] = self._connected

    def _connected(self, event: str, info: Mapping[str, Any]) -> None:
        """Keeps the sockets of all connections; httpx tells of each."""
        if event == "connection.connect_tcp.complete":
            with self._connecting:
                opened = [old for old in self._sockets if old.fileno() >= 0]
                self._sockets = [*opened, info["return_value"].get_extra_info("socket")]
