"""The folder in memory through which a server's states come: made and taken down here, filled by `extract.plugin`.

FOLDER/site/        what the server's Python finds: the plugin and its entry point, never our repository
FOLDER/told.json    what the plugin shall capture, named by EAGLE3_CAPTURE
FOLDER/READY.PID.json, FAILED.PID     its word, from every rank
FOLDER/parts/       RID.START.safetensors: rows START, START + 1, ... of one request, deleted when they are read
"""

import contextlib
import fcntl
import json
import math
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from extract import plugin
from extract.engines.base import EngineError
from extract.store_tensors import Entry, read_header

NAME = "eagle3-"
PACKAGE = "eagle3_capture"
ENTRY_POINTS = f"[sglang.srt.plugins]\n{PACKAGE} = {PACKAGE}:register\n"
METADATA = f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 1\n"
FALLBACK = {
    "name": PACKAGE,
    "target_modules": ["logits_processor", "*.logits_processor"],
    "hook_factory": f"{PACKAGE}.install:fallback",
    "config": {},
}
"""For `--forward-hooks`, where SGLang knows no plugins."""
SETTLE_S = 30.0
"""Seconds from a request's answer until its last rows must be there: a few batches may be on their way."""
HEADER_BYTES = 4096
"""More than the headers of a sequence's parts take."""


class Parts:
    """States as they come: the reading side of such a folder, whoever has made it.

    Attributes:
        folder: of the server.
        parts: where it writes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.parts = folder, folder / "parts"
        self._failures: list[tuple[float, str]] = []
        self._failing = threading.Lock()
        self._given_up: set[str] = set()

    def close(self) -> None:
        """Lets go of the folder; harmless when called twice."""

    def ready(self) -> list[dict[str, Any]]:
        """What the ranks said that are ready."""
        return [json.loads(file.read_text()) for file in sorted(self.folder.glob("READY.*.json"))]

    def failure(self, since: float) -> str | None:
        """Why a rank could not write rows, if that was after the monotonic time `since`. Told once, it may go on."""
        with self._failing:
            for file in self.folder.glob("FAILED.*"):
                if file.suffix != ".unused":
                    self._failures.append((time.monotonic(), file.read_text().strip()))
                    file.replace(file.with_suffix(".unused"))
            return next((why for when, why in reversed(self._failures) if when >= since), None)

    def take(
        self, rid: str, ids: Sequence[int], *, width: int, began: float, check: Callable[[], None]
    ) -> list[Float[Tensor, "n W"]]:
        """The states of a request that has been answered, piece by piece; their files are gone, the memory is not yet.

        Args:
            ids: what was sent; the rows must be of these very tokens.
            width: numbers a token.
            began: monotonic time at which the request was sent.
            check: raises if it makes no sense to wait any longer.

        Raises:
            EngineError: rows are missing after `SETTLE_S`, or are not what was asked for.
        """
        taken: list[Tensor] = []
        done = 0
        deadline = time.monotonic() + SETTLE_S
        pause = 0.0005
        while done < len(ids):
            file = self.parts / f"{rid}.{done}.safetensors"
            if file.exists():
                taken.append(_read(file, ids[done:], width))
                done += len(taken[-1])
                continue
            if (why := self.failure(began)) is not None:
                raise EngineError(f"SGLang could not hand over states: {why}")
            if time.monotonic() > deadline:
                raise EngineError(self._what_is_missing(rid, done, len(ids)))
            check()
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        return taken

    def discard(self, rid: str) -> None:
        """Deletes what there is of a request that was given up, and what comes of it before the next `sweep`."""
        self._given_up.add(rid)
        self.sweep()

    def sweep(self) -> None:
        """Deletes late rows of requests that were given up: nobody else would, and the memory is counted."""
        for rid in list(self._given_up):
            for file in self.parts.glob(f"{rid}.*.safetensors"):
                file.unlink(missing_ok=True)

    def _what_is_missing(self, rid: str, done: int, wanted: int) -> str:
        starts = sorted(int(file.name.split(".")[1]) for file in self.parts.glob(f"{rid}.*.safetensors"))
        why = "; rows that begin later mean that a prefix cache is on" if starts else ""
        return f"{done} of {wanted} rows came within {SETTLE_S:g} s of the answer; parts begin at {starts}{why}"


class Spool(Parts):
    """A new folder below `root`, of a server that is started here.

    A context manager; at its end the folder is gone, and what dead runs have left is gone at its beginning.

    Attributes:
        site: what goes on the server's PYTHONPATH.
        told: the file that EAGLE3_CAPTURE must name.
    """

    def __init__(self, root: Path, *, budget_bytes: int) -> None:
        if not root.is_dir():
            raise ValueError(f"server.capture.spool={root} is no directory; name one in memory, such as /dev/shm")
        _remove_left_overs(root)
        super().__init__(Path(tempfile.mkdtemp(prefix=NAME, dir=root)))
        self.site, self.told = self.folder / "site", self.folder / "told.json"
        self.budget_bytes = budget_bytes
        self._lock = (self.folder / "lock.new").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        (self.folder / "lock.new").replace(self.folder / "lock")  # whoever finds it free knows that this run is dead
        self.parts.mkdir()
        _install(self.site)

    def __enter__(self) -> "Spool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Deletes the folder; harmless when called twice."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()

    def tell(self, *, layers: Sequence[int], layer_ids: Sequence[int] | None, prefix: str, groups: int) -> None:
        """Writes what the plugin shall do.

        Args:
            layers: capture layers k, which the model must resolve `layer_ids` to.
            layer_ids: what SGLang is told for them; None: a drafter tells it, and the plugin only looks.
            prefix: of the requests whose states are wanted.
            groups: of data-parallel attention; 1 without it.
        """
        ids = None if layer_ids is None else list(layer_ids)
        told = {"folder": str(self.folder), "layers": list(layers), "layer_ids": ids, "prefix": prefix,
                "groups": groups, "budget_bytes": self.budget_bytes}  # fmt: skip
        self.told.write_text(json.dumps(told))


class Budget:
    """Bytes that requests under way may take: who asks for more waits, so that files in memory cannot grow."""

    def __init__(self, total: int) -> None:
        self.total = self._left = total
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def of(self, size: int) -> Iterator[None]:
        """Holds `size` bytes while inside; ValueError if there are not so many."""
        if size > self.total:
            raise ValueError(
                f"one sequence takes {size:,} bytes on its way, and server.capture.spool_mib allows for "
                f"{self.total:,}; raise it, or lower extraction.max_len"
            )
        with self._changed:
            self._changed.wait_for(lambda: self._left >= size)
            self._left -= size
        try:
            yield
        finally:
            with self._changed:
                self._left += size
                self._changed.notify_all()


@dataclass(frozen=True)
class Width:
    """What a token's states take: numbers, and bytes with its id."""

    numbers: int
    dtype: torch.dtype

    def bytes_of(self, tokens: int) -> int:
        """Of a sequence, in a few parts."""
        return tokens * (self.numbers * self.dtype.itemsize + 4) + HEADER_BYTES


