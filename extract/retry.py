"""One bad sample or a flaky engine neither stops nor stalls a job, and a broken engine does stop it."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from extract.engines.base import EngineError, EngineGone

log = logging.getLogger(__name__)

Request = TypeVar("Request")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Failure:
    """A request that was given up, and why."""

    reason: str


class Patience:
    """Calls an engine on batches; a batch that fails is repeated one request at a time.

    A request that fails `attempts` times alone becomes a Failure; `stop_after` such in a row, over all
    batches, raise an EngineError, for then it is the engine that is broken. An EngineGone passes at once.
    `failures` counts attempts of single requests that failed.
    """

    def __init__(self, *, attempts: int = 3, stop_after: int = 5):
        assert attempts >= 1 and stop_after >= 1
        self.attempts = attempts
        self.stop_after = stop_after
        self.failures = 0
        self._failed_in_a_row = 0

    def run(
        self, call: Callable[[Sequence[Request]], Sequence[Result]], batch: Sequence[Request]
    ) -> list[Result | Failure]:
        """One result or Failure for each request, in the order of the batch."""
        try:
            results: list[Result | Failure] = [*_call(call, batch)]
        except EngineGone:
            raise
        except EngineError as error:
            log.warning("a batch of %d failed and is repeated one by one: %s", len(batch), error)
            return [self._alone(call, request) for request in batch]
        self._failed_in_a_row = 0
        return results

    def _alone(self, call: Callable[[Sequence[Request]], Sequence[Result]], request: Request) -> Result | Failure:
        for attempt in range(1, self.attempts + 1):
            try:
                (result,) = _call(call, [request])
            except EngineGone:
                raise
            except EngineError as error:
                self.failures += 1
                reason = f"failed {attempt} times: {error}"
            else:
                self._failed_in_a_row = 0
                return result
        self._failed_in_a_row += 1
        log.warning("a request is given up: %s", reason)
        if self._failed_in_a_row >= self.stop_after:
            raise EngineError(
                f"{self._failed_in_a_row} requests in a row failed, the engine seems broken; the last "
                f"{reason}; "
                "what is finished is kept: run the same command again when the engine works"
            )
        return Failure(reason)


def _call(call: Callable[[Sequence[Request]], Sequence[Result]], batch: Sequence[Request]) -> list[Result]:
    results = list(call(batch))
    if len(results) != len(batch):
        raise EngineError(f"{len(results)} results for {len(batch)} requests")
    return results
