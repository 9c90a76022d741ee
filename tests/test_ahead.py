import threading

import pytest

from extract.ahead import in_order


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_results_come_in_order_whoever_ends_first(ahead):
    def slow_then_fast(number):
        threading.Event().wait(0.02 * (number % 3 == 0))
        return number * number

    assert list(in_order(slow_then_fast, range(20), ahead)) == [(n, n * n) for n in range(20)]


def test_as_many_as_wanted_are_under_way_at_once():
    together = threading.Barrier(3, timeout=30)
    assert len([*in_order(lambda _: together.wait(), range(9), 3)]) == 9, "a barrier opens for three at a time"


def test_with_none_ahead_everything_happens_in_this_thread_and_only_when_asked_for():
    seen = []
    results = in_order(lambda n: seen.append((n, threading.current_thread())), range(3), 0)
    assert not seen
    next(results)
    assert seen == [(0, threading.current_thread())]


def test_an_error_ends_it_and_what_has_not_begun_never_begins():
    begun = []

    def fails(number):
        begun.append(number)
        if number == 1:
            raise ValueError("no")
        return number

    results = in_order(fails, range(100), 2)
    assert next(results) == (0, 0)
    with pytest.raises(ValueError, match="no"):
        list(results)
    assert max(begun) < 6
