"""Names of run and sweep directories: resolvers for conf/, by which the same command finds its directory again."""

import hashlib
import json
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

IDENTITY = {
    "extract": ("verifier", "server", "extraction", "store", "seed"),
    "train": ("verifier", "extraction", "drafter", "optimizer", "data", "hardware", "store", "seed"),
    "evaluate": ("verifier", "server", "extraction", "evaluation", "hardware", "drafter_dir", "seed"),
    "serve": ("verifier", "server", "hardware", "serving", "drafter_dir"),
}
"""The sections that a stage's result depends on: its run directory is named by them."""


def run_id(stage: str, *, _root_: DictConfig) -> str:
    """Resolver `${run_id:train}`: the experiment's name and a hash of what the stage depends on.

    The same command finds its directory again and goes on there; another setting gets another directory.
    """
    names = IDENTITY[stage]
    try:
        plain = {name: _resolved(_root_[name]) for name in names}
    except OmegaConfBaseException:  # no directory is used then: `typed` refuses this config, and names the key
        plain = {"unresolved": OmegaConf.to_yaml(_root_)}
    name = "unnamed" if OmegaConf.is_missing(_root_, "name") else _root_["name"]
    return f"{name}-{_short_hash(plain)}"


def run_dir(stage: str, *, _root_: DictConfig) -> str:
    """Resolver `${run_dir:train}`: the directory of this run, or that of the run which `resume` goes on with."""
    told = {key: None if OmegaConf.is_missing(_root_, key) else _root_[key] for key in ("resume", "from_run")}
    if told["resume"] is not None:
        # What cannot be resumed must not leave its traces in the directory of some other run.
        return told["resume"] if (Path(told["resume"]) / "run.json").exists() else f"outputs/{stage}/refused"
    if not OmegaConf.is_missing(_root_, "dry_run") and _root_["dry_run"] is True:
        return f"outputs/{stage}/dry-run"  # which is removed at the end: a run of this config may be at work
    if told["from_run"] is not None:
        return f"outputs/{stage}/{Path(told['from_run']).resolve().name}-again"
    return f"outputs/{stage}/{run_id(stage, _root_=_root_)}"


def hydra_subdir(*, _root_: DictConfig) -> str:
    """Resolver `${hydra_subdir:}`: where Hydra saves its view of a config; that of the first attempt stays."""
    return ".hydra" if OmegaConf.is_missing(_root_, "resume") or _root_["resume"] is None else ".hydra/resumed"


def _resolved(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def sweep_id(name: str, overrides: ListConfig) -> str:
    """Resolver `${sweep_id:${name},${hydra.overrides.task}}`: the same sweep command finds its directory again.

    It is cached and Hydra hands the cache on to the jobs, whose own name and overrides must not count here.
    """
    return f"{name}-{_short_hash(sorted(overrides))}"


def _short_hash(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]


OmegaConf.register_new_resolver("run_id", run_id, replace=True)
OmegaConf.register_new_resolver("run_dir", run_dir, replace=True)
OmegaConf.register_new_resolver("hydra_subdir", hydra_subdir, replace=True)
OmegaConf.register_new_resolver("sweep_id", sweep_id, use_cache=True, replace=True)
