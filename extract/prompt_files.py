"""Raw samples out of a file or a Hugging Face dataset, one at a time, each with its place for messages.

A sample that cannot be read is a Row with a fault, so that it does not stop the others. JSON never passes
through Arrow here: values whose type differs from row to row (tool arguments, late strings) do no harm.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

HUB_PREFIX = "hf:"
FORMS = "JSON lines (.jsonl), a JSON array (.json), .parquet, or hf:<org>/<dataset>"


@dataclass(frozen=True)
class Row:
    """One raw sample: its place ("line 7") and its value, or the fault why there is none."""

    place: str
    value: Any
    fault: str | None = None


def read_rows(source: str, *, split: str | None) -> Iterator[Row]:
    """The rows of a source in order; ValueError names the path and the remedy if it cannot be read at all."""
    if source.startswith(HUB_PREFIX):
        return _hub_rows(source, split)
    path = existing_file(source)
    if split is not None:
        raise ValueError(f"split={split!r} is for hf: datasets, but the prompts are the file {path}; leave split null")
    if path.suffix == ".jsonl":
        return _json_lines(path)
    if path.suffix == ".json":
        return _json_array(path)
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    raise ValueError(f"prompts file {path}: unknown ending {path.suffix!r}; supported are {FORMS}")


def source_sha256(source: str, *, split: str | None = None) -> str:
    """SHA-256 of what the source holds: the file's bytes, or every row of the dataset split."""
    digest = hashlib.sha256()
    if source.startswith(HUB_PREFIX):
        for row in _hub_rows(source, split):
            digest.update(json.dumps(row.value, sort_keys=True, default=str).encode() + b"\n")
        return digest.hexdigest()
    with existing_file(source).open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def existing_file(source: str) -> Path:
    path = Path(source).expanduser().absolute()
    if not source or path.is_dir():
        raise ValueError(f"prompts source {source!r} ({path}) is a directory; name a file: {FORMS}")
    if not path.is_file():
        raise ValueError(f"prompts file not found: {source!r} (looked for {path}); give the path of {FORMS}")
    return path


def _json_lines(path: Path) -> Iterator[Row]:
    """Lines end at \\n only: text may hold U+2028, U+2029 or U+0085, which str.splitlines() would cut at."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                yield _parse_line(f"line {number}", line)


def _parse_line(place: str, line: bytes) -> Row:
    try:
        return Row(place, json.loads(line.decode("utf-8")))
    except UnicodeDecodeError as error:
        return Row(place, None, f"not UTF-8 (byte {error.start} of the line)")
    except (ValueError, RecursionError) as error:
        return Row(place, None, f"not valid JSON ({error})")


def _json_array(path: Path) -> Iterator[Row]:
    try:
        value = json.loads(path.read_bytes().decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # several objects one after another: JSON lines under the other name
            yield from _json_lines(path)
            return
        raise ValueError(
            f"prompts file {path}, line {error.lineno}: not valid JSON ({error.msg}); repair it"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"prompts file {path}: not UTF-8 at byte {error.start}; save it as UTF-8") from error
    if not isinstance(value, list):
        raise ValueError(
            f"prompts file {path}: the top level is a {type(value).__name__}, expected an array of samples"
        )
    for number, sample in enumerate(value, start=1):
        yield Row(f"item {number}", sample)


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(f"prompts file {path} needs pyarrow: pip install pyarrow") from error
    number = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=1024):
            for sample in batch.to_pylist():
                number += 1
                yield Row(f"row {number}", without_nulls(sample))
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"prompts file {path}, after row {number}: not readable as parquet ({error})") from error


def _hub_rows(source: str, split: str | None) -> Iterator[Row]:
    if split is None:
        raise ValueError(f"prompts {source} is a dataset: say which split (for example split=train)")
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"prompts {source} needs the package datasets: pip install datasets") from error
    try:
        dataset = datasets.load_dataset(source.removeprefix(HUB_PREFIX), split=split)
    except (OSError, ValueError, httpx.HTTPError) as error:
        raise ValueError(f"prompts {source}: cannot be had ({error}); check name, split and network") from error
    for number, sample in enumerate(dataset, start=1):
        yield Row(f"row {number}", without_nulls(sample))


def without_nulls(value: Any) -> Any:
    """Arrow gives every record the keys of all records, null where it had none: take those out again."""
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None or k == "content"}
    if isinstance(value, list):
        return [without_nulls(v) for v in value]
    return value
