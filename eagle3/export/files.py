"""Reads a config.json whose values have the types that the code behind it counts on; whatever else is an error."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

KINDS: dict[str, Any] = {
    "architectures": list,
    "layer_types": list,
    "sglang_versions": list,
    "origin": dict,
    "rope_parameters": dict,
    "rope_scaling": dict,
    "text_config": dict,
    "verifier_family": str,
    "model_type": str,
    "torch_dtype": str,
    "dtype": str,
}
WORDS: dict[Any, str] = {list: "a list of names", dict: "an object", str: "a name"}


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object of a config.json; ValueError names the file, and a key of another type than it has."""
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: unreadable ({error}); export the drafter again") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file}: is no JSON object")
    for key, value in config.items():
        if key in KINDS and value is not None and not _is(value, KINDS[key]):
            raise ValueError(
                f"{file}: {key} is {value!r}, must be {WORDS[KINDS[key]]}; put it right, or export the drafter again"
            )
    return config


def _is(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and (kind is not list or all(isinstance(item, str) for item in value))


def required(config: Mapping[str, Any], kinds: Mapping[str, Any], file: Path, where: str) -> None:
    """Raises ValueError unless each key is there with a value of its type; lists hold whole numbers."""
    for key, kind in kinds.items():
        value: Any = config.get(key)
        if type(value) is not kind or (kind is list and not (value and all(type(item) is int for item in value))):
            raise ValueError(
                f"{file}: {where}{key} is {value!r}, which this program does not write; put it back, or train again"
            )
