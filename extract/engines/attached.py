"""Attaches to a capture server that `extract.engines.standby` holds on this machine, and never stops it.

Everything that an extraction relies on is compared before a prompt is sent. States come through that server's own
folder, which one extraction at a time may use.
"""

import fcntl
import math
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
from pydantic import TypeAdapter, ValidationError

from extract.config import Server
from extract.engines.sglang_command import Life
from extract.engines.sglang_server import SglangServer
from extract.engines.standby import RECORD, Held
from extract.launcher import ServerDied, ServerError, tail
from extract.local_http import client_options, is_ready
from extract.numbering import sglang_layer_ids
from extract.spool import NAME, Parts
from extract.verifier import VerifierSpec

TICK_S = 0.05


def find_held(url: str, root: Path) -> tuple[Held, Path]:
    """The record of the server at `url`, and its folder below `root`.

    Raises:
        ValueError: nobody holds a server there.
    """
    address = url.replace("//localhost:", "//127.0.0.1:")
    found = {}
    for record in sorted(root.glob(f"{NAME}*/{RECORD}")):
        try:
            held = TypeAdapter(Held).validate_json(record.read_bytes())
        except FileNotFoundError:  # its server ended at this moment
            continue
        except ValidationError as error:
            raise ValueError(f"{record} is of another version of this program: {error}") from error
        if is_held(record.parent):
            found[held.url] = held, record.parent
    if address not in found:
        raise ValueError(
            f"server.urls: nobody holds {url} for capture on this machine; below server.capture.spool={root} there are "
            f"{sorted(found) or 'none'}; start it there for capture first, for states come through memory"
        )
    return found[address]


def is_held(folder: Path) -> bool:
    """Whether whoever holds that server lives, and the server too: the folder goes with it."""
    try:
        with (folder / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def check_held(held: Held, spec: VerifierSpec, *, capture_layers: Sequence[int], dtype: str) -> None:
    """ValueError if that server captures something else than this extraction wants."""
    wanted = {
        "verifier (sha256)": (held.sha256, spec.sha256),
        "verifier.capture_layers": (held.layers, list(capture_layers)),
        "verifier.dtype": (held.dtype, dtype),
        f"numbers for these layers in SGLang {held.version}": (
            held.layer_ids, sglang_layer_ids(spec.model_type, held.version, capture_layers),
        ),
    }  # fmt: skip
    different = [f"{what} {theirs}, not {ours}" for what, (theirs, ours) in wanted.items() if theirs != ours]
    if different:
        raise ValueError(
            f"server.urls: {held.url} captures {held.verifier} with another {'; another '.join(different)}; "
            "start one for this extraction, or change its settings"
        )


class Lease(Parts):
    """The folder of a held server, for one extraction at a time; `prefix` is that of its requests.

    Raises:
        ValueError: another extraction has it.
    """

    def __init__(self, held: Held, folder: Path) -> None:
        super().__init__(folder)
        self.prefix = f"{held.prefix}{secrets.token_hex(4)}-"
        self._file = (folder / "lease").open("a")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise ValueError(f"server.urls: another extraction uses {held.url} right now; wait for its end") from error
        self.failure(math.inf)  # what went wrong for others is read now, and so is older than all that we shall ask
        self.sweep()

    def sweep(self) -> None:
        """Deletes also what comes late for extractions that were killed."""
        super().sweep()
        for file in self.parts.glob("*.safetensors"):
            if not file.name.startswith(self.prefix):
                file.unlink(missing_ok=True)

    def close(self) -> None:
        """Leaves the folder to the next."""
        for file in self.parts.glob("*.safetensors"):
            file.unlink(missing_ok=True)
        self._file.close()


class HeldProcess:
    """The process of a held server, as far as it can be seen from here: a `sglang_server.Process`."""

    def __init__(self, held: Held, folder: Path) -> None:
        self._held, self._folder = held, folder

    def death(self, within_s: float = 0.0) -> ServerDied | None:
        deadline = time.monotonic() + within_s
        while is_held(self._folder):
            if time.monotonic() >= deadline:
                return None
            time.sleep(TICK_S)
        return ServerDied(self.told(f"the server at {self._held.url} has ended, or is held no more"))

    def told(self, what: str) -> str:
        log_file = Path(self._held.log_file)
        return f"{what}; the last lines of {log_file}:\n{tail(log_file)}" if log_file.exists() else what

    def stop(self) -> None:
        """Nothing: it is not ours."""


class AttachedServer:
    """One held server, which both answers and captures. See `extract.engines.servers.Servers`.

    Raises:
        ValueError: it is used by another extraction, does not answer, or is not what its record says.
    """

    def __init__(self, held: Held, folder: Path, server: Server) -> None:
        assert server.capture and server.request_timeout_s, "checked by Server"
        self.name, self.version, self.restarts = held.url, held.version, 0
        self.concurrency, self.budget_bytes = server.capture.concurrency, held.budget_bytes
        self._lease = Lease(held, folder)
        self.prefix = self._lease.prefix
        client = httpx.Client(**client_options(held.url, server.request_timeout_s))
        self._server = SglangServer(HeldProcess(held, folder), client, name=held.name)
        try:
            if not is_ready(client, held.name):
                raise ServerError("it does not answer, or is not ready")
            _check(self._server, held, self._lease)
        except ServerError as error:
            self.close()
            raise ValueError(f"server.urls: {held.url} cannot be used: {error}") from error
        except BaseException:
            self.close()
            raise

    def serve(self, _: Life) -> SglangServer:
        self._server.alive()
        return self._server

    def now(self) -> tuple[SglangServer, Parts | None]:
        return self._server, self._lease

    def close(self) -> None:
        self._server.close()
        self._lease.close()


def _check(server: SglangServer, held: Held, lease: Lease) -> None:
    server.info = server.ask("GET", "/server_info")
    for key, wanted in (("version", held.version), ("model_path", held.model_path)):
        if server.info[key] != wanted:
            raise ServerError(f"its {key} is {server.info[key]}, and it was started with {wanted}")
    server.check_capture(held.groups, held.ranks, lease)
    if any(ready["layers"] != held.layers for ready in lease.ready()):
        raise ServerError(f"its ranks capture other layers than {held.layers}")
