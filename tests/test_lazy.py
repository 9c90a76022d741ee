"""A server loads while the capture is planned; whichever of the two fails is told, and nothing is left running."""

import threading
import time

import pytest

from extract.engines.base import EngineGone
from extract.lazy import LazyEngine
from extract.pipeline import Clock


class Slow:
    """An engine that gets ready when it is let, and fails in one way or another."""

    def __init__(self, error=None):
        self.error, self.begun, self.ready, self.closed = error, threading.Event(), threading.Event(), False
        self.let = threading.Event()

    def prepare(self, life):
        assert life == "capture"
        self.begun.set()
        assert self.let.wait(20)
        if self.error is not None:
            raise self.error
        if self.closed:
            raise EngineGone("the engine was closed while its server started")
        self.ready.set()

    def close(self):
        self.closed = True
        self.let.set()


def lazy(engine):
    return LazyEngine(lambda: engine, "slow", "1", ahead=2, rechecks=True)


def test_items_pass_while_the_engine_still_starts():
    engine = Slow()
    opened = lazy(engine)
    items = opened.meanwhile(range(5))
    assert next(items) == 0 and engine.begun.wait(20) and list(items) == [1, 2, 3, 4] and not engine.ready.is_set()
    engine.let.set()
    assert engine.ready.wait(20)
    opened.close()


@pytest.mark.parametrize("error", [EngineGone("no memory"), ValueError("no such flag")])
def test_an_engine_that_cannot_start_is_told_at_the_next_item(error):
    engine = Slow(error)
    opened = lazy(engine)
    items = opened.meanwhile(iter(int, 1))  # without end
    next(items)
    engine.let.set()
    with pytest.raises(type(error), match=str(error)):
        for _ in items:
            pass
    opened.close()


def test_a_plan_that_fails_ends_the_start():
    engine = Slow()
    opened = lazy(engine)
    for _ in opened.meanwhile(range(5)):
        break
    assert engine.begun.wait(20)
    opened.close()
    assert engine.closed and opened._preparing.done() and not engine.ready.is_set()


def test_nothing_starts_before_the_first_item_is_asked_for():
    opened = LazyEngine(lambda: pytest.fail("it started"), "slow", "1", ahead=2)
    opened.meanwhile(range(5))
    opened.close()


def test_the_seconds_of_a_start_are_no_work():
    """What waits for an engine is told apart from what it does, or a rate would mean nothing."""

    class Starts(Slow):
        def prepare(self, life):
            assert life == "respond"
            threading.Event().wait(0.2)

        def generate(self, batch, **_):
            return list(batch)

    opened = lazy(Starts())
    clock, began = Clock(opened), time.monotonic()
    asked = {"max_new_tokens": 1, "temperature": 0, "top_p": 1, "seed": 0, "stop_ids": []}
    for _ in range(3):
        assert opened.generate([1, 2], **asked) == [1, 2]
    waited, worked, all_of_it = clock.waited_s(), clock.worked_s(), time.monotonic() - began
    assert 0.2 <= waited <= all_of_it and worked <= all_of_it - waited + 1e-3
