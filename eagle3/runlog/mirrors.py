"""Mirrors: copies of the ledger's rows for people to look at. The ledger can rebuild every one of them.

A mirror may fail in any way without stopping training; `Guarded` counts its failures, and reconcile makes
them fatal at the end. Every mirror can say afterwards which rows it really holds.
"""

import csv
import enum
import logging
import math
import netrc
import os
import secrets
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal, Protocol, TypeVar
from urllib.parse import urlparse

import httpx
import wandb

from eagle3.runlog.ledger import Declared, Row
from eagle3.runlog.wandb_log import read_wandb

log = logging.getLogger(__name__)

Held = Counter[tuple[str, int, int]]
"""(split, step, number of values) of each row that a mirror holds."""

EXIT_RECORD_TIMEOUT_S = 30.0
FINISH_TIMEOUT_S = 600.0
LOGGED_FAILURES = 3

T = TypeVar("T")


class Mirror(Protocol):
    name: str

    def emit(self, row: Row) -> None: ...

    def close(self, ok: bool) -> None:
        """`ok` false marks the run as failed where the mirror can say so."""

    def held(self) -> Held:
        """Read back from disk after `close`: the rows of this attempt."""


class Guarded:
    """Keeps a mirror's failures away from training, and remembers them."""

    def __init__(self, mirror: Mirror) -> None:
        self.mirror, self.name = mirror, mirror.name
        self.failures: list[str] = []

    def emit(self, row: Row) -> None:
        self._try(f"{row.split} step {row.step}", lambda: self.mirror.emit(row))

    def close(self, ok: bool) -> None:
        self._try("close", lambda: self.mirror.close(ok))

    def held(self) -> Held:
        return self._try("read back", self.mirror.held) or Held()

    def _try(self, doing: str, action: Callable[[], T]) -> T | None:
        try:
            return action()
        except Exception as err:  # whatever a mirror raises, training goes on and reconcile tells
            self.failures.append(f"{doing}: {type(err).__name__}: {err}")
            if len(self.failures) <= LOGGED_FAILURES:
                log.error("mirror %s failed at %s; training goes on", self.name, doing, exc_info=True)
            return None


