"""Checks and describes a store: what `python -m extract.store verify|show` runs, resume and opening too."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from extract.progress import closing_table
from extract.store_codec import FP8
from extract.store_format import (
    DTYPES,
    INDEX,
    QUARANTINE,
    SHARDS,
    TEACHER,
    ShardLine,
    read_lines,
    teacher_name,
)
from extract.store_manifest import read_manifest
from extract.store_space import size_text
from extract.store_tensors import read_header, sha256_of


def check_shard(path: Path, line: ShardLine, manifest: dict, *, hashed: bool | None) -> str | None:
    """What is wrong with a shard, or None. `hashed` None: hash it only if touched since it was written."""
    file = path / SHARDS / line.file
    if not file.exists():
        return f"{file} is missing"
    about = file.stat()
    if about.st_size != line.bytes:
        return f"{file} has {about.st_size} bytes, {INDEX} says {line.bytes}"
    try:
        found = {name: (entry.dtype, entry.shape) for name, entry in read_header(file).items()}
    except ValueError as error:
        return str(error)
    if found != _expected(line, manifest):
        return f"{file} does not hold the tensors that {INDEX} and the manifest tell"
    touched = about.st_mtime_ns != line.mtime_ns
    if (hashed or (hashed is None and touched)) and sha256_of(file) != line.sha256:
        return f"{file} was altered: its sha256 is not that of {INDEX}"
    return None


def _expected(line: ShardLine, manifest: dict) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    dtype, hidden, layers = DTYPES[manifest["dtype"]], manifest["hidden_size"], len(manifest["capture_layers"])
    coded = manifest["codec"] == "fp8"
    return {
        "offsets": (torch.int64, (len(line.samples) + 1,)),
        "input_ids": (torch.int32, (line.tokens,)),
        "aux": (FP8 if coded else dtype, (line.tokens, layers * hidden)),
        "last": (dtype, (line.tokens, hidden)),
        "loss_mask": (torch.uint8, (line.tokens,)),
    } | ({"aux_scale": (torch.float32, (line.tokens, layers))} if coded else {})


def next_number(path: Path) -> int:
    """The number of the next shard; numbers are never used twice, not even those of shards set aside."""
    used = [file.name.split(".")[0] for file in (path / SHARDS).iterdir()]
    return 1 + max((int(number) for number in used if number.isdecimal()), default=-1)


def teacher_lines(path: Path, lines: Sequence[ShardLine]) -> dict[str, dict]:
    """shard file -> line of teacher.jsonl, for the shards whose teacher file is there and belongs to them."""
    latest = {record["shard"]: record for record in read_lines(path / TEACHER)[0]}
    finished = {}
    for line in lines:
        record = latest.get(line.file)
        file = path / SHARDS / teacher_name(line.number)
        if (
            record
            and record["shard_sha256"] == line.sha256
            and file.exists()
            and file.stat().st_size == record["bytes"]
        ):
            finished[line.file] = record
    return finished


@dataclass(frozen=True)
class Report:
    """What verify found. `faults` is empty for a sound store."""

    path: Path
    faults: list[str]
    shards: int
    samples: int
    tokens: int
    bytes: int

    def tell(self) -> int:
        """Print the report; the exit status: 1 if there are faults."""
        rows = [
            ("shards", f"{self.shards}"),
            ("samples", f"{self.samples:,}"),
            ("tokens", f"{self.tokens:,}"),
        ]
        rows += [("hashed", size_text(self.bytes))] + [("fault", fault) for fault in self.faults]
        rows += [("result", f"{len(self.faults)} fault(s)" if self.faults else "sound")]
        closing_table(f"verify {self.path}", rows, None)
        return 1 if self.faults else 0


def verify(path: Path) -> Report:
    """Hash every byte of a store and compare it with index, manifest and teacher records."""
    path = Path(path)
    manifest = read_manifest(path)
    records, broken = read_lines(path / INDEX)
    lines = [ShardLine.parse(record, path / INDEX) for record in records]
    faults = [f"{path / INDEX}: {len(broken)} unreadable line(s)"] if broken else []
    for line in lines:
        fault = check_shard(path, line, manifest, hashed=True)
        faults += [fault] if fault else _inner_faults(path, line)
    faults += _teacher_faults(path, lines)
    known = {line.file for line in lines} | {teacher_name(line.number) for line in lines}
    shards = path / SHARDS
    faults += [
        f"{file} has no line in {INDEX}" for file in sorted(shards.glob("*.safetensors")) if file.name not in known
    ]
    ids = Counter(ref.id for line in lines for ref in line.refs())
    faults += [f"sample {id} is stored {times} times" for id, times in ids.items() if times > 1]
    total = sum(line.bytes for line in lines)
    return Report(path, faults, len(lines), sum(ids.values()), sum(line.tokens for line in lines), total)


def _inner_faults(path: Path, line: ShardLine) -> list[str]:
    """Whether the samples of the index lie in the shard as the index says."""
    from safetensors import safe_open  # the public reader, on purpose: other programs read stores with it

    file = path / SHARDS / line.file
    with safe_open(file, "pt") as shard:
        offsets, mask = shard.get_tensor("offsets"), shard.get_tensor("loss_mask")
    starts = [ref.start for ref in line.refs()] + [line.tokens]
    if offsets.tolist() != starts:
        return [f"{file}: its offsets are not the lengths of {INDEX}"]
    return [
        f"{file}: sample {ref.id} has another number of supervised tokens than {INDEX} says"
        for ref in line.refs()
        if int(mask[ref.start : ref.start + ref.tokens].sum()) != ref.supervised
    ]


def _teacher_faults(path: Path, lines: Sequence[ShardLine]) -> list[str]:
    finished = teacher_lines(path, lines)
    if not finished:
        return []
    faults = [
        f"{path / SHARDS / line.file}: its teacher file is missing" for line in lines if line.file not in finished
    ]
    for record in finished.values():
        file = path / SHARDS / record["file"]
        if sha256_of(file) != record["sha256"]:
            faults.append(f"{file} was altered: its sha256 is not that of {TEACHER}")
    return faults


def show(path: Path) -> int:
    """Print what a store holds."""
    path = Path(path)
    manifest = read_manifest(path)
    lines = [ShardLine.parse(record, path / INDEX) for record in read_lines(path / INDEX)[0]]
    refs = [ref for line in lines for ref in line.refs()]
    tokens, supervised = sum(ref.tokens for ref in refs), sum(ref.supervised for ref in refs)
    rows = [
        ("state", "complete" if manifest["complete"] else "extraction not finished"),
        (
            "capture layers",
            f"{manifest['capture_layers']}, hidden size {manifest['hidden_size']}, {manifest['dtype']}",
        ),
        ("codec", manifest["codec"]),
        ("shards", f"{len(lines)}, {size_text(sum(line.bytes for line in lines))}"),
        ("conversations", f"{len({ref.conversation for ref in refs}):,}"),
        ("samples", f"{len(refs):,}, of which greedy {sum(ref.temperature == 0 for ref in refs):,}"),
        ("tokens", f"{tokens:,}, supervised {supervised:,} ({supervised / max(tokens, 1):.0%})"),
        ("teacher pass", f"{len(teacher_lines(path, lines))} of {len(lines)} shards"),
        ("quarantined", f"{len({record['id'] for record in read_lines(path / QUARANTINE)[0]})}"),
    ]
    rows += [(f"must match: {key}", f"{value}") for key, value in manifest["must_match"].items()]
    closing_table(f"store {path}", rows, None)
    return 0