def _install(site: Path) -> None:
    """The plugin as an installed package: copies, for a server may outlive a change of the checkout."""
    source = Path(plugin.__file__).parent
    shutil.copytree(source, site / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    info = site / f"{PACKAGE}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text(ENTRY_POINTS)


def _read(file: Path, ids: Sequence[int], width: int) -> Float[Tensor, "n W"]:
    """Maps and deletes a part; `ids` begin with its tokens."""
    try:
        entries = read_header(file)
        mapped = torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8)
        states, tokens = (_tensor(mapped, entries[name]) for name in ("states", "input_ids"))
    except (ValueError, KeyError) as error:
        raise EngineError(f"{file.name} is no whole part: {error}") from error
    finally:
        file.unlink()
    if tuple(states.shape) != (len(tokens), width) or not len(tokens):
        raise EngineError(f"{file.name} has states {list(states.shape)} for {len(tokens)} tokens, not {width} numbers")
    if tokens.tolist() != list(ids[: len(tokens)]):
        raise EngineError(f"{file.name} holds the states of other tokens than were sent")
    return states


def _tensor(mapped: UInt8[Tensor, " bytes"], entry: Entry) -> Tensor:
    flat = torch.frombuffer(mapped.numpy(), dtype=entry.dtype, count=math.prod(entry.shape), offset=entry.begin)
    return flat.view(entry.shape)


def _remove_left_overs(root: Path) -> None:
    """Folders of runs that were killed together with whoever should have taken them down."""
    for lock in root.glob(f"{NAME}*/lock"):
        with contextlib.suppress(OSError), lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
