"""Several SGLang engines as one: batches go to the idlest, and what a lost one had under way is done by another."""

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import pairwise
from typing import Any, TypeVar

import torch

from extract.engines.base import Captured, EngineError, EngineGone, Generated, SomeFailed
from extract.engines.sglang import SglangEngine
from extract.engines.sglang_command import Life

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class Replicas:
    """See `extract.engines.base.Engine`. Several batches may run at once, and then servers start side by side.

    Attributes:
        lost: why engines are gone for good, by the name of their servers.
    """

    name = SglangEngine.name

    def __init__(self, engines: Sequence[SglangEngine]) -> None:
        self.version = engines[0].version
        self.lost: dict[str, str] = {}
        self._engines = list(engines)
        self._under_way = [0] * len(engines)
        self._changing = threading.Lock()
        shares = SglangEngine.ahead * len(engines) ** 2  # so many batches at once, each in as many as there are engines
        self._pool = ThreadPoolExecutor(shares, thread_name_prefix="replicas")
        self._closed = False

    def capture(self, batch: Sequence[Sequence[int]]) -> list[Captured]:
        """All of a batch on one engine; see `SglangEngine.capture`."""
        return self._on_one(sum(map(len, batch)), lambda engine: engine.capture(batch))

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
        """Shares of a batch side by side, in order; each prompt's seed is the same as on a single engine."""
        shares = max(1, len(self._engines) - len(self.lost))
        bounds = [len(batch) * place // shares for place in range(shares + 1)]

        def share(begin: int, end: int) -> list[Generated]:
            def answer(engine: SglangEngine) -> list[Generated]:
                return engine.generate(
                    batch[begin:end], max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p,
                    seed=seed + begin, stop_ids=stop_ids,
                )  # fmt: skip

            return self._on_one(end - begin, answer)

        futures = [self._pool.submit(share, *ends) for ends in pairwise(bounds) if ends[0] < ends[1]]
        wait(futures)
        return joined(futures)

    def recheck(self, stored: Sequence[tuple[Sequence[int], Captured]], dtype: torch.dtype) -> dict[str, Any]:
        """By one engine, of whatever engine's states; see `SglangEngine.recheck`."""
        figures = self._on_one(1, lambda engine: engine.recheck(stored, dtype))
        restarts = sum(engine.servers.restarts for engine in self._engines)
        return figures | {"restarts": restarts, "servers": len(self._engines), "servers_lost": len(self.lost)}

    def prepare(self, life: Life) -> None:
        """All side by side; see `extract.engines.base.Prepares`."""

        def start(engine: SglangEngine) -> None:
            try:
                engine.prepare(life)
            except EngineGone as error:
                if not self._closed:
                    self._lose(engine.servers.name, str(error))

        list(self._pool.map(start, self._engines))
        self._require_one()

    def close(self) -> None:
        """All at once, for each may take seconds."""
        self._closed = True
        with ThreadPoolExecutor(len(self._engines)) as closing:
            list(closing.map(SglangEngine.close, self._engines))
        self._pool.shutdown(cancel_futures=True)

    def _on_one(self, weight: int, call: Callable[[SglangEngine], Result]) -> Result:
        """`call` with the idlest engine that lives, and with another if that is lost; `weight` is what it has to do."""
        while True:
            place = self._claim(weight)
            try:
                return call(self._engines[place])
            except EngineGone as error:
                if self._closed:
                    raise
                self._lose(self._engines[place].servers.name, str(error))
            finally:
                with self._changing:
                    self._under_way[place] -= weight

    def _claim(self, weight: int) -> int:
        with self._changing:
            self._require_one()
            living = [place for place, engine in enumerate(self._engines) if engine.servers.name not in self.lost]
            place = min(living, key=lambda place: self._under_way[place])
            self._under_way[place] += weight
            return place

    def _require_one(self) -> None:
        if len(self.lost) == len(self._engines):
            reasons = "\n".join(f"{name}: {why}" for name, why in self.lost.items())
            raise EngineGone(f"all {len(self._engines)} servers are lost:\n{reasons}")

    def _lose(self, name: str, why: str) -> None:
        with self._changing:
            if name in self.lost:
                return
            self.lost[name] = why
        left = len(self._engines) - len(self.lost)
        log.warning("%s is lost, %d of %d go on: %s", name, left, len(self._engines), why)


def joined(shares: Sequence[Future[list[Result]]]) -> list[Result]:
    """Results of all shares of a batch, in order; SomeFailed if a part of one failed, any other error as it is."""
    results: list[Result | EngineError] = []
    for share in shares:
        error = share.exception()
        if error is not None and not isinstance(error, SomeFailed):
            raise error
        results += share.result() if error is None else error.results
    if any(isinstance(result, EngineError) for result in results):
        raise SomeFailed(results)
    return [result for result in results if not isinstance(result, EngineError)]
