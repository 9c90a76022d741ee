"""How a run is shown: its name, group and config, kept in `runlog.json` so that every mirror can be made again."""

import enum
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from eagle3.runlog.ledger import Declared
from eagle3.runlog.mirrors import CsvMirror, Mirror, TensorBoardMirror
from extract.durable import replace_file

log = logging.getLogger(__name__)

SHOWN_NAME = "runlog.json"
MirrorName = Literal["csv", "tensorboard", "wandb"]


@dataclass(frozen=True)
class Shown:
    """What people see of one attempt. `config` is nested and plain."""

    mode: Literal["offline", "online", "local"]
    project: str
    entity: str | None
    group: str
    name: str
    job_type: str
    tags: tuple[str, ...]
    config: Mapping[str, object]
    columns: Mapping[str, list[list[str]]]
    """By split: the names that are in every row, and those that may be absent."""

    @property
    def declared(self) -> dict[str, Declared]:
        return {split: Declared(frozenset(names), frozenset(optional)) for split, (names, optional) in
                self.columns.items()}  # fmt: skip

    def write(self, run_dir: Path) -> None:
        replace_file(run_dir / SHOWN_NAME, json.dumps(asdict(self), indent=2).encode() + b"\n")


def read_shown(run_dir: Path) -> Shown:
    """Raises ValueError for a directory that is no run's."""
    try:
        told = json.loads((run_dir / SHOWN_NAME).read_text())
        return replace(Shown(**told), tags=tuple(told["tags"]))
    except FileNotFoundError as err:
        raise ValueError(f"{run_dir.absolute()} has no {SHOWN_NAME}; give a run directory of this program") from err
    except (ValueError, TypeError, KeyError) as err:
        raise ValueError(f"{run_dir.absolute() / SHOWN_NAME} cannot be read: {err}") from err


def open_mirror(name: MirrorName, run_dir: Path, shown: Shown) -> Mirror:
    """An empty mirror. Raises ValueError when it cannot start."""
    if name == "csv":
        return CsvMirror(run_dir / "csv", shown.declared)
    if name == "tensorboard":
        return TensorBoardMirror(run_dir / "tensorboard")
    from eagle3.runlog.wandb_mirror import WandbMirror

    return WandbMirror(run_dir, shown)


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
