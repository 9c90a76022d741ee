"""How SGLang is started: for answers as fast as it can, for capture without whatever would spoil the states.

A flag that would make states wrong or incomplete is set by this program or refused, never passed on.
"""

import json
import logging
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from packaging.version import Version

from extract.config import Server
from extract.launcher import child_environment
from extract.spool import FALLBACK
from extract.verifier import VerifierSpec

log = logging.getLogger(__name__)

Life = Literal["respond", "capture"]
"""The two servers of an extraction, one after the other."""

MODULE = "sglang.launch_server"
REMEDY = "`make sglang-env` makes one for a CPU; for a GPU, install sglang into an environment of its own"
PLUGINS_SINCE = Version("0.5.12")
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "SGLANG_PLUGINS": "eagle3_capture"}
CAPTURE_FLAGS: dict[str, Any] = {
    "disable-radix-cache": True,  # of a prompt whose beginning is cached, only the rest would be computed
    "disable-cuda-graph": True,  # a replayed graph runs no Python, and so no hook
}
RESERVED = {
    "model", "model-path", "tokenizer-path", "served-model-name", "host", "port", "dtype", "trust-remote-code",
    "revision", "random-seed", "skip-tokenizer-init", "forward-hooks", "config",
}  # fmt: skip
SPOILS = {
    "enable-two-batch-overlap": "its layers skip the capture",
    "enable-attn-tp-input-scattered": "it scatters the rows of a prefill over ranks",
    "enable-layernorm-sp": "it scatters the rows of a prefill over ranks",
    "pp-size": "captured layers would lie on other ranks than the last",
    "pipeline-parallel-size": "captured layers would lie on other ranks than the last",
    "attn-cp-size": "it scatters the rows of a prefill over ranks",
    "nnodes": "states come through memory of this machine",
    "enable-return-hidden-states": "it sends states as text, several times slower, and is not needed",
    "enable-return-aux-hidden-states": "it captures layers by its own rules",
    "allow-auto-truncate": "it cuts prompts without a word",
    "preferred-sampling-params": "it changes how answers are sampled",
    "disaggregation-mode": "prefills would run in another process",
    "enable-lora": "states would be another model's",
}
"""Flags that are refused, and why."""
NEUTRAL = ("None", "False", "1", "null")
"""Values of them that change nothing, as text: True equals 1."""
WITHOUT_EFFECT = {"num-continuous-decode-steps": "SGLang has parsed it and done nothing with it since 0.5.10"}
UNKNOWN = re.compile(r"error: unrecognized arguments: (.*)")


def sglang_command(
    python: Path,
    spec: VerifierSpec,
    server: Server,
    life: Life,
    *,
    port: int | str,
    name: str,
    dtype: str,
    version: str,
) -> list[str]:
    """The command line of a server on 127.0.0.1.

    `server.flags`, and for capture `server.capture.flags` on top: some_key becomes --some-key; true is the bare flag,
    false and null leave it out, a list is several words, a dict JSON.

    Args:
        port: where it shall listen.
        name: what it calls the model; nobody else's server on that port answers to it.
        dtype: of the verifier's weights, bfloat16 or float32.
        version: of SGLang in that interpreter.

    Raises:
        ValueError: a flag is decided elsewhere, or would spoil the states.
    """
    assert server.capture is not None
    flags = server.flags | (server.capture.flags if life == "capture" else {})
    chosen = {dashed(key): value for key, value in flags.items()}
    check_flags(chosen)
    ours: dict[str, Any] = {
        "model-path": str(spec.path), "served-model-name": name, "host": "127.0.0.1", "port": port, "dtype": dtype,
        "random-seed": 0, "skip-tokenizer-init": True, "trust-remote-code": spec.trust_remote_code or None,
    }  # fmt: skip
    if life == "capture":
        ours |= CAPTURE_FLAGS
        if Version(version) < PLUGINS_SINCE:
            ours["forward-hooks"] = [json.dumps([FALLBACK])]
    words = [word for key, value in {**ours, **chosen}.items() for word in words_of(key, value)]
    return [str(python), "-m", MODULE, *words]


def check_flags(chosen: Mapping[str, Any]) -> None:
    """ValueError for a flag that is not for the user to choose; a warning for one that does nothing."""
    for key, value in chosen.items():
        if key in RESERVED:
            raise ValueError(f"server.flags.{key} is set by this program and cannot be chosen; leave it out")
        if key in CAPTURE_FLAGS and value is False:
            raise ValueError(f"server.flags.{key}=false: capture needs it, and answers do without; leave it out")
        if str(value) not in NEUTRAL and (key in SPOILS or key.startswith("speculative-")):
            why = SPOILS.get(key, "states of a server that also speculates are mixed up")
            raise ValueError(f"server.flags.{key}={value} would spoil the capture: {why}; leave it out")
        if key in WITHOUT_EFFECT:
            log.warning("server.flags.%s has no effect: %s", key, WITHOUT_EFFECT[key])


def data_parallel_groups(server: Server) -> tuple[int, int]:
    """Groups of data-parallel attention (1 without it), and how many ranks there are in all."""
    assert server.capture is not None
    flags = {dashed(key): value for key, value in (server.flags | server.capture.flags).items()}
    tensor = _first(flags, "tp-size", "tensor-parallel-size", "tp")
    data = _first(flags, "dp-size", "data-parallel-size", "dp")
    if (attention := _first(flags, "attn-dp-size")) > 1:
        return attention, tensor
    return (data, tensor) if flags.get("enable-dp-attention") else (1, tensor * data)


def installed_sglang(server: Server) -> tuple[Path, str]:
    """The absolute path of `server.python`, and the version of SGLang in it.

    Raises:
        ValueError: there is no such interpreter, or no SGLang in it.
    """
    assert server.python, "checked by Server"
    found = shutil.which(Path(server.python).expanduser())
    if found is None:
        raise ValueError(f"server.python={server.python}: there is no such interpreter; {REMEDY}")
    path = Path(found).absolute()  # not resolved: a link is what makes an environment's interpreter its own
    look = "import importlib.metadata as m; print(m.version('sglang'))"
    env = child_environment({key: str(value) for key, value in server.env.items()})
    done = subprocess.run([path, "-c", look], env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ValueError(f"server.python={server.python} has no SGLang; {REMEDY}\n{done.stderr}".rstrip())
    return path, done.stdout.strip()


def unknown_flags(log_tail: str) -> str | None:
    """The words that SGLang's parser has refused, out of the end of its log."""
    found = UNKNOWN.search(log_tail)
    return None if found is None else found.group(1)


def _first(flags: Mapping[str, Any], *keys: str) -> int:
    return next((int(flags[key]) for key in keys if flags.get(key) is not None), 1)


def dashed(key: str) -> str:
    """A key of the config as a flag, without the two dashes in front."""
    return key.replace("_", "-")


def words_of(key: str, value: Any) -> list[str]:
    """A flag on SGLang's command line: true is the bare flag, false and null leave it out."""
    if value is None or value is False:
        return []
    if value is True:
        return [f"--{key}"]
    if isinstance(value, list):
        return [f"--{key}", *map(str, value)]
    return [f"--{key}", json.dumps(value) if isinstance(value, dict) else str(value)]
