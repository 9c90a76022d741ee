"""Damages a drafter directory in one place, for tests of what reads it."""

import json
from collections.abc import Callable
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor


def config_of(directory: Path) -> dict:
    return json.loads((directory / "config.json").read_text())


def edit_config(directory: Path, **changes: object) -> None:
    """Sets keys of config.json, null included; a name with a dot is one in eagle_config; ... removes a key."""
    config = config_of(directory)
    for name, value in changes.items():
        place = config["eagle_config"] if name.startswith("eagle_config.") else config
        key = name.removeprefix("eagle_config.")
        if value is ...:
            del place[key]
        else:
            place[key] = value
    (directory / "config.json").write_text(json.dumps(config))


def edit_tensors(directory: Path, *, word: bool = True, **changes: Tensor | Callable[[Tensor], Tensor] | None) -> None:
    """Changes tensors (None removes one; __ stands for a dot). Without `word` the weights say nothing of themselves."""
    file = directory / "model.safetensors"
    with safe_open(file, framework="pt") as stored:
        metadata = stored.metadata() if word else None
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    for name, change in changes.items():
        key = name.replace("__", ".")
        if change is None:
            del tensors[key]
        else:
            tensors[key] = change(tensors[key]).contiguous() if callable(change) else change
    save_file(tensors, file, metadata=metadata)
