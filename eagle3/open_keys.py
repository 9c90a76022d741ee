"""Sections that take any key: `server.flags.tp_size=8`, without the `+` that Hydra wants before a key it does not know.

What such a section may hold only an engine knows, so a YAML file cannot list it. All other sections stay closed: a typo
there is an error.
"""

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

OPEN = ("hardware.env", "hardware.flags", "server.env", "server.flags")
NAME = "open_keys"
"""Among the defaults in conf/base.yaml, after the groups: sections keep the order in which those name their keys."""


def register() -> None:
    """Makes `NAME` known to Hydra: empty sections whose flag outlives the merge with what is chosen from conf/."""
    node = OmegaConf.create({})
    for key in OPEN:
        OmegaConf.update(node, key, {}, force_add=True)
        OmegaConf.set_struct(OmegaConf.select(node, key), False)
    ConfigStore.instance().store(name=NAME, node=node)


register()
