"""The config of a script, composed as Hydra composes it on the command line."""

from functools import lru_cache
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

from eagle3.config import Config, typed

CONF = Path(__file__).resolve().parents[1] / "conf"
SCRIPTS = ("extract", "train", "evaluate", "serve")


def composed(*overrides: str, script: str = "train") -> DictConfig:
    """Raw config without Hydra's own node, which stays where interpolations look for it."""
    with initialize_config_dir(str(CONF), version_base="1.3", job_name=script):
        raw = compose(script, list(overrides), return_hydra_config=True)
    HydraConfig.instance().set_config(raw)
    with open_dict(raw):
        del raw["hydra"]
    return raw


def config(*overrides: str, script: str = "train") -> Config:
    """Checked config."""
    return typed(composed(*overrides, script=script), HydraConfig.get().runtime.choices)


@lru_cache
def _values() -> DictConfig:
    return composed()


def changed(**values: object) -> DictConfig:
    """The quickstart's raw config with some values replaced (a double underscore stands for a dot), without Hydra."""
    raw = _values().copy()
    for key, value in values.items():
        OmegaConf.update(raw, key.replace("__", "."), value, force_add=True)
    return raw
