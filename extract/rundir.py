"""A stage's run directory: who owns it, what config made it, and how it ended.

    run.json      config, attempts (each with its provenance); written before any work
    status.json   running, finished or failed, with the reason
    summary.json  the figures of the closing table
    .lock         held while a process works here

The directory's name comes from the config, so the same command finds it again: finished work is reused, unfinished
work goes on, and another config is refused instead of mixed in.
"""

import fcntl
import json
import traceback
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from extract.durable import replace_file

State = Literal["new", "unfinished", "finished"]
VOLATILE = ("tracking", "resume", "dry_run", "name", "cache_dir", "drafter_dir")
"""Settings that may change between two attempts: no result of any stage depends on them."""


@dataclass(frozen=True)
class RunDir:
    path: Path
    state: State
    """What an earlier attempt left here."""
    attempt: int
    """Number of this attempt, from 1."""
    inputs: Mapping[str, str]
    """Fingerprints of what the stage reads."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the figures, then the state: a summary exists before anything calls the run finished."""
        _write_json(self.path / "summary.json", summary)
        _write_json(self.path / "status.json", {"status": "finished", "attempt": self.attempt})

    def summary(self) -> dict[str, Any]:
        """Figures of the finished run."""
        return read_object(self.path / "summary.json")


@contextmanager
def open_run(
    path: Path,
    stage: str,
    config: Mapping[str, Any],
    inputs: Mapping[str, str],
    provenance: Mapping[str, Any],
    *,
    intact: bool = True,
    renews: bool = False,
    depends_on: Collection[str] | None = None,
) -> Iterator[RunDir]:
    """Owns `path` for one attempt. An exception marks the run as failed, leaves traceback.txt there, and goes on.

    `inputs` are fingerprints of what the stage reads (a store, a drafter): they must not change between attempts.
    A stage that `renews` is made again as a whole when they did: it leaves nothing that could be mixed.
    `intact` says whether what a finished run made elsewhere is still there; if not, the run is unfinished again.
    `depends_on` names the sections of `config` that the stage's result depends on; None: all but VOLATILE.

    Raises:
        ValueError: another process works here, or `path` was made by another config or from other inputs.
    """
    path.mkdir(parents=True, exist_ok=True)
    with owned(path):
        record = {"stage": stage, "config": config, "inputs": dict(inputs)}
        if renews and (path / "run.json").exists():
            intact = intact and _forget_inputs(path, inputs)
        run = _claim(path, record, provenance, intact, set(config if depends_on is None else depends_on))
        try:
            yield run
        except BaseException as error:
            if run.state != "finished":
                reason = f"{type(error).__name__}: {error}"
                _write_json(path / "status.json", {"status": "failed", "attempt": run.attempt, "reason": reason})
                (path / "traceback.txt").write_text(traceback.format_exc())
            raise


def join_run(path: Path) -> RunDir:
    """The attempt that rank 0 has opened, for the other ranks of the same training; they write nothing here."""
    record = saved_run(path)
    return RunDir(path, "unfinished", len(record["attempts"]), record["inputs"])


def saved_run(path: Path) -> dict[str, Any]:
    """What run.json says: stage, config, inputs and attempts.

    Raises:
        ValueError: `path` is no run directory.
    """
    if not (path / "run.json").is_file():
        what = "holds no run.json" if path.is_dir() else "is no directory"
        raise ValueError(f"{path.resolve()} {what}; give the run directory of a training, outputs/train/NAME-HASH")
    record = read_object(path / "run.json")
    kinds = {"stage": str, "config": dict, "inputs": dict, "attempts": list}
    wrong = [key for key, kind in kinds.items() if not isinstance(record.get(key), kind)]
    if wrong or not all(isinstance(attempt, dict) for attempt in record["attempts"]):
        raise ValueError(
            f"{path.resolve()} is no run directory: run.json lacks {', '.join(wrong) or 'attempts'}, or has something "
            "else there; restore it, or remove the directory"
        )
    return {key: record[key] for key in kinds}


def read_object(file: Path) -> dict[str, Any]:
    """A JSON object that a run left behind; ValueError names a file that holds none."""
    try:
        told = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{file.resolve()} cannot be read ({error}); restore it, or remove its directory") from error
    if not isinstance(told, dict):
        raise ValueError(f"{file.resolve()} is no JSON object; restore it, or remove its directory")
    return told


def _claim(
    path: Path, record: dict[str, Any], provenance: Mapping[str, Any], intact: bool, depends_on: set[str]
) -> RunDir:
    record["attempts"] = []
    state: State = "new"
    (path / "traceback.txt").unlink(missing_ok=True)
    if (path / "run.json").exists():
        old = saved_run(path)
        _refuse_other(path, old, record, depends_on)
        record["attempts"] = old["attempts"]
        state = "finished" if intact and _is_finished(path) else "unfinished"
    attempt = len(record["attempts"]) + 1
    if state == "finished":
        return RunDir(path, state, attempt, record["inputs"])
    record["attempts"].append(provenance)
    _write_json(path / "run.json", record)
    _write_json(path / "status.json", {"status": "running", "attempt": attempt})
    return RunDir(path, state, attempt, record["inputs"])


def _forget_inputs(path: Path, inputs: Mapping[str, str]) -> bool:
    """Makes `inputs` those of the run directory; False if it had others."""
    old = saved_run(path)
    if old["inputs"] == dict(inputs):
        return True
    _write_json(path / "run.json", old | {"inputs": dict(inputs)})
    return False


def _is_finished(path: Path) -> bool:
    status = path / "status.json"
    if not status.exists() or not (path / "summary.json").exists():
        return False
    return read_object(status).get("status") == "finished"


def _refuse_other(path: Path, old: Mapping[str, Any], new: Mapping[str, Any], depends_on: set[str]) -> None:
    sections = depends_on.difference(VOLATILE)
    before, after = (flat({key: run["config"].get(key) for key in sections}) for run in (old, new))
    before |= {f"input {key}": value for key, value in old["inputs"].items()}
    after |= {f"input {key}": value for key, value in new["inputs"].items()}
    changed = [
        f"  {key}: {before.get(key, 'absent')} there, {after.get(key, 'absent')} now"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]
    if old["stage"] != new["stage"]:
        changed.insert(0, f"  stage: {old['stage']} there, {new['stage']} now")
    if changed:
        raise ValueError(
            f"{path} belongs to another run:\n" + "\n".join(changed) + "\n"
            "Remove that directory, or choose another with hydra.run.dir=DIR (or another name=NAME)."
        )


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings under their dotted names."""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            out |= flat(value, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = list(value) if isinstance(value, tuple) else value
    return out


@contextmanager
def owned(path: Path) -> Iterator[IO[str]]:
    """Holds a run directory against every other process; ValueError if one works there."""
    with (path / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another process is working in {path}; wait for it, or choose another directory with hydra.run.dir=DIR"
            ) from None
        yield file


def is_owned(path: Path) -> bool:
    """Whether a process works in a run directory."""
    try:
        with owned(path):
            return False
    except ValueError:
        return True


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    replace_file(path, json.dumps(content, indent=2).encode() + b"\n")
