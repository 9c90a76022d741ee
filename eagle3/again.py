"""Going on with a run, or repeating one: every setting comes from its run.json.

Beside `resume=RUN_DIR` or `from_run=RUN_DIR` a command line may change what no result depends on, and nothing else.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3.config import Config, as_dict, from_values
from eagle3.runlog import provenance
from extract.rundir import saved_run

log = logging.getLogger(__name__)

MAY_DIFFER = ("tracking", "dry_run")
SAME_CODE = ("git_sha", "source_sha256", "versions", "device")
"""What a repeat is compared in; where it differs, the last bits may too."""
ABSENT = "absent"


def settled(config: Config, run_dir: Path, overrides: Sequence[str]) -> tuple[Config, Path]:
    """The config to train with and the directory to train in, where `resume` or `from_run` say so."""
    if config.resume is not None:
        earlier = Path(config.resume).absolute()
        return saved_settings("resume", earlier, config, overrides), earlier
    if config.from_run is not None:
        return saved_settings("from_run", Path(config.from_run).absolute(), config, overrides), run_dir
    return config, run_dir


def saved_settings(key: str, run_dir: Path, asked: Config, overrides: Sequence[str]) -> Config:
    """The config of `run_dir` with what `overrides` may change in it; `asked` is what they were composed to.

    Raises:
        ValueError: no training is there, or a setting differs that its result depends on.
    """
    record = saved_run(run_dir)
    if record["stage"] != "train":
        raise ValueError(f"{key}={run_dir} is a run of {record['stage']}.py; give one of train.py")
    saved, now = record["config"], as_dict(asked)
    differing = []
    for path in (override.partition("=")[0].lstrip("+~") for override in overrides):
        if path == key:
            continue
        before, after = _at(saved, path), _at(now, path)
        if path.split(".")[0] in MAY_DIFFER:
            _put(saved, path, after)
        elif after is ABSENT:
            differing.append(f"  {path} brings settings of its own")
        elif before != after:
            differing.append(f"  {path}: {before} there, {after} now")
    if differing:
        raise ValueError(
            f"{key}={run_dir} takes its settings from there, and these differ:\n" + "\n".join(differing) + "\n"
            f"Leave them out (only {', '.join(MAY_DIFFER)} may change), or start a run without {key}."
        )
    return from_values(saved)


def require_same_inputs(run_dir: Path, inputs: Mapping[str, str]) -> None:
    """A repeat reads what the run read; other code or versions are told.

    Raises:
        ValueError: the store or the drafter to start from is another.
    """
    record = saved_run(run_dir)
    changed = [f"  {name}: {record['inputs'].get(name)} there, {value} now" for name, value in inputs.items()
               if record["inputs"].get(name) != value]  # fmt: skip
    if changed:
        raise ValueError(f"from_run={run_dir} cannot be repeated, for what it read has changed:\n" + "\n".join(changed))
    before, now = record["attempts"][-1], provenance()
    for name in SAME_CODE:
        if before.get(name) != now[name]:
            log.warning("%s differs from that of %s: %s there, %s now", name, run_dir, before.get(name), now[name])


def _at(tree: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path; ABSENT where there is none, as for experiment=…."""
    value: Any = tree
    for part in path.split("."):
        value = value[part] if isinstance(value, Mapping) and part in value else ABSENT
    return value


def _put(tree: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for part in parents:
        tree = tree[part]
    tree[last] = value
