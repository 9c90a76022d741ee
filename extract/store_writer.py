"""Writes a store: samples are gathered to shards, and every shard that was acknowledged survives kill -9.

Order of a shard's birth: temporary file, fsync, rename, fsync of the directory, index line, fsync. A shard
without an index line does not exist. On resume, whatever is torn, cut off or altered is named, set aside
(*.bad, *.torn) and left out of the index, so that its samples are captured again.
"""

import contextlib
import json
import logging
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path

import torch
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
    shard_name,
    teacher_name,
)
from extract.store_manifest import agreed_manifest
from extract.store_space import StoreFull, told_when_full
from extract.store_tensors import write_tensors

log = logging.getLogger(__name__)

MAX_SHARD_BYTES = 1 << 30
_ROWS_A_CHECK = 1024


def create_or_resume(path: Path, manifest: dict, *, shard_bytes: int) -> "StoreWriter":
    """A writer for a new store, or for one that was begun with the same settings.

    The manifest needs `last` ("post_norm"), `dtype`, `capture_layers`, `hidden_size`, and `must_match`:
    a dict with whatever else must agree on resume. ValueError lists each key that differs, old and new. The
    store stays locked against other writers until `close`. Use it as a context manager.
    """
    return StoreWriter(Path(path), manifest, shard_bytes)


class StoreWriter:
    """See create_or_resume. Memory: one shard of samples, which are written from where they are.

    Attributes:
        done: ids of the samples on disk; those still gathered for the open shard are not in it.
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
        self._open_ids: set[str] = set()
        with contextlib.ExitStack() as stack:
            stack.enter_context(locked(path))
            with told_when_full(path / MANIFEST, 0):
                (path / SHARDS).mkdir(exist_ok=True)
                self.manifest = agreed_manifest(path, manifest)
                self._resume()
            self._lock = stack.pop_all()

    def add(self, sample: StoredSample) -> bool:
        """Take one sample; False if it was quarantined instead (states missing, not finite, or no tokens).

        The tensors are kept, not copied, until their shard is written, unless they are views of something
        larger. ValueError for what no sample may have: an id that is there already, another dtype or width.
        """
        self._check_form(sample)
        if (reason := _fault(sample)) is not None:
            self.quarantine(sample.id, reason)
            return False
        num_bytes = sample.aux.nbytes + sample.last.nbytes + 5 * len(sample.input_ids)
        if self._open and self._open_bytes + num_bytes > self._shard_bytes:
            self.flush()
        self._open.append(_detached(sample))
        self._open_ids.add(sample.id)
        self._open_bytes += num_bytes
        if self._open_bytes >= self._shard_bytes:
            self.flush()
        return True

    def flush(self) -> None:
        """Write the open shard. StoreFull if it does not fit: it stays open, and flush may be tried again."""
        if not self._open:
            return
        if self.manifest["complete"]:
            self._write_manifest(complete=False)
        file = self.path / SHARDS / shard_name(next_number(self.path))
        with told_when_full(file, self._open_bytes):
            line = self._write_shard(file)
            try:
                append_line(self.path / INDEX, asdict(line))
            except OSError:
                file.unlink()
                raise
        self._lines.append(line)
        self.done |= self._open_ids
        self._open, self._open_bytes, self._open_ids = [], 0, set()

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
        try:
            self.flush()
        finally:
            self._lock.close()

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is StoreFull:
            self._lock.close()
        else:
            self.close()

    def _check_form(self, sample: StoredSample) -> None:
        if sample.id in self.done or sample.id in self._open_ids:
            raise ValueError(f"{self.path}: sample {sample.id} is stored already; ids must be unique")
        hidden, layers = self.manifest["hidden_size"], len(self.manifest["capture_layers"])
        wanted = DTYPES[self.manifest["dtype"]]
        for name, states, width in (("aux", sample.aux, layers * hidden), ("last", sample.last, hidden)):
            if states.dtype != wanted or states.shape[1] != width or states.device.type != "cpu":
                raise ValueError(
                    f"sample {sample.id}: {name} is {states.dtype} {list(states.shape)} on {states.device}; "
                    f"the store takes {wanted} [tokens, {width}] on cpu"
                )

    def _write_shard(self, file: Path) -> ShardLine:
        samples = self._open
        lengths = [len(sample.input_ids) for sample in samples]
        tensors = {
            "offsets": [torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)],
            "input_ids": [torch.tensor(sample.input_ids, dtype=torch.int32) for sample in samples],
            "aux": [sample.aux for sample in samples],
            "last": [sample.last for sample in samples],
            "loss_mask": [torch.tensor(sample.loss_mask, dtype=torch.uint8) for sample in samples],
        }
        num_bytes, sha256 = write_tensors(file, tensors)
        entries = tuple(
            {
                "id": sample.id,
                "conversation": sample.conversation,
                "tokens": len(sample.input_ids),
                "temperature": sample.temperature,
                "supervised": sum(sample.loss_mask),
            }
            for sample in samples
        )
        return ShardLine(file.name, num_bytes, sha256, file.stat().st_mtime_ns, sum(lengths), entries)

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