def writable_dir(path: Path) -> Path:
    """Makes the directory if need be. Raises ValueError when nothing can be written there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        # Asking the file system, not os.access, which is wrong for root and on read-only mounts.
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as err:
        raise ValueError(f"cannot write metrics to {path.absolute()}: {err.strerror}; choose another run dir") from err


class CsvMirror:
    """`<split>.csv` with one column per declared name, so that no header is ever rewritten."""

    name = "csv"

    def __init__(self, directory: Path, declared: Mapping[str, Declared], attempt: int) -> None:
        self.attempt, self.directory = attempt, writable_dir(directory)
        self.columns = {s: sorted(d.names) + sorted(d.optional) for s, d in declared.items()}
        self._files = {split: self._open(split) for split in declared}

    def _open(self, split: str) -> IO[str]:
        path = self.directory / f"{split}.csv"
        header = ["attempt", "step", "wall", *self.columns[split]]
        if path.exists() and path.stat().st_size:
            with path.open(newline="") as file:
                found = next(csv.reader(file))
            if found != header:
                raise ValueError(f"{path} has the columns {found}, this run has {header}; set the file aside")
            return path.open("a", newline="")
        file = path.open("w", newline="")
        csv.writer(file).writerow(header)
        return file

    def emit(self, row: Row) -> None:
        cells = [row.values.get(name, "") for name in self.columns[row.split]]
        csv.writer(self._files[row.split]).writerow([row.attempt, row.step, row.wall, *cells])
        self._files[row.split].flush()

    def close(self, ok: bool) -> None:
        for file in self._files.values():
            file.close()

    def held(self) -> Held:
        held = Held()
        for split, columns in self.columns.items():
            with (self.directory / f"{split}.csv").open(newline="") as file:
                for line in csv.DictReader(file):
                    if line["attempt"] == str(self.attempt):
                        held[split, int(line["step"]), sum(line[name] != "" for name in columns)] += 1
        return held


class TensorBoardMirror:
    """Event files under `<directory>/attempt_<n>`."""

    name = "tensorboard"

    def __init__(self, directory: Path, attempt: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as err:
            raise ValueError("tensorboard is not installed: pip install tensorboard, or switch the mirror off") from err
        self.directory = writable_dir(directory / f"attempt_{attempt}")
        self._writer = SummaryWriter(str(self.directory))

    def emit(self, row: Row) -> None:
        for name, value in row.flat().items():
            self._writer.add_scalar(name, value, row.step, walltime=row.wall)

    def close(self, ok: bool) -> None:
        self._writer.close()

    def held(self) -> Held:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

        values: Counter[tuple[str, int]] = Counter()
        for path in self.directory.glob("events.out.tfevents.*"):
            for event in EventFileLoader(str(path)).Load():
                values.update((value.tag.split("/", 1)[0], event.step) for value in event.summary.value)
        return Held({(split, step, count): 1 for (split, step), count in values.items()})


class WandbMirror:
    """One W&B run, held by its own handle: two jobs of a sweep in one process are two finished runs.

    Rows carry our step as a value, never as `step=`, which W&B drops when it falls (wandb issues 9449, 5913).
    """

    name = "wandb"

    def __init__(
        self,
        directory: Path,
        *,
        mode: Literal["offline", "online"],
        project: str,
        entity: str | None,
        group: str,
        name: str,
        job_type: str,
        tags: Sequence[str],
        config: Mapping[str, object],
    ) -> None:
        settings = wandb.Settings(
            silent=True, console="off", finish_timeout=FINISH_TIMEOUT_S, finish_timeout_raises=True
        )
        try:
            self.run = wandb.init(
                id=secrets.token_hex(4),  # said here, or WANDB_RUN_ID would make one run of a whole sweep
                reinit="create_new",
                mode=mode,
                dir=str(writable_dir(directory)),
                project=project,
                entity=entity,
                group=group,
                name=name,
                job_type=job_type,
                tags=list(tags),
                config=plain(config),
                settings=settings,
            )
        except wandb.Error as err:
            raise ValueError(f"W&B cannot start in mode {mode}: {err}; tracking=offline needs no network") from err
        self.log_file = Path(self.run.settings.sync_file)
        if not self.log_file.is_relative_to(directory.absolute()):
            self.run.finish(exit_code=1)
            raise ValueError(f"W&B writes to {self.log_file}, not below {directory.absolute()}; check WANDB_DIR")
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def where(self) -> str:
        """The link of an online run, or the command that uploads an offline one."""
        return self.run.url or f"wandb sync {os.path.relpath(self.log_file.parent)}"

    def emit(self, row: Row) -> None:
        self.run.log({"step": row.step, **row.flat()})

    def close(self, ok: bool) -> None:
        self.run.finish(exit_code=0 if ok else 1)

    def held(self) -> Held:
        history = read_wandb(self.log_file, timeout_s=EXIT_RECORD_TIMEOUT_S)
        if history.exit_code is None:
            raise RuntimeError(f"{self.log_file} has no exit record after {EXIT_RECORD_TIMEOUT_S:.0f} s")
        held = Held()
        for row in history.rows:
            names = [name for name in row if name != "step"]
            held[names[0].split("/", 1)[0] if names else "", int(row["step"]), len(names)] += 1
        return held


def check_wandb_ready(mode: str, *, timeout_s: float = 10.0) -> None:
    """Raises ValueError before anything is loaded if `mode` online lacks a key or a server that answers."""
    if mode != "online":
        return
    base_url = wandb.setup().settings.base_url  # environment and settings files included
    host = urlparse(base_url).hostname or base_url
    if not (os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE") or _netrc_has(host)):
        raise ValueError(f"tracking=online finds no W&B key for {host}: run `wandb login`, or use tracking=offline")
    try:
        httpx.get(base_url, timeout=timeout_s)
    except httpx.HTTPError as err:
        raise ValueError(f"tracking=online cannot reach {base_url} ({err}); use tracking=offline") from err


def _netrc_has(host: str) -> bool:
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        return path.exists() and netrc.netrc(path).authenticators(host) is not None
    except netrc.NetrcParseError as err:
        raise ValueError(f"{path} cannot be read: {err}") from err


def plain(value: Any, key: str = "config") -> Any:
    """Nested dicts, lists and scalars only: W&B shows anything else as one blob of text, or refuses it."""
    if isinstance(value, enum.Enum):
        return plain(value.value, key)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(k): plain(v, f"{key}.{k}") for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = value if isinstance(value, list | tuple) else sorted(value, key=str)
        return [plain(item, f"{key}[{i}]") for i, item in enumerate(items)]
    log.warning("%s is a %s; W&B gets its text", key, type(value).__name__)
    return str(value)
