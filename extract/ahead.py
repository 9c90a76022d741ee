"""An engine elsewhere works on the next batches while earlier ones are put away."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(run: Callable[[Item], Result], items: Iterable[Item], ahead: int) -> Iterator[tuple[Item, Result]]:
    """Items with what `run` made of them, in order; up to `ahead` of them are worked on at once, in threads.

    With `ahead` 0 everything happens in this very thread. The first error ends it; what still runs then is left to end
    by itself, and what has not begun never begins.
    """
    if not ahead:
        yield from ((item, run(item)) for item in items)
        return
    waiting: deque[tuple[Item, Future[Result]]] = deque()
    pool = ThreadPoolExecutor(ahead)
    try:
        for item in items:
            waiting.append((item, pool.submit(run, item)))
            if len(waiting) > ahead:
                done, future = waiting.popleft()
                yield done, future.result()
        while waiting:
            done, future = waiting.popleft()
            yield done, future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
