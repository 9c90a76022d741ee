"""Reads a W&B run back from its local transaction log (`run-<id>.wandb`), the only proof of what W&B holds.

The file is a LevelDB log: 7 bytes of file header, then blocks of 32 KiB with records of
(crc32 u32, length u16, type u8, data). A record that crosses a block is cut into FIRST, MIDDLE, LAST chunks.
"""

import json
import struct
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]  # made at import time

FILE_HEADER_BYTES = 7
BLOCK_BYTES = 32 * 1024
CHUNK_HEADER = struct.Struct("<IHB")
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


@dataclass(frozen=True)
class WandbHistory:
    """What a transaction log holds."""

    rows: list[dict[str, int | float]]
    """One dict per `run.log` call, without W&B's own keys (those that begin with `_`)."""
    exit_code: int | None
    """None: the run was not finished."""


def read_wandb(path: Path, *, timeout_s: float = 0.0) -> WandbHistory:
    """Reads the log, waiting up to `timeout_s` for the exit record: `run.finish()` returns before it.

    Raises ValueError when a whole chunk fails its checksum.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        history = _read(path)
        if history.exit_code is not None or time.monotonic() >= deadline:
            return history
        time.sleep(0.05)


def _read(path: Path) -> WandbHistory:
    history = WandbHistory([], None)
    for data in _records(path):
        record = Record.FromString(data)
        if record.HasField("exit"):
            return WandbHistory(history.rows, record.exit.exit_code)
        if record.HasField("history"):
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            history.rows.append({k: json.loads(v) for k, v in items.items() if not k.startswith("_")})
    return history


def _records(path: Path) -> Iterator[bytes]:
    """The whole records of the file; an unfinished one at the end is left out."""
    if not path.exists():
        return
    data = path.read_bytes()
    position, parts = FILE_HEADER_BYTES, b""
    while position + CHUNK_HEADER.size <= len(data):
        left_in_block = BLOCK_BYTES - position % BLOCK_BYTES
        if left_in_block < CHUNK_HEADER.size:
            position += left_in_block
            continue
        checksum, length, kind = CHUNK_HEADER.unpack_from(data, position)
        start = position + CHUNK_HEADER.size
        chunk = data[start : start + length]
        if kind == 0 or len(chunk) < length:
            return
        if zlib.crc32(chunk, zlib.crc32(bytes([kind]))) != checksum:
            raise ValueError(f"{path}: damaged chunk at byte {position}")
        parts = chunk if kind in (FULL, FIRST) else parts + chunk
        position = start + length
        if kind in (FULL, LAST):
            yield parts
