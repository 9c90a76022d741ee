"""SGLang as a judge of a drafter: a server without it and one with it, each asked one prompt at a time.

The counts are those that SGLang makes for each request. In the server with the drafter a plugin looks on
(`extract.plugin`): the layers that SGLang gives the drafter must be those that it was trained on, or the server ends.
"""

import secrets
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from packaging.version import Version

from eagle3.export.directory import read_shape
from eagle3.gate import counts_of
from eagle3.serving.lines import Line, line_of
from eagle3.serving.started import started, url_of
from extract.config import Server, Speculation
from extract.engines.base import Completion, Counters
from extract.engines.sglang_answers import read_answer, read_verifications
from extract.engines.sglang_command import PLUGINS_SINCE, data_parallel_groups
from extract.engines.sglang_server import SglangServer, server_environment
from extract.launcher import ServerError, free_port
from extract.local_http import client_options
from extract.spool import Spool
from extract.verifier import VerifierSpec

HOST = "127.0.0.1"


@dataclass(frozen=True)
class SglangJudges:
    """Both lives of the engine, checked before either starts: see `sglang_judges`."""

    server: Server
    spec: VerifierSpec
    drafter: Path
    drafts: int
    dtype: str
    env: Mapping[str, str]
    """The hardware's; server.env counts more."""

    def line(self, with_drafter: bool) -> Line:
        """How a server is started, on a port that is free now; ValueError as `line_of`."""
        drafter, port = self.drafter if with_drafter else None, free_port()
        name = f"{self.spec.name}-{secrets.token_hex(4)}"
        return line_of(self.server, self.spec, drafter, dtype=self.dtype, env=self.env, name=name, host=HOST, port=port)

    @contextmanager
    def started(self, with_drafter: bool, log_dir: Path) -> Iterator["SglangJudge"]:
        """A server that is ready; it is gone at the end of the block.

        Raises:
            ServerError: it did not start, is not as it was asked to be, or gives the drafter other layers; the end of
                its log is in the message.
        """
        assert self.server.capture and self.server.request_timeout_s, "checked by Server"
        line, spool, scratch = self.line(with_drafter), None, None
        with ExitStack() as stack:
            if with_drafter:
                spool = stack.enter_context(Spool(Path(self.server.capture.spool), budget_bytes=0))
                spool.tell(layers=read_shape(self.drafter).capture_layers, layer_ids=None, prefix="", groups=1)
                scratch = spool.folder
            line = replace(line, env=server_environment(self.server, self.env, spool))
            process = stack.enter_context(started(line, self.server, log_dir, scratch=scratch))
            client = stack.enter_context(httpx.Client(**client_options(url_of(line), self.server.request_timeout_s)))
            running = stack.enter_context(SglangServer(process, client, name=line.name))
            info = running.info = running.ask("GET", "/server_info")
            faults = _misrun(info, line, self.drafts if with_drafter else None)
            if spool is not None:
                faults += _unwatched(spool.ready(), data_parallel_groups(self.server)[1])
            if faults:
                raise ServerError(process.told("; ".join(faults)))
            yield SglangJudge(running, self.spec.vocab_size, self.drafts if with_drafter else None)


def sglang_judges(
    server: Server, spec: VerifierSpec, drafter: Path, drafts: int, *, dtype: str, env: Mapping[str, str]
) -> SglangJudges:
    """Servers that draft a chain of `drafts` tokens, whatever server.speculation says of the number.

    Args:
        server: with the flags of its hardware.
        drafter: a drafter directory.

    Raises:
        ValueError: this SGLang would misread the drafter, is too old, or the settings ask for what cannot be judged.
    """
    if server.urls or server.replicas > 1:
        raise ValueError("server.urls and server.replicas are for extract.py; evaluate.py starts servers of its own")
    if server.speculation is None or server.speculation.topk > 1:
        raise ValueError(
            f"server.speculation={server.speculation} is no chain of drafts, and only chains can be compared with "
            "training; use server.speculation.topk=1"
        )
    flags = server.flags | {"skip_tokenizer_init": True}  # token ids go in and come out
    alone = replace(server, flags=flags, speculation=Speculation(steps=drafts, topk=1, draft_tokens=None))
    judges = SglangJudges(alone, spec, drafter, drafts, dtype, env)
    version = judges.line(with_drafter=True).version
    if version is not None and Version(version) < PLUGINS_SINCE:
        raise ValueError(
            f"server.python={server.python}: SGLang {version} takes no plugins, so the layers that it gives a drafter "
            f"cannot be checked; use {PLUGINS_SINCE} or later"
        )
    return judges


class SglangJudge:
    """A running server; see `eagle3.served.Server`."""

    def __init__(self, server: SglangServer, vocab_size: int, drafts: int | None) -> None:
        self._server, self._vocab_size, self._drafts = server, vocab_size, drafts
        self._accepted: list[int] = []

    @property
    def version(self) -> str:
        """SGLang's own, e.g. 0.5.16."""
        return self._server.info["version"]

    def complete(self, ids: Sequence[int], *, max_new_tokens: int, stop_ids: Collection[int]) -> Completion:
        """The greedy answer. ServerError if it is not what was asked for, or its counts do not fit it.

        `stop_ids` must hold the model's own end tokens, at which SGLang ends an answer anyway.
        """
        if not ids or min(ids) < 0 or max(ids) >= self._vocab_size:  # such an id would kill the server
            raise ValueError(f"a prompt is empty or holds ids outside 0 .. {self._vocab_size - 1}: {list(ids)[:8]}...")
        sampling = {"max_new_tokens": max_new_tokens, "temperature": 0, "stop_token_ids": sorted(stop_ids)}
        body = {"input_ids": list(ids), "rid": f"judge-{secrets.token_hex(8)}", "sampling_params": sampling}
        began = time.monotonic()
        said = self._server.ask("POST", "/generate", body)
        seconds = time.monotonic() - began
        answer = read_answer(said, max_new_tokens, stop_ids, self._vocab_size)
        accepted = read_verifications(said, len(answer.ids), self._drafts)
        self._accepted += accepted
        drafted = (self._drafts or 0,) * len(accepted)
        return Completion(tuple(answer.ids), answer.finish_reason, accepted, drafted, seconds)

    def counters(self) -> Counters:
        """Sums of what the answers said: SGLang keeps no totals of its own that could be read exactly."""
        assert self._drafts is not None, "only a server with a drafter counts"
        counts = counts_of(self._accepted, self._drafts)
        verified = counts.verifications
        return Counters(verified, self._drafts * verified, sum(counts.accepted), counts.accepted)


def _misrun(info: Mapping[str, Any], line: Line, drafts: int | None) -> list[str]:
    """What /server_info says otherwise than it was told; a key that a version lacks is not looked at."""
    wanted: dict[str, Any] = {"version": line.version, "speculative_algorithm": None if drafts is None else "EAGLE3"}
    if drafts is not None:
        wanted |= {"speculative_num_steps": drafts, "speculative_eagle_topk": 1,
                   "speculative_num_draft_tokens": drafts + 1, "speculative_adaptive": False}  # fmt: skip
    wrong = [key for key, right in wanted.items() if key in info and info[key] != right]
    return [f"SGLang was to run with {key} {wanted[key]} and says {info[key]}; look at server.flags" for key in wrong]


def _unwatched(ready: Sequence[Mapping[str, Any]], ranks: int) -> list[str]:
    if len(ready) == ranks:
        return []
    return [
        f"{len(ready)} of {ranks} ranks have said which layers they give the drafter: SGLang has not loaded the plugin "
        "eagle3_capture, or does not read the verifier's states"
    ]
