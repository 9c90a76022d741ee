"""What a server is started for: to be measured, or to be there until Ctrl-C."""

import contextlib
import platform
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.config import Config
from eagle3.export.directory import find_drafter
from eagle3.runlog import RunLog, SilentRunLog
from eagle3.serving.benchmark import Benchmark, rounds_of
from eagle3.serving.capture import capture_line, hold_for_extractions
from eagle3.serving.dialects import Dialect, Sglang, Vllm
from eagle3.serving.figures import Measured, Rows
from eagle3.serving.lines import Line, line_of
from eagle3.serving.load import Load
from eagle3.serving.prompts import Prompts
from eagle3.serving.report import show_foreground
from eagle3.serving.started import started, url_of
from extract.config import Server, on_hardware
from extract.job import open_verifier
from extract.launcher import free_port
from extract.progress import Progress, shown_path
from extract.prompts import source_sha256
from extract.store_tensors import sha256_of
from extract.verifier import VerifierSpec

LOOK_EVERY_S = 1.0


@dataclass(frozen=True)
class Planned:
    """A server that can be started: all that could be checked before is."""

    config: Config
    server: Server
    """With the flags of its hardware."""
    spec: VerifierSpec
    drafter: Path | None
    line: Line

    def inputs(self) -> dict[str, str]:
        """Fingerprints of what the figures depend on, beside the settings."""
        told = {
            "verifier": self.spec.sha256, "chat template": self.spec.chat_template_sha256,
            "prompts": source_sha256(self.config.serving.prompts), "host": platform.node(),
            "engine": f"{self.line.engine} {self.line.version or ''}".strip(),
            "environment": str(Path(self.line.command[0]).parent.parent.resolve()),  # another one, another engine
        }  # fmt: skip
        if self.drafter is not None:
            told["drafter"] = sha256_of(self.drafter / "model.safetensors")
            told["drafter config"] = sha256_of(self.drafter / "config.json")
        return told


def plan(config: Config) -> Planned:
    """Verifier, drafter, interpreter and flags, all checked before anything starts.

    Raises:
        ValueError: naming key, file or flag, and the remedy.
    """
    if config.server.engine == "inprocess":
        raise ValueError("server.engine=inprocess is no server; use server=sglang or server=vllm")
    if config.server.urls or config.server.replicas > 1:
        raise ValueError("server.urls and server.replicas are for extract.py; serve.py starts one server of its own")
    spec = open_verifier(config.verifier, Path(config.cache_dir))
    server = on_hardware(config.server, config.hardware)
    if config.serving.mode == "capture":
        line = capture_line(server, spec, dtype=config.verifier.dtype, env=config.hardware.env)
        return Planned(config, server, spec, None, line)
    drafter = find_drafter(Path(config.drafter_dir)).resolve() if config.drafter_dir else None
    name, host, port = spec.name, config.serving.host, config.serving.port
    if config.serving.mode == "benchmark":  # a name to which no other server answers, and a port that is free
        name, host, port = f"{spec.name}-{secrets.token_hex(4)}", "127.0.0.1", free_port()
    line = line_of(server, spec, drafter, dtype=config.verifier.dtype, env=config.hardware.env,
                   name=name, host=host, port=port)  # fmt: skip
    return Planned(config, server, spec, drafter, line)


def measure(planned: Planned, prompts: Prompts, log_dir: Path, runlog: RunLog | SilentRunLog) -> Measured:
    """Starts the server, measures it and stops it; see `Benchmark.measure`."""
    line, server = planned.line, planned.server
    assert server.request_timeout_s, "checked by Server"
    wanted = planned.config.serving
    rows = Rows(runlog, repeats=wanted.repeats, concurrencies=len(wanted.concurrencies))
    began = time.perf_counter()
    with started(line, server, log_dir) as process:
        start_s = time.perf_counter() - began
        with (
            Load(url_of(line), dialect_of(line), server.request_timeout_s, process) as load,
            Progress("benchmark", rounds_of(wanted), unit="rounds") as progress,
        ):
            drafts = planned.drafter is not None
            return Benchmark(load, prompts, wanted, rows, drafts, progress.advance).measure(start_s)


def hold(planned: Planned, log_dir: Path) -> None:
    """The server in the foreground, until Ctrl-C.

    Raises:
        ValueError: somebody listens on its port.
        ServerDied: it has ended by itself; the end of its log is in the message.
    """
    line = planned.line
    require_free(line.host, line.port)
    with started(line, planned.server, log_dir) as process, contextlib.suppress(KeyboardInterrupt):
        show_foreground(line, shown_path(log_dir / "server.log"))
        while (died := process.death(LOOK_EVERY_S)) is None:
            pass
        raise died


def hold_for_capture(planned: Planned, log_dir: Path) -> None:
    """See `hold_for_extractions`."""
    verifier = planned.config.verifier
    hold_for_extractions(
        planned.server, planned.spec, log_dir, capture_layers=verifier.capture_layers, dtype=verifier.dtype,
        env=planned.config.hardware.env,
    )  # fmt: skip


HELD: dict[str, Callable[[Planned, Path], None]] = {"foreground": hold, "capture": hold_for_capture}
"""What a server that is not measured is started for, by `serving.mode`."""


def require_free(host: str, port: int) -> None:
    """ValueError if somebody listens there: an engine would take another port, or its clients would talk to others."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what a former server left is no listener
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ValueError(
                f"serving.host={host} serving.port={port} cannot be had ({error.strerror}); choose another port"
            ) from error


def dialect_of(line: Line) -> Dialect:
    return Sglang() if line.engine == "sglang" else Vllm(line.name)


def summary_of(planned: Planned, measured: Measured, tracked: str | None) -> Mapping[str, Any]:
    """Figures of summary.json."""
    line, version = planned.line, planned.line.version
    return measured.summary() | {
        "engine": f"{line.engine} {version}" if version else line.engine, "verifier": planned.spec.name,
        "drafter_dir": planned.config.drafter_dir, "command": line.text, "tracked": tracked,
    }  # fmt: skip
