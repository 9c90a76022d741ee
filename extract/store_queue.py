"""Shards on their way to disk: a few threads write them, and they exist in the order in which they were given.

The work of two shards overlaps: while one waits for the disk, the next is written. A shard gets its name and its index
line after the one before it, so whatever happens the store holds the first so many shards.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path

from extract.store_format import INDEX, SHARDS, ShardLine, StoredSample, append_line, shard_name
from extract.store_shard import FullShard
from extract.store_space import told_when_full
from extract.store_tensors import publish, temporary_of

AT_ONCE = 2
"""Shards that are written at once: more would take memory, and one disk no less time."""


class _Behind(Exception):
    """The shard before this one was not written; never seen outside."""


class ShardQueue:
    """All methods are for one thread, the one that adds samples.

    `write` makes a shard's temporary file and says what its index line is; OSError leaves none behind.
    """

    def __init__(self, path: Path, write: Callable[[Sequence[StoredSample], Path], ShardLine]) -> None:
        self._path, self._write = path, write
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="shard")
        self._waiting: deque[tuple[FullShard, Future[ShardLine]]] = deque()
        self._failed: deque[FullShard] = deque()

    def put(self, shard: FullShard) -> None:
        """Begins to write it; there must be room, see `finished`."""
        assert len(self._waiting) < AT_ONCE and not self._failed
        before = self._waiting[-1][1] if self._waiting else None
        self._waiting.append((shard, self._pool.submit(self._make, shard, before)))

    def finished(self, most: int) -> Iterator[tuple[FullShard, ShardLine]]:
        """Shards that are on disk since the last call, index line included; waits until at most `most` are not.

        What made a shard fail is raised here. That shard and those behind it are kept, and begun again by the next
        call.
        """
        self._begin_again()
        while self._waiting and (len(self._waiting) > most or self._waiting[0][1].done()):
            shard, future = self._waiting[0]
            if (error := future.exception()) is not None:
                wait([running for _, running in self._waiting])
                self._failed.extend(shard for shard, _ in self._waiting)
                self._waiting.clear()
                raise error
            self._waiting.popleft()
            yield shard, future.result()

    def close(self) -> None:
        """Returns when no thread writes any more."""
        self._pool.shutdown()

    def _begin_again(self) -> None:
        failed, self._failed = self._failed, deque()
        for shard in failed:
            self.put(shard)

    def _make(self, shard: FullShard, before: Future[ShardLine] | None) -> ShardLine:
        file = self._path / SHARDS / shard_name(shard.number)
        with told_when_full(file, shard.num_bytes):
            line = self._write(shard.samples, file)
            try:
                # No deadlock: the pool has begun the one before, and has a thread for each.
                if before is not None and before.exception() is not None:
                    raise _Behind
                publish(file)
                append_line(self._path / INDEX, asdict(line))
            except (OSError, _Behind):
                temporary_of(file).unlink(missing_ok=True)
                file.unlink(missing_ok=True)
                raise
        return line
