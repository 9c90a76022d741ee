"""A flaky engine is asked again, a bad request is given up, a broken engine stops the job."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from extract.engines.base import EngineError, SomeFailed
from extract.retry import GROUP, Failure, Patience


class Flaky:
    """Doubles numbers; `fails` says how often each number fails before it works."""

    def __init__(self, fails):
        self.fails = dict(fails)
        self.calls = []

    def __call__(self, batch):
        self.calls.append(list(batch))
        for number in batch:
            if self.fails.get(number, 0) > 0:
                self.fails[number] -= 1
                raise EngineError(f"cannot do {number}")
        return [2 * number for number in batch]


ALWAYS = 10**9


def test_one_request_always_fails_and_another_twice():
    flaky = Flaky({7: ALWAYS, 9: 2})
    patience = Patience(attempts=3)
    first = patience.run(flaky, list(range(8)))
    assert first[:7] == [0, 2, 4, 6, 8, 10, 12]
    assert first[7] == Failure("failed 3 times alone: cannot do 7")
    assert patience.run(flaky, [8, 9, 10]) == [16, 18, 20]


def test_results_plus_failures_are_the_requests():
    results = [r for i in range(0, 40, 8) for r in Patience().run(Flaky({5: ALWAYS, 21: ALWAYS}), range(i, i + 8))]
    assert len(results) == 40 and sum(isinstance(r, Failure) for r in results) == 2


def test_broken_engine_stops_after_so_many_in_a_row():
    flaky = Flaky(dict.fromkeys(range(100), ALWAYS))
    patience = Patience(attempts=2, stop_after=5)
    patience.run(flaky, [0, 1])
    with pytest.raises(EngineError, match=r"5 requests in a row failed.*cannot do 4.*run the same command again"):
        patience.run(flaky, [2, 3, 4, 5, 6, 7])
    assert max(max(call) for call in flaky.calls) == 7 and [5] not in flaky.calls


def test_a_success_between_failures_starts_the_count_again():
    flaky = Flaky(dict.fromkeys(range(0, 40, 2), ALWAYS))
    results = [r for i in range(0, 40, 4) for r in Patience(attempts=1, stop_after=2).run(flaky, range(i, i + 4))]
    assert sum(isinstance(r, Failure) for r in results) == 20


def test_too_few_results_count_as_a_failure():
    assert (
        Patience(attempts=2).run(lambda batch: [1] * (len(batch) // 2), [1, 2])
        == [Failure("failed 2 times alone: 0 results for 1 requests")] * 2
    )


def test_errors_of_the_caller_are_not_retried():
    def wrong(_batch):
        raise ValueError("sequence 0 is empty")

    with pytest.raises(ValueError, match="sequence 0 is empty"):
        Patience().run(wrong, [1])


class Isolating(Flaky):
    """Knows which request failed, as an engine does that sends each on its own."""

    def __call__(self, batch):
        self.calls.append(list(batch))
        results = []
        for number in batch:
            failing = self.fails.get(number, 0) > 0
            self.fails[number] = self.fails.get(number, 0) - failing
            results.append(EngineError(f"cannot do {number}") if failing else 2 * number)
        if any(isinstance(result, EngineError) for result in results):
            raise SomeFailed(results)
        return results


def test_what_succeeded_beside_a_failure_is_not_done_again():
    engine = Isolating({5: 1, 300: 2, 400: ALWAYS})
    results = Patience().run(engine, range(512))
    assert results[:5] + results[5:400] + results[401:] == [2 * n for n in range(512) if n != 400]
    assert results[400] == Failure("failed 2 times alone: cannot do 400")
    assert engine.calls[1:] == [[5, 300, 400], [300], [400], [400]]


def test_a_batch_that_fails_as_a_whole_is_repeated_in_groups():
    """A server that dies takes every request with it: hundreds must not be repeated one after another."""
    engine = Flaky({40: ALWAYS})
    results = Patience().run(engine, range(256))
    assert [n for n, result in enumerate(results) if isinstance(result, Failure)] == [40]
    assert len(engine.calls) == 1 + 256 // GROUP + (GROUP - 1) + 2


def test_several_batches_at_once_are_counted_together():
    engine, patience = Isolating(dict.fromkeys(range(0, 400, 10), 1)), Patience()
    with ThreadPoolExecutor(4) as pool:
        done = [*pool.map(lambda start: patience.run(engine, range(start, start + 50)), range(0, 400, 50))]
    assert [r for results in done for r in results] == [2 * n for n in range(400)] and patience.failures == 40
