"""A server that is held for extractions, which attach to it by its address: `serving=capture`, then `server.urls`."""

import contextlib
from collections.abc import Mapping
from pathlib import Path

from eagle3.serving.lines import Line
from eagle3.serving.report import show_held
from extract.config import Server
from extract.engines.sglang_command import installed_sglang, sglang_command
from extract.engines.sglang_server import server_environment
from extract.engines.standby import hold_capture_server
from extract.layers import check_capture_layers, default_capture_layers
from extract.progress import shown_path
from extract.verifier import VerifierSpec


def capture_line(server: Server, spec: VerifierSpec, *, dtype: str, env: Mapping[str, str]) -> Line:
    """How it is started, but for port, name and the folder in memory.

    Raises:
        ValueError: the engine cannot capture, the interpreter is missing, or a flag would spoil states.
    """
    if server.engine != "sglang":
        raise ValueError(f"serving.mode=capture holds an SGLang server, not server.engine={server.engine}")
    python, version = installed_sglang(server)
    command = sglang_command(python, spec, server, "capture", port="PORT", name=spec.name, dtype=dtype, version=version)
    told = server_environment(server, env, None)
    return Line("sglang", version, tuple(command), told, spec.name, "127.0.0.1", 0)


def hold_for_extractions(
    server: Server, spec: VerifierSpec, log_dir: Path, *, capture_layers: list[int] | None, dtype: str,
    env: Mapping[str, str],
) -> None:  # fmt: skip
    """Until Ctrl-C; ServerDied if it ends by itself, with the end of its log."""
    layers = check_capture_layers(capture_layers or default_capture_layers(spec.num_layers), spec.num_layers)
    with (
        contextlib.suppress(KeyboardInterrupt),
        hold_capture_server(spec, server, capture_layers=layers, dtype=dtype, env=env, log_dir=log_dir) as holding,
    ):
        show_held(holding.url, layers, shown_path(log_dir / "server.log"))
        holding.wait()
