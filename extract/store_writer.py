"""Writes a store: samples are gathered to shards, and every shard that was acknowledged survives kill -9.

Threads write a shard while the next one fills (store_queue.py).

Order of a shard's birth: temporary file, fsync, rename, fsync of the directory, index line, fsync. A shard
without an index line does not exist. On resume, whatever is torn, cut off or altered is named, set aside
(*.bad, *.torn) and left out of the index, so that its samples are captured again.
"""

import contextlib
import json
import logging
from collections.abc import Collection
from dataclasses import asdict
from functools import partial
from pathlib import Path

from torch import Tensor

from extract.durable import replace_file, sync
from extract.store_check import check_shard, next_number
from extract.store_format import (
    DTYPES,
    INDEX,
    MANIFEST,
    QUARANTINE,
    SHARDS,
    SampleRef,
    ShardLine,
    StoredSample,
    append_line,
    locked,
    repair_lines,
    replace_lines,
    teacher_name,
)
from extract.store_manifest import agreed_manifest
from extract.store_queue import AT_ONCE, ShardQueue
from extract.store_shard import FullShard, write_shard
from extract.store_space import StoreFull, shard_bytes_per_token, told_when_full

log = logging.getLogger(__name__)

MAX_SHARD_BYTES = 1 << 30
_ROWS_A_CHECK = 1024


def create_or_resume(path: Path, manifest: dict, *, shard_bytes: int) -> "StoreWriter":
    """A writer for a new store, or for one that was begun with the same settings.

    The manifest needs `last` ("post_norm"), `dtype`, `codec`, `capture_layers`, `hidden_size`, and `must_match`:
    a dict with whatever else must agree on resume. ValueError lists each key that differs, old and new. The
    store stays locked against other writers until `close`. Use it as a context manager.
    """
    return StoreWriter(Path(path), manifest, shard_bytes)


