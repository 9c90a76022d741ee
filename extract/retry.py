"""One bad sample or a flaky engine neither stops nor stalls a job, and a broken engine does stop it."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from extract.engines.base import EngineError, EngineGone, SomeFailed

log = logging.getLogger(__name__)

Request = TypeVar("Request")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Failure:
    """A request that was given up, and why."""

    reason: str


GROUP = 16
"""Failed requests that are repeated together: few enough that one which brings the engine down does so with few."""


class Patience:
    """Calls an engine on batches, several at once if need be; what fails is repeated in groups, and then alone.

    A request that still fails, `attempts` times alone, becomes a Failure; `stop_after` such in a row, over all
    batches, raise an EngineError, for then it is the engine that is broken. An EngineGone passes at once.
    `failures` counts requests that failed, each time.
    """

    def __init__(self, *, attempts: int = 2, stop_after: int = 5):
        assert attempts >= 1 and stop_after >= 1
        self.attempts = attempts
        self.stop_after = stop_after
        self.failures = 0
        self._failed_in_a_row = 0
        self._counting = threading.Lock()

    def run(
        self, call: Callable[[Sequence[Request]], Sequence[Result]], batch: Sequence[Request]
    ) -> list[Result | Failure]:
        """One result or Failure for each request, in the order of the batch."""
        results = self._tried(call, batch)
        failed = [place for place, result in enumerate(results) if isinstance(result, EngineError)]
        if failed:
            log.warning("%d of %d requests failed and are repeated: %s", len(failed), len(batch), results[failed[0]])
        for start in range(0, len(failed), GROUP):
            group = failed[start : start + GROUP]
            for place, result in zip(group, self._tried(call, [batch[place] for place in group]), strict=True):
                results[place] = self._alone(call, batch[place]) if isinstance(result, EngineError) else result
        return [result for result in results if not isinstance(result, EngineError)]

    def _tried(
        self, call: Callable[[Sequence[Request]], Sequence[Result]], batch: Sequence[Request]
    ) -> list[Result | Failure | EngineError]:
        """What each request gave; its error if that is known, else that of the whole batch."""
        try:
            results: list[Result | Failure | EngineError] = [*_call(call, batch)]
        except EngineGone:
            raise
        except SomeFailed as some:
            results = some.results
        except EngineError as error:
            results = [error] * len(batch)
        failed = sum(isinstance(result, EngineError) for result in results)
        with self._counting:
            self.failures += failed
            if failed < len(batch):
                self._failed_in_a_row = 0
        return results

    def _alone(self, call: Callable[[Sequence[Request]], Sequence[Result]], request: Request) -> Result | Failure:
        for _ in range(self.attempts):
            (result,) = self._tried(call, [request])
            if not isinstance(result, EngineError):
                return result
        reason = f"failed {self.attempts} times alone: {result}"
        log.warning("a request is given up: %s", reason)
        with self._counting:
            self._failed_in_a_row += 1
            in_a_row = self._failed_in_a_row
        if in_a_row >= self.stop_after:
            raise EngineError(
                f"{in_a_row} requests in a row failed, the engine seems broken; the last {reason}; "
                "what is finished is kept: run the same command again when the engine works"
            )
        return Failure(reason)


def _call(call: Callable[[Sequence[Request]], Sequence[Result]], batch: Sequence[Request]) -> list[Result]:
    results = list(call(batch))
    if len(results) != len(batch):
        raise EngineError(f"{len(results)} results for {len(batch)} requests")
    return results
