"""Holds a capture server for others: extractions on this machine attach to it by its address (`server.urls`).

It is started exactly as an extraction would, and what an extraction must know of it lies beside its states: FOLDER of
`extract.spool` gets held.json. A trillion parameters are loaded once then, for as many extractions as come, one at a
time.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from extract.config import Server
from extract.engines.servers import new_prefix, told_spool
from extract.engines.sglang_command import data_parallel_groups, installed_sglang
from extract.engines.sglang_server import SglangServer, open_sglang
from extract.numbering import sglang_layer_ids
from extract.verifier import VerifierSpec

RECORD = "held.json"
LOOK_EVERY_S = 0.5


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Held:
    """What is known of a server that is held for capture."""

    url: str
    name: str
    """What it calls the model: nobody else's server answers to it."""
    version: str
    """Of SGLang."""
    verifier: str
    sha256: str
    """Of the verifier."""
    model_path: str
    dtype: str
    layers: list[int]
    layer_ids: list[int]
    prefix: str
    """Of the requests whose states it hands over."""
    groups: int
    ranks: int
    budget_bytes: int
    log_file: str


class Holding:
    """A server that is being held: `held` is what is known of it, `folder` where its states come."""

    def __init__(self, held: Held, server: SglangServer, folder: Path) -> None:
        self.held, self.folder, self._server = held, folder, server

    @property
    def url(self) -> str:
        """What `server.urls` of an extraction names."""
        return self.held.url

    def wait(self) -> None:
        """Until the server ends by itself, which raises ServerDied with the end of its log."""
        while True:
            self._server.alive()
            time.sleep(LOOK_EVERY_S)


@contextmanager
def hold_capture_server(
    spec: VerifierSpec, server: Server, *, capture_layers: Sequence[int], dtype: str, env: Mapping[str, str],
    log_dir: Path,
) -> Iterator[Holding]:  # fmt: skip
    """Starts a capture server and waits until it is ready; at the end of the block it has ended.

    Args:
        server: `server.replicas` and `server.urls` have no part in this: it is one server.
        dtype: of the verifier's weights, bfloat16 or float32.
        env: variables of its processes, under `server.env`.
        log_dir: gets server.log and command.txt.

    Raises:
        ValueError, ServerError: see `open_sglang`; this SGLang cannot name these layers.
    """
    _, version = installed_sglang(server)
    prefix = new_prefix()
    with (
        told_spool(spec, server, version=version, layers=capture_layers, prefix=prefix) as spool,
        open_sglang(
            server, spec, "capture", dtype=dtype, env=env, log_dir=log_dir, spool=spool, wanted=lambda: True
        ) as opened,
    ):
        groups, ranks = data_parallel_groups(server)
        held = Held(
            url=opened.url, name=opened.name, version=version, verifier=spec.name, sha256=spec.sha256,
            model_path=str(spec.path), dtype=dtype, layers=list(capture_layers),
            layer_ids=sglang_layer_ids(spec.model_type, version, capture_layers), prefix=prefix, groups=groups,
            ranks=ranks, budget_bytes=spool.budget_bytes, log_file=str((log_dir / "server.log").absolute()),
        )  # fmt: skip
        record = spool.folder / RECORD
        record.with_suffix(".tmp").write_text(json.dumps(asdict(held)))
        record.with_suffix(".tmp").replace(record)
        yield Holding(held, opened, spool.folder)
