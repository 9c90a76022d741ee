"""The store's writer against what the machine can do with the same bytes, in memory and on disk.

    python -m benchmarks.store_writer [--gib 8] [--disk FOLDER]

One sample after another is added as capture adds them, until the last fsync. Beside it, in the same run, in one thread
each: the same bytes written and fsynced shard by shard, hashed, and copied. What an engine does to get its states is
no part of it.
"""

import argparse
import hashlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

import torch
from rich import box, get_console
from rich.table import Table

from benchmarks.record import write_result
from extract.store import StoredSample, create_or_resume

HIDDEN, LAYERS = 4096, (2, 16, 29)
"""Of an 8B model: 32 KiB a token."""
TOKEN_BYTES = (len(LAYERS) + 1) * HIDDEN * 2
DIFFERENT = 16
"""Samples that are made; they are added again and again under other names."""
BAR = 31_000
"""Tokens a second that an engine hands over on one GPU, about 1 GB/s."""


def made(length: int) -> list[StoredSample]:
    generator = torch.Generator().manual_seed(0)
    samples = []
    for number in range(DIFFERENT):
        states = torch.randn(length, (len(LAYERS) + 1) * HIDDEN, generator=generator).bfloat16()
        aux, last = states[:, : len(LAYERS) * HIDDEN].contiguous(), states[:, len(LAYERS) * HIDDEN :].contiguous()
        samples.append(StoredSample(f"s{number}", "c", 0.0, [1] * length, [1] * length, aux, last))
    return samples


def ours(samples: Sequence[StoredSample], count: int, folder: Path, shard_bytes: int, codec: str) -> None:
    manifest = {"last": "post_norm", "dtype": "bfloat16", "codec": codec, "capture_layers": list(LAYERS),
                "hidden_size": HIDDEN, "must_match": {}}  # fmt: skip
    with create_or_resume(folder, manifest, shard_bytes=shard_bytes) as writer:
        for number, sample in enumerate(islice(cycle(samples), count)):
            writer.add(replace(sample, id=f"s{number}"))
        writer.flush()


def plain(samples: Sequence[StoredSample], count: int, folder: Path, shard_bytes: int) -> None:
    """write and fsync, a shard after the other."""
    a_shard = max(1, shard_bytes // (samples[0].aux.nbytes + samples[0].last.nbytes))
    for begin in range(0, count, a_shard):
        with (folder / f"{begin}").open("wb", buffering=0) as file:
            for sample in islice(cycle(samples), begin, min(begin + a_shard, count)):
                for states in (sample.aux, sample.last):
                    file.write(_raw(states))
            os.fsync(file.fileno())


def hashed(samples: Sequence[StoredSample], count: int) -> None:
    digest = hashlib.sha256()
    for sample in islice(cycle(samples), count):
        digest.update(_raw(sample.aux))
        digest.update(_raw(sample.last))


def copied(samples: Sequence[StoredSample], count: int) -> None:
    target = torch.empty_like(samples[0].aux)
    for sample in islice(cycle(samples), count * (len(LAYERS) + 1) // len(LAYERS)):  # aux is not all of a sample
        target.copy_(sample.aux)


def _raw(states: torch.Tensor) -> memoryview:
    return states.view(torch.uint8).numpy().data


def seconds(work: Callable[[Path], None], folder: Path) -> float:
    """Of the work in a new folder below `folder`, which is gone afterwards."""
    directory = Path(tempfile.mkdtemp(dir=folder))
    try:
        began = time.monotonic()
        work(directory)
        return time.monotonic() - began
    finally:
        shutil.rmtree(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=8.0, help="of states in one measurement")
    parser.add_argument("--length", type=int, default=2000, help="tokens of a sample")
    parser.add_argument("--shard-mib", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="a folder in memory")
    parser.add_argument("--disk", type=Path, default=Path("outputs"), help="a folder on disk")
    asked = parser.parse_args()
    asked.disk.mkdir(parents=True, exist_ok=True)
    samples = made(asked.length)
    count = max(1, round(asked.gib * 2**30 / (TOKEN_BYTES * asked.length)))
    shard_bytes = asked.shard_mib << 20
    rows = []
    for _ in range(asked.repeats):
        for where, folder in (("memory", asked.memory), ("disk", asked.disk)):
            ways: dict[str, Callable[[Path], None]] = {
                "ours": lambda path: ours(samples, count, path, shard_bytes, "none"),
                "ours, fp8": lambda path: ours(samples, count, path, shard_bytes, "fp8"),
                "write and fsync": lambda path: plain(samples, count, path, shard_bytes),
            }
            if where == "memory":
                ways |= {"sha256": lambda _: hashed(samples, count), "memcpy": lambda _: copied(samples, count)}
            for way, work in ways.items():
                took = seconds(work, folder)
                tokens = count * asked.length
                rows.append({"where": where, "way": way, "seconds": took, "tokens_per_s": tokens / took,
                             "gb_per_s": tokens * TOKEN_BYTES / took / 1e9})  # fmt: skip
    show(rows, write_result("store_writer", rows, shard_mib=asked.shard_mib, cpus=os.cpu_count()))


def show(rows: Sequence[dict], path: Path) -> None:
    table = Table("", "where", "GB/s of states", "tokens/s", "of write and fsync", f"of {BAR:,}", box=box.SIMPLE)
    of = {(row["where"], row["way"]): row for row in reversed(rows)}
    medians = {key: statistics.median(r["gb_per_s"] for r in rows if (r["where"], r["way"]) == key) for key in of}
    for (where, way), rate in sorted(medians.items()):
        tokens = rate * 1e9 / TOKEN_BYTES
        table.add_row(way, where, f"{rate:.2f}", f"{tokens:,.0f}", f"{rate / medians[where, 'write and fsync']:.2f}",
                      f"{tokens / BAR:.2f}")  # fmt: skip
    console = get_console()
    console.print(table)
    console.print(f"written to {path}")


if __name__ == "__main__":
    main()
