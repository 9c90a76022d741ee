"""SGLang as an engine, stock and unpatched: answers from one server, then states from another, one after the other.

Answers want prefix cache and CUDA graphs, which spoil states; so each has a server of its own, started when it is first
needed. A server that dies or hangs is started again a few times: a request that does it every time is given up.
"""

import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from extract.config import Server
from extract.engines.base import Captured, EngineError, EngineGone, Generated, SomeFailed
from extract.engines.sglang_answers import read_answer, read_logprobs
from extract.engines.sglang_command import Life, data_parallel_groups
from extract.engines.sglang_server import SglangServer, open_sglang
from extract.launcher import ServerDied, ServerError, ServerHung
from extract.numbering import sglang_layer_ids
from extract.probe import Probe, Told, probe
from extract.spool import Budget, Spool, Width
from extract.verifier import VerifierSpec, load_head

log = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")

RESTARTS = 5
"""Servers that are started in place of such as died or hung, in one extraction."""
SHARE_OF_SPOOL = 0.9
"""Of the bytes that files may take: what lies there unread may never make the server wait for ever."""
PROBE_TOKENS = 512
"""Of the prompt that is probed before the bulk, at least."""


class SglangEngine:
    """See `extract.engines.base.Engine`. Requests of one batch run side by side; several batches may.

    Attributes:
        probes: figures of the probes, by name.
        restarts: servers started again so far.
    """

    name = "sglang"
    ahead = 2
    """Batches to hand over at once, so that the server never runs dry between two."""

    def __init__(
        self, spec: VerifierSpec, server: Server, *, version: str, capture_layers: Sequence[int], dtype: torch.dtype,
        env: Mapping[str, str], log_dir: Path,
    ) -> None:  # fmt: skip
        assert server.capture is not None, "checked by Server"
        self.spec, self.server, self.version, self.dtype = spec, server, version, dtype
        self.capture_layers = list(capture_layers)
        self.layer_ids = sglang_layer_ids(spec.model_type, version, capture_layers)
        self.probes: dict[str, Any] = {}
        self.restarts = 0
        self._env, self._log_dir = env, log_dir
        self._prefix, self._numbers = f"hs-{secrets.token_hex(4)}-", itertools.count()
        self._width = Width((len(self.capture_layers) + 1) * spec.hidden_size, dtype)
        self._pool = ThreadPoolExecutor(server.capture.concurrency, thread_name_prefix="sglang")
        self._budget = Budget(int(SHARE_OF_SPOOL * (server.capture.spool_mib << 20)))
        self._running: tuple[Life, SglangServer, Spool | None] | None = None
        self._starting = threading.Lock()
        self._probed: Sequence[int] | None = None
        self._closed = False

    def capture(self, batch: Sequence[Sequence[int]]) -> list[Captured]:
        """One request a sequence; see `Engine.capture`. The first call starts the server and probes it.

        Raises:
            ValueError: ids or lengths that the verifier or the server cannot take; nothing is sent then.
            EngineError: states are missing, not those of the sequence, or not finite.
        """
        if not batch:
            return []
        self._check_ids(batch)
        self._serve("capture", batch)
        return self._side_by_side(self._states_of, batch)

    def generate(
        self,
        batch: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        seed: int,
        stop_ids: Collection[int],
    ) -> list[Generated]:
        """One request a prompt; see `Engine.generate`.

        The same seed draws the same answers only with server.flags.enable_deterministic_inference.
        """
        if not batch:
            return []
        self._check_ids(batch)
        self._serve("respond", batch)
        greedy = {"max_new_tokens": max_new_tokens, "temperature": temperature, "stop_token_ids": sorted(stop_ids)}

        def answer(place: int) -> Generated:
            drawn = {"top_p": top_p, "sampling_seed": (seed + place) % (1 << 31)} if temperature > 0 else {}
            said = self._generate(batch[place], {**greedy, **drawn})
            return read_answer(said, max_new_tokens, stop_ids, self.spec.vocab_size)

        return self._side_by_side(answer, range(len(batch)))

    def recheck(self, stored: Sequence[tuple[Sequence[int], Captured]], dtype: torch.dtype) -> dict[str, Any]:
        """Extracts sequences again, each alone, and holds them against what was stored in `dtype`.

        Returns the figures of all probes for the manifest; EngineError if a difference is above its tolerance.
        """
        self._serve("capture", [ids for ids, _ in stored])
        again = [(states, *self._states_and_logprobs(ids)) for ids, states in stored]
        coarser = max(dtype, self.dtype, key=lambda d: torch.finfo(d).eps)
        # What was stored is what gets trained on, so its log-probabilities are the ones to be rebuilt.
        self._note("stored", [(a, b) for a, b, _ in again], [told for *_, told in again], coarser)
        return self.probes | {"restarts": self.restarts}

    def close(self) -> None:
        """Ends the server that runs or starts, and all requests with it; its folder in memory is gone too."""
        self._closed = True
        self._stop()
        self._pool.shutdown(cancel_futures=True)

    def _now(self) -> tuple[SglangServer, Spool | None]:
        """What runs at this moment; another batch may be about to start it again."""
        running = self._running
        if running is None:
            raise ServerError("the server is being started again")
        return running[1:]

    def _stop(self) -> None:
        if self._running is not None:
            _, server, spool = self._running
            self._running = None
            server.close()
            if spool is not None:
                spool.close()

    def _serve(self, life: Life, batch: Sequence[Sequence[int]]) -> None:
        """The server of this life runs, and takes sequences of these lengths."""
        with self._starting:
            if self._closed:
                raise EngineGone("the engine is closed, or could not be started")
            if self._running is None or self._running[0] != life or self._died():
                self._stop()
                try:
                    self._start(life, batch)
                except EngineError as error:
                    self._closed = True  # batches that wait here must not try it again
                    self._stop()
                    raise EngineGone(str(error)) from error
        self._check_lengths(batch)

    def _died(self) -> bool:
        """Whether the server that runs has ended or hangs; EngineGone if that has happened too often."""
        assert self._running is not None
        try:
            self._running[1].alive()
        except (ServerDied, ServerHung) as error:
            if self.restarts >= RESTARTS:
                raise EngineGone(f"{self.restarts} servers were started in place of others; {error}") from error
            self.restarts += 1
            log.warning("started again (%d of at most %d times): %s", self.restarts, RESTARTS, error)
            return True
        return False

    def _start(self, life: Life, batch: Sequence[Sequence[int]]) -> None:
        spool = self._told_spool() if life == "capture" else None
        try:
            server = open_sglang(
                self.server, self.spec, life, dtype=str(self.dtype).removeprefix("torch."), env=self._env,
                log_dir=self._log_dir / life, spool=spool, wanted=lambda: not self._closed,
            )  # fmt: skip
        except BaseException:
            if spool is not None:
                spool.close()
            raise
        self._running = life, server, spool
        if spool is not None:
            # Always the same text: after a death it must not be the one that killed the server.
            self._probed = self._probed or max(batch, key=len)
            self._probe_start(self._probed)

    def _told_spool(self) -> Spool:
        assert self.server.capture is not None
        spool = Spool(Path(self.server.capture.spool), budget_bytes=self.server.capture.spool_mib << 20)
        groups, _ = data_parallel_groups(self.server)
        spool.tell(layers=self.capture_layers, layer_ids=self.layer_ids, prefix=self._prefix, groups=groups)
        return spool

    def _side_by_side(self, one: Callable[[Item], Result], batch: Sequence[Item]) -> list[Result]:
        """Results in order, after all requests have ended, so that none outlives its batch; SomeFailed for errors."""
        futures = [self._pool.submit(one, item) for item in batch]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in errors:
            if isinstance(error, EngineGone) or not isinstance(error, EngineError):
                raise error
        if errors:
            raise SomeFailed([future.exception() or future.result() for future in futures])
        return [future.result() for future in futures]

    def _states_of(self, ids: Sequence[int]) -> Captured:
        return self._captured(ids, {})[0]

    def _states_and_logprobs(self, ids: Sequence[int]) -> tuple[Captured, Told]:
        states, answer = self._captured(ids, {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1})
        return states, read_logprobs(answer, len(ids))

    def _captured(self, ids: Sequence[int], options: Mapping[str, Any]) -> tuple[Captured, dict[str, Any]]:
        """States of one sequence, and the answer that came with them."""
        server, spool = self._now()
        assert spool is not None
        rid = f"{self._prefix}{next(self._numbers)}"
        with self._budget.of(self._width.bytes_of(len(ids))):
            spool.sweep()
            began = time.monotonic()
            try:
                answer = server.ask("POST", "/generate", {
                    "input_ids": list(ids), "rid": rid, "sampling_params": {"max_new_tokens": 0, "temperature": 0},
                    **options,
                })  # fmt: skip
                pieces = spool.take(rid, ids, width=self._width.numbers, began=began, check=server.alive)
                states = self._split(pieces)
            except BaseException:
                server.abort(rid)
                spool.discard(rid)
                raise
        return states, answer

    def _split(self, pieces: Sequence[Float[Tensor, "n W"]]) -> Captured:
        """The one copy that is made of states on this side, in the thread of their request."""
        if pieces[0].dtype != self.dtype:
            raise EngineError(f"SGLang hands over {pieces[0].dtype}, and the verifier is in {self.dtype}")
        middle = len(self.capture_layers) * self.spec.hidden_size
        states = Captured(torch.cat([p[:, :middle] for p in pieces]), torch.cat([p[:, middle:] for p in pieces]))
        for name, rows in (("aux", states.aux), ("last", states.last)):
            low, high = rows.aminmax()
            if not (low.isfinite() and high.isfinite()):
                row = int((~rows.isfinite()).any(dim=1).nonzero()[0])
                raise EngineError(f"hidden states hold NaN or inf in {name} at token {row}")
        return states

    def _generate(self, ids: Sequence[int], sampling: Mapping[str, Any]) -> dict[str, Any]:
        rid = f"{self._prefix}{next(self._numbers)}"
        return self._now()[0].ask(
            "POST", "/generate", {"input_ids": list(ids), "rid": rid, "sampling_params": dict(sampling)}
        )

    def _probe_start(self, longest: Sequence[int]) -> None:
        """Before the bulk: one prompt of more than two cache pages, sent twice, is there twice and true."""
        server, _ = self._now()
        wanted = min(max(PROBE_TOKENS, 2 * server.page_size + 1), server.max_input)
        ids = (list(longest) * (wanted // len(longest) + 1))[:wanted]
        first, _ = self._captured(ids, {})
        second, told = self._states_and_logprobs(ids)
        self._note("start", [(first, second)], [told], self.dtype)

    def _note(
        self, name: str, pairs: Sequence[tuple[Captured, Captured]], told: Sequence[Told], dtype: torch.dtype
    ) -> None:
        found: Probe = probe(pairs, told, load_head(self.spec), dtype)
        self.probes[name] = found.values()
        log.info("probe %s: %s", name, found)

    def _check_ids(self, batch: Sequence[Sequence[int]]) -> None:
        """ValueError for ids outside the vocabulary: one such id kills the whole server (sgl-project/sglang#31908)."""
        for index, ids in enumerate(batch):
            if not ids or min(ids) < 0 or max(ids) >= self.spec.vocab_size:
                raise ValueError(
                    f"sequence {index} of the batch is empty or holds ids outside 0 .. {self.spec.vocab_size - 1}, "
                    f"the vocabulary of {self.spec.path}: {list(ids)[:8]}..."
                )

    def _check_lengths(self, batch: Sequence[Sequence[int]]) -> None:
        most = self._now()[0].max_input
        if (longest := max(map(len, batch))) > most:
            raise ValueError(
                f"a sequence of {longest} tokens is longer than the {most} that this server takes; lower "
                "extraction.max_len, or raise server.flags.context_length or max_total_tokens"
            )
