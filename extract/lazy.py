"""An engine that is started when it is first needed, or a little before."""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Literal, TypeVar

import torch

from extract.engines import Captured, Engine, Generated
from extract.engines.base import Prepares, Rechecks

Item = TypeVar("Item")


class LazyEngine:
    """Starts the engine when it is first needed: a run that finds everything done loads no model.

    Attributes:
        ahead: batches to hand over while earlier ones are stored; 0 for an engine that works in this very thread.
        rechecks: whether it is an `extract.engines.base.Rechecks`.
        starting_s: seconds for which work has waited until the engine was ready.
    """

    def __init__(
        self, start: Callable[[], Engine], name: str, version: str, *, ahead: int = 0, rechecks: bool = False
    ) -> None:
        self._start = start
        self._engine: Engine | None = None
        self._starting = threading.RLock()
        self._preparing: Future[Engine] | None = None
        self.name = name
        self.version = version
        self.ahead, self.rechecks = ahead, rechecks
        self.starting_s = 0.0
        self._ready_for: str | None = None

    def _made(self) -> Engine:
        with self._starting:
            if self._engine is None:
                began = time.monotonic()
                self._engine = self._start()
                self.starting_s += time.monotonic() - began
            return self._engine

    def _started(self, life: Literal["respond", "capture"]) -> Engine:
        with self._starting:  # batches that are handed over ahead come from threads
            engine = self._made()
            if isinstance(engine, Prepares) and self._ready_for != life:
                began = time.monotonic()
                engine.prepare(life)
                self.starting_s += time.monotonic() - began
            self._ready_for = life
            return engine

    def capture(self, batch: Sequence[Sequence[int]]) -> list[Captured]:
        return self._started("capture").capture(batch)

    def generate(
        self, batch: Sequence[Sequence[int]], *, max_new_tokens: int, temperature: float, top_p: float,
        seed: int, stop_ids: Collection[int],
    ) -> list[Generated]:  # fmt: skip
        return self._started("respond").generate(
            batch, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed, stop_ids=stop_ids
        )

    def recheck(self, stored: Sequence[tuple[Sequence[int], Captured]], dtype: torch.dtype) -> dict[str, Any]:
        engine = self._started("capture")
        assert isinstance(engine, Rechecks)
        return engine.recheck(stored, dtype)

    def meanwhile(self, items: Iterable[Item]) -> Iterator[Item]:
        """`items`, while an engine elsewhere gets ready for `capture`; if it cannot, its error comes in their place."""
        self._made()  # or closing would not know of it
        pool = ThreadPoolExecutor(1, thread_name_prefix="prepare")
        self._preparing = pool.submit(self._started, "capture")
        pool.shutdown(wait=False)
        for item in items:
            if self._preparing is not None and self._preparing.done():
                self._preparing.result()
            yield item

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        if self._preparing is not None:
            wait([self._preparing])  # closing ends it