class StoreWriter:
    """See create_or_resume. For one thread; it writes with threads of its own.

    Memory: the samples of three shards, one that fills and two that are written, from where they are. With codec fp8
    the samples of a shard take up to 1.7 times its bytes, and the codes of the two that are written come on top.

    Whatever keeps a shard from the disk (StoreFull, another OSError) is raised by the next call that adds, flushes,
    finishes or closes. The samples stay; every later call tries again.

    Attributes:
        done: ids of the samples on disk, index line included; those on their way are not in it.
        quarantined: id -> reason of the samples given up.
        set_aside: what resume found damaged, one sentence each.
    """

    def __init__(self, path: Path, manifest: dict, shard_bytes: int) -> None:
        if not 0 < shard_bytes <= MAX_SHARD_BYTES:
            raise ValueError(f"shard_bytes is {shard_bytes}, must be in 1..{MAX_SHARD_BYTES} (1 GiB)")
        self.path, self._shard_bytes = path, shard_bytes
        self.done: set[str] = set()
        self.quarantined: dict[str, str] = {}
        self.set_aside: list[str] = []
        self._open: list[StoredSample] = []
        self._open_bytes = 0
        self._on_their_way: set[str] = set()
        """Ids of the samples that were taken and are not in `done`."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(locked(path))
            with told_when_full(path / MANIFEST, 0):
                (path / SHARDS).mkdir(exist_ok=True)
                self.manifest = agreed_manifest(path, manifest)
                self._resume()
            self._lock = stack.pop_all()
        self._token_bytes = shard_bytes_per_token(
            hidden_size=self.manifest["hidden_size"], num_capture_layers=len(self.manifest["capture_layers"]),
            dtype=self.manifest["dtype"], codec=self.manifest["codec"],
        )  # fmt: skip
        self._next_number = next_number(path)
        self._queue = ShardQueue(
            path, partial(write_shard, codec=self.manifest["codec"], layers=len(self.manifest["capture_layers"]))
        )
        self._closed = False

    def add(self, sample: StoredSample) -> bool:
        """Take one sample; False if it was quarantined instead (states missing, not finite, or no tokens).

        The tensors are kept, not copied, until their shard is on disk, unless they are views of something larger: do
        not change them. Waits while two full shards are not on disk yet. ValueError for what no sample may have: an
        id that is there already, another dtype or width.
        """
        self._acknowledge(AT_ONCE)
        self._check_form(sample)
        if (reason := _fault(sample)) is not None:
            self.quarantine(sample.id, reason)
            return False
        num_bytes = len(sample.input_ids) * self._token_bytes
        if self._open and self._open_bytes + num_bytes > self._shard_bytes:
            self._hand_over()
        self._open.append(_detached(sample))
        self._on_their_way.add(sample.id)
        self._open_bytes += num_bytes
        if self._open_bytes >= self._shard_bytes:
            self._hand_over()
        return True

    def flush(self) -> None:
        """Returns when all samples are on disk. StoreFull if they do not fit: they stay, and it may be tried again."""
        if self._open:
            self._hand_over()
        self._acknowledge(0)

    def _hand_over(self) -> None:
        """The open shard goes to be written, as soon as there is room for it."""
        self._acknowledge(AT_ONCE - 1)
        if self.manifest["complete"]:
            self._write_manifest(complete=False)
        self._queue.put(FullShard(self._next_number, tuple(self._open), self._open_bytes))
        self._next_number += 1
        self._open, self._open_bytes = [], 0

    def _acknowledge(self, most: int) -> None:
        """Takes note of what is on disk; waits until at most `most` shards are not."""
        for shard, line in self._queue.finished(most):
            self._lines.append(line)
            ids = {sample.id for sample in shard.samples}
            self.done |= ids
            self._on_their_way -= ids

    def quarantine(self, id: str, reason: str) -> None:
        """Give a sample up, on record."""
        log.warning("sample %s set aside: %s", id, reason)
        with told_when_full(self.path / QUARANTINE, 0):
            append_line(self.path / QUARANTINE, {"id": id, "reason": reason})
        self.quarantined[id] = reason

    def finish(self, expected: Collection[str]) -> None:
        """Write what is open, and declare the store complete: each expected sample is stored or given up."""
        self.flush()
        missing = [id for id in expected if id not in self.done and id not in self.quarantined]
        if missing:
            raise ValueError(
                f"{self.path}: {len(missing)} of {len(expected)} samples were neither stored nor given up, "
                f"first {missing[0]}; run the same command again"
            )
        self._write_manifest(complete=True)

    def close(self) -> None:
        """Write what is open and let go of the lock; harmless when called twice."""
        if self._closed:
            return
        try:
            self.flush()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        self._closed = True
        self._queue.close()  # no other writer may come in while a thread of this one still writes
        self._lock.close()

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is StoreFull:
            self._let_go()
        else:
            self.close()

    def _check_form(self, sample: StoredSample) -> None:
        if sample.id in self.done or sample.id in self._on_their_way:
            raise ValueError(f"{self.path}: sample {sample.id} is stored already; ids must be unique")
        hidden, layers = self.manifest["hidden_size"], len(self.manifest["capture_layers"])
        wanted = DTYPES[self.manifest["dtype"]]
        for name, states, width in (("aux", sample.aux, layers * hidden), ("last", sample.last, hidden)):
            if states.dtype != wanted or states.shape[1] != width or states.device.type != "cpu":
                raise ValueError(
                    f"sample {sample.id}: {name} is {states.dtype} {list(states.shape)} on {states.device}; "
                    f"the store takes {wanted} [tokens, {width}] on cpu"
                )

    def _resume(self) -> None:
        """Bring index, shards and quarantine of an earlier run to agreement; set aside what is damaged."""
        records = repair_lines(self.path / INDEX)
        lines = [ShardLine.parse(record, self.path / INDEX) for record in records]
        faults = {line.file: check_shard(self.path, line, self.manifest, hashed=None) for line in lines}
        self._lines = [line for line in lines if faults[line.file] is None]
        self.set_aside = [fault for fault in faults.values() if fault is not None]
        if self.set_aside:
            replace_lines(self.path / INDEX, [asdict(line) for line in self._lines])
        known = {name for line in self._lines for name in (line.file, teacher_name(line.number))}
        for file in sorted((self.path / SHARDS).iterdir()):
            if file.suffix == ".tmp":
                file.unlink()
            elif file.suffix == ".safetensors" and file.name not in known:
                file.replace(file.with_name(file.name + ".bad"))
                if file.name not in faults:
                    self.set_aside.append(f"{file} has no line in {INDEX}")
        sync(self.path / SHARDS)
        for fault in self.set_aside:
            log.warning("%s; set aside, its samples will be made again", fault)
        if self.set_aside and self.manifest["complete"]:
            self._write_manifest(complete=False)
        self.done = {ref.id for line in self._lines for ref in line.refs()}
        for record in repair_lines(self.path / QUARANTINE):
            if record["id"] not in self.done:
                self.quarantined[record["id"]] = record["reason"]

    def _write_manifest(self, *, complete: bool) -> None:
        refs: list[SampleRef] = [ref for line in self._lines for ref in line.refs()]
        counts = {
            "samples": len(refs),
            "tokens": sum(ref.tokens for ref in refs),
            "supervised": sum(ref.supervised for ref in refs),
            "shards": len(self._lines),
            "quarantined": len(self.quarantined),
        }
        self.manifest = {**self.manifest, "complete": complete, "counts": counts}
        with told_when_full(self.path / MANIFEST, 0):
            replace_file(self.path / MANIFEST, json.dumps(self.manifest, indent=2).encode() + b"\n")


def _fault(sample: StoredSample) -> str | None:
    """Why this one sample cannot be stored, or None."""
    tokens = len(sample.input_ids)
    if tokens == 0:
        return "it has no tokens"
    if not tokens == len(sample.loss_mask) == len(sample.aux) == len(sample.last):
        return (
            f"{tokens} tokens, but {len(sample.loss_mask)} mask values, {len(sample.aux)} aux rows and "
            f"{len(sample.last)} last rows"
        )
    for name, states in (("aux", sample.aux), ("last", sample.last)):
        if (row := _first_not_finite(states)) is not None:
            return f"{name} is not finite at token {row}"
    return None


def _first_not_finite(states: Tensor) -> int | None:
    """First row with a NaN or an infinity, or None. aminmax runs at memory speed and makes no copy."""
    for begin in range(0, len(states), _ROWS_A_CHECK):
        rows = states[begin : begin + _ROWS_A_CHECK]
        low, high = rows.aminmax()
        if not (low.isfinite() and high.isfinite()):
            return begin + int((~rows.isfinite()).any(dim=1).nonzero()[0])
    return None


def _detached(sample: StoredSample) -> StoredSample:
    """The sample without the larger buffer that its states may be views of: that would stay in memory."""

    def own(states: Tensor) -> Tensor:
        return states if states.untyped_storage().nbytes() == states.nbytes else states.clone()

    return StoredSample(**{**sample.__dict__, "aux": own(sample.aux), "last": own(sample.last)})
