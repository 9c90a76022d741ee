"""The journal of answers, responses.jsonl: generation is the dearest step, and nothing of it is done twice.

One JSON object a line: id, turn, prompt_ids, response_ids, finish_reason, temperature, top_p, seed,
verifier_sha256, source ("generated" | "given"). A line counts once it ends with a newline and is JSON; token
ids are kept verbatim.
"""

import fcntl
import json
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

log = logging.getLogger(__name__)

FIELDS = (
    "id",
    "turn",
    "prompt_ids",
    "response_ids",
    "finish_reason",
    "temperature",
    "top_p",
    "seed",
    "verifier_sha256",
    "source",
)

Record = dict[str, Any]


class Journal:
    """Appends answers durably and finds them again; only their places in the file are held in memory.

    Opening takes a lock (ValueError if another process has it) and moves a torn last line to <path>.torn.
    """

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise ValueError(f"{path}: another process is writing it; wait for it or stop it") from error
        self._places: dict[tuple[str, int], int] = {}
        self._end = 0
        self._read_places()

    def __contains__(self, key: tuple[str, int]) -> bool:
        return key in self._places

    def __len__(self) -> int:
        return len(self._places)

    def get(self, conversation_id: str, turn: int) -> Record:
        """The record of one turn; KeyError if it is not there."""
        place = self._places[conversation_id, turn]
        with self.path.open("rb") as file:
            file.seek(place)
            return json.loads(file.readline())

    def records(self) -> Iterator[Record]:
        """All records in the order in which they were written."""
        with self.path.open("rb") as file:
            for line in file:
                yield json.loads(line)

    def append(self, records: Sequence[Record]) -> None:
        """Writes the records of one batch and returns when they are on disk; after an error none is there."""
        data, places = b"", []
        for record in records:
            assert tuple(record) == FIELDS, tuple(record)
            key = (record["id"], record["turn"])
            assert key not in self._places, f"{key} is in the journal already"
            places.append((key, self._end + len(data)))
            data += json.dumps(record, ensure_ascii=True, separators=(",", ":")).encode() + b"\n"
        try:
            written = 0
            while written < len(data):
                written += self._file.write(data[written:])
            os.fsync(self._file.fileno())
        except OSError as error:
            self._file.truncate(self._end)
            raise OSError(
                error.errno,
                f"{self.path}: {len(data)} bytes could not be written ({error.strerror}); nothing finished "
                "is lost: make room and run the same command again",
            ) from error
        self._end += len(data)
        self._places.update(places)

    def close(self) -> None:
        """Releases the lock."""
        self._file.close()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read_places(self) -> None:
        # Binary lines end at b"\n" only; text lines would also end at separators inside JSON strings.
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                record = _parse(line)
                if record is None and file.read(1) == b"":
                    self._set_aside(line)
                    return
                if record is None:
                    raise ValueError(
                        f"{self.path}, line {number}: not a record of this journal; restore the file or "
                        "delete this line (its turn will be generated again)"
                    )
                key = (record["id"], record["turn"])
                if key in self._places:
                    raise ValueError(f"{self.path}, line {number}: turn {key} is there twice; delete one of them")
                self._places[key] = self._end
                self._end += len(line)

    def _set_aside(self, line: bytes) -> None:
        torn = self.path.with_name(self.path.name + ".torn")
        with torn.open("ab") as file:
            file.write(line + b"\n")
            os.fsync(file.fileno())
        self._file.truncate(self._end)
        os.fsync(self._file.fileno())
        log.warning(
            "%s: the last line was torn (%d bytes, moved to %s); its turn is redone",
            self.path,
            len(line),
            torn,
        )


def _parse(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    whole = line.endswith(b"\n") and isinstance(record, dict) and tuple(record) == FIELDS
    return record if whole else None
