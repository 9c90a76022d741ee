"""Safetensors files of a store, written piece by piece without a concatenation in memory.

A file appears whole or not at all: it is written under a temporary name, fsynced and renamed, then its
directory is fsynced. The library itself wants every tensor in one buffer before it writes.
"""

import contextlib
import hashlib
import json
import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from extract.durable import sync

MAX_HEADER_BYTES = 100_000_000
"""The safetensors library refuses longer headers."""
_CODES = {
    torch.int64: "I64",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_BLOCK_BYTES = 1 << 26
"""Large, for whoever has written or hashed one waits for the interpreter's lock: other threads may hold it for 5 ms."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a shard: its bytes lie at [begin, begin + row_bytes * shape[0]) of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def row_items(self) -> int:
        return math.prod(self.shape[1:])


def write_tensors(path: Path, tensors: Mapping[str, Sequence[Tensor]]) -> tuple[int, str]:
    """Write a safetensors file whose tensors are given as pieces along their first axis; its size and sha256."""
    written = write_temporary(path, tensors)
    publish(path)
    return written


def temporary_of(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def publish(path: Path) -> None:
    """Makes the temporary file of `path` that file, for good."""
    temporary_of(path).replace(path)
    sync(path.parent)


def write_temporary(path: Path, tensors: Mapping[str, Sequence[Tensor]]) -> tuple[int, str]:
    """`write_tensors` up to, and without, `publish`; OSError leaves nothing behind.

    The pieces go to disk one after another from where they are, so nothing is concatenated in memory; a second
    thread hashes them meanwhile. Order the names by falling item size: then every tensor is aligned, whatever
    the shapes.
    """
    head = _header(tensors)
    with ThreadPoolExecutor(1, thread_name_prefix="sha256") as beside:
        digest = beside.submit(_sha256, head, tensors)
        num_bytes = _write(temporary_of(path), head, tensors)
        return num_bytes, digest.result()


def _write(path: Path, head: bytes, tensors: Mapping[str, Sequence[Tensor]]) -> int:
    try:
        with path.open("wb") as file:
            file.write(head)
            for pieces in tensors.values():
                for block in _blocks(pieces):
                    file.write(block)
            num_bytes = file.tell()
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        raise
    return num_bytes


def _sha256(head: bytes, tensors: Mapping[str, Sequence[Tensor]]) -> str:
    digest = hashlib.sha256(head)
    for pieces in tensors.values():
        for block in _blocks(pieces):
            digest.update(block)
    return digest.hexdigest()


def _header(tensors: Mapping[str, Sequence[Tensor]]) -> bytes:
    entries: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, pieces in tensors.items():
        shape = [sum(len(piece) for piece in pieces), *pieces[0].shape[1:]]
        end = begin + math.prod(shape) * pieces[0].element_size()
        entries[name] = {"dtype": _CODES[pieces[0].dtype], "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    assert len(text) <= MAX_HEADER_BYTES, "a shard holds few big tensors, never one a sample"
    return struct.pack("<Q", len(text)) + text


def _blocks(pieces: Sequence[Tensor]) -> Iterator[memoryview]:
    for piece in pieces:
        raw = piece.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
        for begin in range(0, len(raw), _BLOCK_BYTES):
            yield raw[begin : begin + _BLOCK_BYTES]


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file; ValueError with its name if it is cut off, altered or foreign."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise ValueError(f"{path}: {size} bytes are no safetensors file")
        (length,) = struct.unpack("<Q", prefix)
        if not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"{path}: header of {length} bytes in a file of {size}")
        try:
            raw = json.loads(file.read(length))
            entries = {name: _entry(about, 8 + length) for name, about in raw.items() if name != "__metadata__"}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: unreadable header ({error})") from error
    end = max((e.begin + math.prod(e.shape) * e.dtype.itemsize for e in entries.values()), default=8 + length)
    if end != size:
        raise ValueError(f"{path}: {size} bytes, but its header describes {end}")
    return entries


def _entry(about: dict, data_begin: int) -> Entry:
    dtype, shape, (begin, end) = _DTYPES[about["dtype"]], tuple(about["shape"]), about["data_offsets"]
    if end - begin != math.prod(shape) * dtype.itemsize or not shape or min(shape) < 0 or begin < 0:
        raise ValueError(f"offsets {begin}..{end} do not fit shape {shape}")
    return Entry(dtype, shape, data_begin + begin)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
