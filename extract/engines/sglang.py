"""SGLang as an engine, stock and unpatched: what is asked of a server, and what is believed of its answers.

Which server that is, and what happens when it dies, is the business of `extract.engines.servers`.
"""

import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from extract.engines.base import Captured, EngineError, EngineGone, Generated, SomeFailed
from extract.engines.servers import Servers
from extract.engines.sglang_answers import read_answer, read_logprobs
from extract.engines.sglang_command import Life
from extract.engines.sglang_server import SglangServer
from extract.probe import Probe, Told, probe
from extract.spool import Budget, Width
from extract.verifier import VerifierSpec, load_head

log = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")

SHARE_OF_SPOOL = 0.9
"""Of the bytes that files may take: what lies there unread may never make the server wait for ever."""
PROBE_TOKENS = 512
"""Of the prompt that is probed before the bulk, at least."""


class SglangEngine:
    """See `extract.engines.base.Engine`. Requests of one batch run side by side; several batches may.

    Attributes:
        servers: where its requests go.
        probes: figures of the probes, by name.
    """

    name = "sglang"
    ahead = 2
    """Batches to hand over at once, so that the server never runs dry between two."""

    def __init__(
        self, spec: VerifierSpec, servers: Servers, *, capture_layers: Sequence[int], dtype: torch.dtype
    ) -> None:
        self.spec, self.servers, self.version, self.dtype = spec, servers, servers.version, dtype
        self.capture_layers = list(capture_layers)
        self.probes: dict[str, Any] = {}
        self._answers, self._numbers = f"re-{secrets.token_hex(4)}-", itertools.count()
        self._width = Width((len(self.capture_layers) + 1) * spec.hidden_size, dtype)
        self._pool = ThreadPoolExecutor(servers.concurrency, thread_name_prefix="sglang")
        self._budget = Budget(int(SHARE_OF_SPOOL * servers.budget_bytes))
        self._starting = threading.Lock()
        self._proven: SglangServer | None = None
        self._probed: Sequence[int] | None = None
        self._gone: str | None = None

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
        return self.probes | {"restarts": self.servers.restarts}

    def prepare(self, life: Life) -> None:
        """Starts the server, which the first batch of a capture will probe; see `extract.engines.base.Prepares`."""
        with self._starting_or_gone():
            self.servers.serve(life)

    def close(self) -> None:
        """Ends all requests, and the server that runs or starts with its folder in memory, unless it is another's."""
        self._gone = self._gone or "the engine is closed"
        self.servers.close()
        self._pool.shutdown(cancel_futures=True)

    def _serve(self, life: Life, batch: Sequence[Sequence[int]]) -> None:
        """The server of this life runs, is proven, and takes sequences of these lengths."""
        with self._starting_or_gone():
            server = self.servers.serve(life)
            if life == "capture" and server is not self._proven:
                # Always the same text: after a death it must not be the one that killed the server.
                self._probed = self._probed or max(batch, key=len)
                self._probe_start(self._probed)
                self._proven = server
        self._check_lengths(batch)

    @contextmanager
    def _starting_or_gone(self) -> Iterator[None]:
        """One thread at a time is inside; whatever fails there is not tried again by others that wait."""
        with self._starting:
            if self._gone is not None:
                raise EngineGone(self._gone)
            try:
                yield
            except EngineError as error:
                self._gone = str(error)
                self.servers.close()
                raise EngineGone(self._gone) from error

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
        server, spool = self.servers.now()
        assert spool is not None
        rid = f"{self.servers.prefix}{next(self._numbers)}"
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
        rid = f"{self._answers}{next(self._numbers)}"  # a server that captures must not take it for one of those
        return self.servers.now()[0].ask(
            "POST", "/generate", {"input_ids": list(ids), "rid": rid, "sampling_params": dict(sampling)}
        )

    def _probe_start(self, longest: Sequence[int]) -> None:
        """Before the bulk: one prompt of more than two cache pages, sent twice, is there twice and true."""
        server, _ = self.servers.now()
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
        most = self.servers.now()[0].max_input
        if (longest := max(map(len, batch))) > most:
            raise ValueError(
                f"a sequence of {longest} tokens is longer than the {most} that this server takes; lower "
                "extraction.max_len, or raise server.flags.context_length or max_total_tokens"
            )
