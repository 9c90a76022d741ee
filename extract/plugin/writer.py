"""A thread that writes captured rows to files in memory (tmpfs), whole or not at all, and never more than fit.

Two bounds keep the server from running away: a few batches wait in a queue, and the files take a budget of bytes. When
either is used up the forward pass waits until somebody has read and deleted files.
"""

import json
import os
import queue
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

QUEUED = 4
"""Batches on their way from the GPU to files; each has its own pinned memory."""
TICK_S = 0.002
RESERVED_BYTES = 4096
CODES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


@dataclass(frozen=True)
class Part:
    """Rows [begin, stop) of a batch are tokens start, start + 1, ... of the request `rid`."""

    rid: str
    start: int
    begin: int
    stop: int


@dataclass(frozen=True)
class Rows:
    """States [T, (A+1)*H] and ids [T] int32 on the host, complete once `event` has happened."""

    states: Tensor
    ids: Tensor
    parts: Sequence[Part]
    event: Any


class Writer:
    """Writes parts to `folder`/parts as RID.START.safetensors; `folder`/FAILED.PID says why it gave up."""

    def __init__(self, folder: Path, *, budget_bytes: int) -> None:
        self.parts_folder, self.budget_bytes = folder / "parts", budget_bytes
        self._failed = folder / f"FAILED.{os.getpid()}"
        # Its page is taken now, for when memory is full.
        self._failed.with_suffix(".unused").write_bytes(b" " * RESERVED_BYTES)
        self._queue: queue.Queue[Rows] = queue.Queue(QUEUED)
        threading.Thread(target=self._run, daemon=True, name="eagle3 capture").start()

    def put(self, rows: Rows) -> None:
        """Hands a batch over; waits while too much is under way."""
        self._queue.put(rows)

    def fail(self, why: str) -> None:
        """Leaves word for whoever waits for parts; only the first reason is kept."""
        unused = self._failed.with_suffix(".unused")
        if unused.exists():
            with unused.open("r+b") as file:
                file.write(why.encode()[:RESERVED_BYTES])
            unused.replace(self._failed)

    def _run(self) -> None:
        while True:
            rows = self._queue.get()
            try:
                if rows.event is not None:
                    rows.event.synchronize()
                for part in rows.parts:
                    self._write(part, rows)
            except (OSError, RuntimeError) as error:
                self.fail(f"{type(error).__name__}: {error}")

    def _write(self, part: Part, rows: Rows) -> None:
        states, ids = rows.states[part.begin : part.stop], rows.ids[part.begin : part.stop]
        pieces = part_bytes(states, ids)
        size = sum(len(piece) for piece in pieces)
        while self._used() + size > self.budget_bytes:
            time.sleep(TICK_S)
        file = self.parts_folder / f"{part.rid}.{part.start}.safetensors"
        temporary = file.with_suffix(".tmp")
        try:
            with temporary.open("wb", buffering=0) as raw:
                for piece in pieces:
                    while len(piece):
                        piece = piece[raw.write(piece) :]
            temporary.replace(file)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    def _used(self) -> int:
        total = 0
        for entry in os.scandir(self.parts_folder):
            try:
                total += entry.stat().st_size
            except FileNotFoundError:  # it was read and deleted meanwhile
                continue
        return total


def part_bytes(states: Tensor, ids: Tensor) -> list[memoryview]:
    """A safetensors file of both, in pieces that are no copies: the library's own writer holds the GIL as it copies.

    Format: https://huggingface.co/docs/safetensors (eight bytes of length, a JSON header, the tensors).
    """
    rows = states.view(torch.uint8).reshape(-1).numpy().data
    tokens = ids.view(torch.uint8).reshape(-1).numpy().data
    header = {
        "states": {"dtype": CODES[states.dtype], "shape": list(states.shape), "data_offsets": [0, len(rows)]},
        "input_ids": {"dtype": "I32", "shape": list(ids.shape),
                      "data_offsets": [len(rows), len(rows) + len(tokens)]},
    }  # fmt: skip
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return [memoryview(struct.pack("<Q", len(text)) + text), rows, tokens]
