"""The files of a store: names, lines of the index, and small files that survive a crash.

A store is a directory: manifest.json, index.jsonl (one line a shard), quarantine.jsonl, teacher.jsonl and
shards/NNNNN[.teacher].safetensors. A file appears whole or not at all: it is written under a temporary name,
fsynced and renamed, then its directory is fsynced. Only then is the line that makes it exist appended.
"""

import contextlib
import fcntl
import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from extract.durable import replace_file, sync

log = logging.getLogger(__name__)

MANIFEST, INDEX, TEACHER, QUARANTINE = "manifest.json", "index.jsonl", "teacher.jsonl", "quarantine.jsonl"
SHARDS, LOCK = "shards", ".lock"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
"""What states may be stored as. float16 is left out: large activations become inf in it."""


@dataclass(frozen=True)
class StoredSample:
    """One sample with its hidden states, on the CPU: T tokens, A captured layers, H verifier hidden size."""

    id: str
    conversation: str
    temperature: float
    input_ids: Sequence[int]
    loss_mask: Sequence[int]
    aux: Float[Tensor, "rows AH"]
    """Captured layers side by side, in the manifest's order; as many rows as tokens."""
    last: Float[Tensor, "rows_last H"]
    """Final hidden state after the verifier's final norm."""


@dataclass(frozen=True)
class SampleRef:
    """Where one sample lies: tokens `start` to `start + tokens` of shard number `shard`."""

    id: str
    conversation: str
    temperature: float
    shard: int
    start: int
    tokens: int
    supervised: int


@dataclass(frozen=True)
class ShardLine:
    """One line of index.jsonl."""

    file: str
    bytes: int
    sha256: str
    mtime_ns: int
    """When the shard was written: resume hashes again only what was touched since."""
    tokens: int
    samples: tuple[dict, ...]

    @property
    def number(self) -> int:
        return int(self.file.split(".")[0])

    @staticmethod
    def parse(record: dict, source: Path) -> "ShardLine":
        try:
            fields = {name: record[name] for name in ("file", "bytes", "sha256", "mtime_ns", "tokens")}
            return ShardLine(**fields, samples=tuple(record["samples"]))
        except KeyError as error:
            raise ValueError(f"{source}: a line lacks {error}; it is no index of this project") from error

    def refs(self) -> Iterator[SampleRef]:
        start = 0
        for sample in self.samples:
            yield SampleRef(shard=self.number, start=start, **sample)
            start += sample["tokens"]


def shard_name(number: int) -> str:
    return f"{number:05d}.safetensors"


def teacher_name(number: int) -> str:
    return f"{number:05d}.teacher.safetensors"


def append_line(path: Path, record: dict) -> None:
    """Append one JSON line and fsync it; if that fails nothing of the line stays behind."""
    line = json.dumps(record).encode() + b"\n"
    is_new = not path.exists()
    with path.open("ab", buffering=0) as file:
        before = file.tell()
        try:
            while line:
                line = line[file.write(line) :]
            os.fsync(file.fileno())
        except OSError:
            os.ftruncate(file.fileno(), before)
            raise
    if is_new:
        sync(path.parent)


def read_lines(path: Path) -> tuple[list[dict], list[bytes]]:
    """The records of a JSONL file, and the lines that are none (a torn last line, or damage).

    Lines end at "\\n" only: str.splitlines would also break at U+2028, U+2029 and U+0085 inside a text.
    """
    records, broken = [], []
    for line in path.read_bytes().split(b"\n") if path.exists() else []:
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict):
            records.append(record)
        else:
            broken.append(line)
    return records, broken


def repair_lines(path: Path) -> list[dict]:
    """read_lines for the one writer: lines that cannot be read are moved to <name>.torn, and told."""
    records, broken = read_lines(path)
    if broken:
        torn = path.with_suffix(".torn")
        with torn.open("ab") as file:
            file.write(b"\n".join(broken) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        log.warning("%s: %d unreadable line(s) moved to %s", path, len(broken), torn.name)
    if path.exists() and (broken or not path.read_bytes().endswith(b"\n")):
        replace_lines(path, records)
    return records


def replace_lines(path: Path, records: Sequence[dict]) -> None:
    replace_file(path, b"".join(json.dumps(record).encode() + b"\n" for record in records))


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the store against a second writer; the system lets go of it however the process dies."""
    path.mkdir(parents=True, exist_ok=True)
    with (path / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"{path} is being written by another process; wait for it, or choose another store directory"
            ) from error
        yield
