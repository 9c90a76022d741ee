"""The command line and the environment of a server for others, as it will be started or can be pasted."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.export.check import check
from extract.config import Server, Speculation
from extract.engines import vllm
from extract.engines.sglang_command import MODULE, RESERVED, dashed, installed_sglang, words_of
from extract.engines.vllm import installed_vllm, vllm_command
from extract.launcher import ALWAYS
from extract.verifier import VerifierSpec

ENVIRONMENTS = {"sglang": {"HF_HUB_OFFLINE": "1"}, "vllm": vllm.ENVIRONMENT}
OURS = RESERVED - {"skip-tokenizer-init"} | {
    "speculative-algorithm", "speculative-draft-model-path", "speculative-draft-model", "speculative-num-steps",
    "speculative-eagle-topk", "speculative-num-draft-tokens",
}  # fmt: skip
"""SGLang's flags that this program sets."""


@dataclass(frozen=True)
class Line:
    """A server that is to be started."""

    engine: str
    version: str | None
    """The engine's own, where its interpreter was asked for it."""
    command: tuple[str, ...]
    env: Mapping[str, str]
    """On top of the environment that it inherits."""
    name: str
    """What it calls the model."""
    host: str
    port: int

    @property
    def text(self) -> str:
        """One line for a shell."""
        variables = (f"{key}={value}" for key, value in {**ALWAYS, **self.env}.items())
        return shlex.join(["env", *variables, *self.command])


def line_of(
    server: Server, spec: VerifierSpec, drafter: Path | None, *, dtype: str, env: Mapping[str, str], name: str,
    host: str, port: int,
) -> Line:  # fmt: skip
    """How the server is started.

    Args:
        server: with the flags of its hardware, see `extract.config.on_hardware`.
        drafter: a drafter directory, or None.
        env: the hardware's; server.env counts more.
        name: what it shall call the model.

    Raises:
        ValueError: the interpreter is missing or lacks the engine, the engine would misread the drafter, there is no
            word on how to draft, or a flag is decided elsewhere.
    """
    assert server.python, "checked by Server"
    told = ENVIRONMENTS[server.engine] | dict(env) | {key: str(value) for key, value in server.env.items()}
    if server.engine == "sglang":
        python, version = installed_sglang(server)
        how = _speculation(server, spec, drafter, version)
        command = sglang_line(python, spec, server.flags, drafter, how, name=name, host=host, port=port, dtype=dtype)
        return Line("sglang", version, tuple(command), told, name, host, port)
    python = installed_vllm(server.python, told)
    how = _speculation(server, spec, drafter, None)
    command = vllm_command(python, spec, port, server.flags, name=name, dtype=dtype, host=host,
                           drafter=drafter, drafts=None if how is None else how.steps)  # fmt: skip
    return Line("vllm", None, tuple(command), told, name, host, port)


def sglang_line(
    python: Path, spec: VerifierSpec, flags: Mapping[str, Any], drafter: Path | None, how: Speculation | None, *,
    name: str, host: str, port: int, dtype: str,
) -> list[str]:  # fmt: skip
    """SGLang's command line. ValueError for a flag that this program sets, or that needs a drafter."""
    chosen = {dashed(key): value for key, value in flags.items()}
    for key in chosen:
        if key in OURS:
            remedy = "set server.speculation" if key.startswith("speculative") else "leave it out"
            raise ValueError(f"server.flags.{key} is set by this program and cannot be chosen; {remedy}")
        if key.startswith("speculative-") and drafter is None:
            raise ValueError(
                f"server.flags.{key} is of no use without a drafter; give drafter_dir=DIR, or leave it out"
            )
    ours: dict[str, Any] = {
        "model-path": str(spec.path), "served-model-name": name, "host": host, "port": port, "dtype": dtype,
        "trust-remote-code": spec.trust_remote_code or None,
    }  # fmt: skip
    if drafter is not None and how is not None:
        ours |= {
            "speculative-algorithm": "EAGLE3", "speculative-draft-model-path": str(drafter.absolute()),
            # All three: where one is left out, SGLang wants all of them left out.
            "speculative-num-steps": how.steps, "speculative-eagle-topk": how.topk,
            "speculative-num-draft-tokens": how.verified,
        }  # fmt: skip
    words = [word for key, value in {**ours, **chosen}.items() for word in words_of(key, value)]
    return [str(python), "-m", MODULE, *words]


def _speculation(server: Server, spec: VerifierSpec, drafter: Path | None, version: str | None) -> Speculation | None:
    """How to draft, after the drafter has been held against the engine's loader; None without a drafter."""
    if drafter is None:
        return None
    if server.speculation is None:
        raise ValueError(f"drafter_dir={drafter} needs server.speculation: steps, topk and draft_tokens")
    if faults := check(drafter, server.engine, version, spec):
        raise ValueError("\n  ".join([f"{drafter} cannot be served by {server.engine}:", *map(str, faults)]))
    return server.speculation
