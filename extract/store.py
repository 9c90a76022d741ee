"""The store: what extraction writes and training reads. This file reads; store_writer.py writes.

python -m extract.store verify DIR      hash every shard, name every fault, exit 1 if there is one
python -m extract.store show DIR        say what is in it
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from extract.store_check import check_shard, show, teacher_lines, verify
from extract.store_codec import decode
from extract.store_format import (
    DTYPES,
    INDEX,
    SHARDS,
    SampleRef,
    ShardLine,
    StoredSample,
    read_lines,
    shard_name,
    teacher_name,
)
from extract.store_manifest import read_manifest
from extract.store_space import StoreFull, bytes_per_token, require_space
from extract.store_tensors import Entry, read_header
from extract.store_writer import StoreWriter, create_or_resume

__all__ = [
    "SampleRef",
    "Store",
    "StoreFull",
    "StoreWriter",
    "StoredSample",
    "bytes_per_token",
    "create_or_resume",
    "open_store",
    "require_space",
    "verify",
]

log = logging.getLogger(__name__)

TENSORS = ("aux", "last", "input_ids", "loss_mask")
TEACHER_TENSORS = ("top1", "lse")
_MAX_MAPPED = 64
"""Files mapped at once by one process; a mapping costs address space, not memory."""


class Store:
    """A store opened for reading. Cheap to pickle: each process maps the shards it reads, when it reads them.

    Attributes:
        manifest: what manifest.json says.
        samples: every sample on disk, in the order in which they were written.
        has_teacher: whether the teacher pass has finished every shard.
    """

    def __init__(self, path: Path, manifest: dict, lines: Sequence[ShardLine], has_teacher: bool) -> None:
        self.path, self.manifest, self.has_teacher = path, manifest, has_teacher
        self.samples: list[SampleRef] = [ref for line in lines for ref in line.refs()]
        self._mapped: dict[str, tuple[np.ndarray, dict[str, Entry]]] = {}

    def read(self, where: SampleRef | tuple[int, int, int], names: Sequence[str]) -> dict[str, Tensor]:
        """Tensors of one sample, given by its ref, or of tokens [start, stop) of a shard.

        Names: aux [T, A*H] and last [T, H] in the store's dtype, input_ids [T] int32, loss_mask [T] uint8,
        top1 [T] int32 and lse [T] float32. Each tensor is a view into the mapped file, just as large as what
        was asked for: bytes are read when they are touched, and a write to it never reaches the disk. Only aux
        of a store with a codec is decoded, into memory of its own.
        """
        if isinstance(where, SampleRef):
            where = (where.shard, where.start, where.start + where.tokens)
        return {name: self._tensor(name, *where) for name in names}

    def ids_and_masks(self, ref: SampleRef) -> tuple[Tensor, Tensor]:
        """input_ids [T] int32 and loss_mask [T] uint8 of a sample, without touching its states."""
        tensors = self.read(ref, ("input_ids", "loss_mask"))
        return tensors["input_ids"], tensors["loss_mask"]

    def _tensor(self, name: str, shard: int, start: int, stop: int) -> Tensor:
        if name not in TENSORS + TEACHER_TENSORS:
            raise ValueError(f"a store has no tensor {name!r}; it has {', '.join(TENSORS + TEACHER_TENSORS)}")
        if name in TEACHER_TENSORS and not self.has_teacher:
            raise ValueError(f"{self.path}: {name} is not there yet; the teacher pass has not finished")
        stored = self._slice(name, shard, start, stop)
        if name != "aux" or self.manifest["codec"] == "none":
            return stored
        return decode(stored, self._slice("aux_scale", shard, start, stop), DTYPES[self.manifest["dtype"]])

    def _slice(self, name: str, shard: int, start: int, stop: int) -> Tensor:
        raw, entries = self._map(teacher_name(shard) if name in TEACHER_TENSORS else shard_name(shard))
        entry = entries[name]
        if not 0 <= start < stop <= entry.shape[0]:
            raise ValueError(f"{self.path}: tokens {start}..{stop} of shard {shard}, which has {entry.shape[0]}")
        offset = entry.begin + start * entry.row_items * entry.dtype.itemsize
        # frombuffer makes a storage of this slice only: sending it to another process copies no shard.
        flat = torch.frombuffer(raw, dtype=entry.dtype, count=(stop - start) * entry.row_items, offset=offset)
        return flat.view(stop - start, *entry.shape[1:])

    def _map(self, file: str) -> tuple[np.ndarray, dict[str, Entry]]:
        if file not in self._mapped:
            path = self.path / SHARDS / file
            entries = read_header(path)
            # torch's private mapping keeps no file descriptor: a thousand shards need a thousand otherwise.
            mapped = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
            if len(self._mapped) >= _MAX_MAPPED:
                self._mapped.pop(next(iter(self._mapped)))
            self._mapped[file] = (mapped.numpy(), entries)
        return self._mapped[file]

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_mapped": {}}


def open_store(path: Path, *, need_teacher: bool = False, need_complete: bool = False) -> Store:
    """Open a store for reading. ValueError, with file and remedy, for whatever training could not trust.

    Checked: schema version, `last: post_norm`, dtype, the index, and that each shard has the size and shapes
    that the index tells (its bytes are hashed by `verify`). `need_teacher` refuses a store without a finished
    teacher pass, `need_complete` one whose extraction was interrupted.
    """
    path = Path(path)
    manifest = read_manifest(path)
    if need_complete and not manifest["complete"]:
        raise ValueError(f"{path}: extraction was interrupted; run extract.py again with the same settings first")
    records, broken = read_lines(path / INDEX)
    faults = [f"{INDEX} has {len(broken)} unreadable line(s)"] if broken else []
    lines = [ShardLine.parse(record, path / INDEX) for record in records]
    faults += [fault for line in lines if (fault := check_shard(path, line, manifest, hashed=False))]
    if faults:
        raise ValueError(
            f"{path}: {'; '.join(faults)}. Run extract.py again with the same settings: it sets the damaged "
            f"aside and makes only that again"
        )
    finished = teacher_lines(path, lines)
    if need_teacher and len(finished) < len(lines):
        todo = [line.file for line in lines if line.file not in finished]
        raise ValueError(
            f"{path}: the teacher pass has not finished ({len(todo)} of {len(lines)} shards to do, first "
            f"{todo[0]}); run extract.py again with the same settings"
        )
    return Store(path, manifest, lines, has_teacher=bool(lines) and len(finished) == len(lines))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m extract.store", description="Check or describe a store.")
    parser.add_argument("action", choices=("verify", "show"))
    parser.add_argument("dir", type=Path)
    chosen = parser.parse_args(arguments)
    try:
        return show(chosen.dir) if chosen.action == "show" else verify(chosen.dir).tell()
    except ValueError as error:
        logging.basicConfig(format="%(message)s")
        log.error("%s", error)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
