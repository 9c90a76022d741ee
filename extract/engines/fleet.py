"""All SGLang servers of an extraction, as `server.replicas` or `server.urls` say; opened when needed."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from extract.config import Server
from extract.engines.attached import AttachedServer, check_held, find_held
from extract.engines.base import Engine
from extract.engines.devices import replicas_of
from extract.engines.replicas import Replicas
from extract.engines.servers import OwnServers
from extract.engines.sglang import SglangEngine
from extract.engines.sglang_command import installed_sglang
from extract.engines.sglang_server import command_lines
from extract.numbering import sglang_layer_ids
from extract.verifier import VerifierSpec


@dataclass(frozen=True)
class Fleet:
    """What is known before any of it runs."""

    start: Callable[[], Engine]
    version: str
    """Of SGLang."""
    ahead: int
    """Batches to hand over at once."""
    commands: tuple[str, ...]
    """That will be run; none for servers that run already."""


def plan_fleet(
    spec: VerifierSpec, server: Server, *, capture_layers: Sequence[int], dtype: str, env: Mapping[str, str],
    log_dir: Path,
) -> Fleet:  # fmt: skip
    """Checks whatever can be checked before a server is started or asked.

    Raises:
        ValueError: with the key and the remedy.
    """
    plan = _attached if server.urls else _own
    return plan(spec, server, capture_layers=capture_layers, dtype=dtype, env=env, log_dir=log_dir)


def _own(
    spec: VerifierSpec, server: Server, *, capture_layers: Sequence[int], dtype: str, env: Mapping[str, str],
    log_dir: Path,
) -> Fleet:  # fmt: skip
    _, version = installed_sglang(server)
    sglang_layer_ids(spec.model_type, version, capture_layers)  # raises before anything is generated
    every = replicas_of(server, env)

    def start() -> Engine:
        engines = []
        for number, one in enumerate(every):
            folder = log_dir / f"replica_{number}" if len(every) > 1 else log_dir
            servers = OwnServers(
                f"replica {number}", spec, one, version=version, capture_layers=capture_layers, dtype=dtype, env=env,
                log_dir=folder,
            )  # fmt: skip
            engines.append(SglangEngine(spec, servers, capture_layers=capture_layers, dtype=getattr(torch, dtype)))
        return engines[0] if len(engines) == 1 else Replicas(engines)

    commands = tuple(line for one in every for line in command_lines(spec, one, dtype, env))
    return Fleet(start, version, SglangEngine.ahead * len(every), commands)


def _attached(
    spec: VerifierSpec, server: Server, *, capture_layers: Sequence[int], dtype: str, env: Mapping[str, str],
    log_dir: Path,
) -> Fleet:  # fmt: skip
    assert server.capture is not None, "checked by Server"
    every = [find_held(url, Path(server.capture.spool)) for url in server.urls]
    for held, _ in every:
        check_held(held, spec, capture_layers=capture_layers, dtype=dtype)
    versions = sorted({held.version for held, _ in every})
    if len(versions) > 1:
        raise ValueError(f"server.urls={server.urls} are of SGLang {' and '.join(versions)}; name servers of one")

    def start() -> Engine:
        with ExitStack() as undo:
            engines = []
            for held, folder in every:
                servers = AttachedServer(held, folder, server)
                undo.callback(servers.close)
                engines.append(SglangEngine(spec, servers, capture_layers=capture_layers, dtype=getattr(torch, dtype)))
            undo.pop_all()
        return engines[0] if len(engines) == 1 else Replicas(engines)

    return Fleet(start, versions[0], SglangEngine.ahead * len(every), ())
