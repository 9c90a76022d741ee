"""A weight file's own word on its network, in the metadata of model.safetensors.

Most of what makes the network (RoPE's base, the norm's epsilon, the layers it reads, what the next step is fed) leaves
no trace in tensor shapes: a config.json that was changed, or copied from elsewhere, would be served without a word.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from eagle3.drafter import DrafterShape
from eagle3.export.config import SIZES

NETWORK = "network"


def network_json(shape: DrafterShape) -> str:
    """What is stored under `NETWORK`."""
    return json.dumps(asdict(shape), sort_keys=True)


def read_network(metadata: Mapping[str, str] | None, file: Path) -> DrafterShape | None:
    """The network that a weight file names; None for one that another program wrote, ValueError for a broken one."""
    if metadata is None or NETWORK not in metadata:
        return None
    try:
        values = json.loads(metadata[NETWORK])
        return DrafterShape(**{**values, "capture_layers": tuple(values["capture_layers"])})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file}: its metadata names no network ({error}); export the drafter again") from None


def sort_metadata(file: Path) -> None:
    """Puts the keys of a weight file's metadata in order: safetensors writes them as they come, and files are hashed.

    The header is 8 bytes of length and then JSON, padded with blanks (https://github.com/huggingface/safetensors).
    """
    with file.open("r+b") as stored:
        length = int.from_bytes(stored.read(8), "little")
        header = json.loads(stored.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        ordered = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(length)
        assert len(ordered) == length, "the same keys and values in another order"
        stored.seek(8)
        stored.write(ordered)


def contradictions(said: DrafterShape, trained: DrafterShape) -> Iterator[tuple[str, Any, Any]]:
    """(key, config.json's value, the weights' value) wherever a config.json is not that of its weights."""
    keys = {name: key for key, name in SIZES.items()}
    for field in fields(DrafterShape):
        ours, theirs = getattr(said, field.name), getattr(trained, field.name)
        if ours != theirs:
            yield keys.get(field.name, field.name), ours, theirs
