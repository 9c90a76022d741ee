"""Drafters that other programs wrote, read as ours: speculators' format, and `layers.0` for the decoder layer.

What this network cannot compute is refused, never dropped: such a drafter would load and draft something else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eagle3.drafter import DrafterShape
from eagle3.export.config import ARCHITECTURE, CONFIG, LAYER_IDS, WEIGHTS, shape_of
from eagle3.export.directory import DTYPES, find_drafter, misfits
from eagle3.export.facts import EMBEDDING, is_verifiers
from eagle3.export.files import read_json
from eagle3.export.speculators import is_speculators, own_config
from eagle3.export.verifier import VerifierDir
from eagle3.vocab import DraftVocab

NAMES_OF_LLAMA = (ARCHITECTURE, "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
"""`architectures` under which other programs write this network."""


@dataclass(frozen=True)
class Source:
    """A drafter by its own tensor names."""

    form: str
    """What it is, for people."""
    shape: DrafterShape
    tensors: dict[str, Tensor]
    """Without the embedding."""

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[next(name for name in self.tensors if name.endswith("fc.weight"))].dtype

    def own_tensors(self) -> dict[str, Tensor]:
        """By our names; the id maps are completed, as some programs write d2t alone."""
        tensors = {own_name(name): tensor for name, tensor in self.tensors.items()}
        if "d2t" in tensors and "t2d" not in tensors:
            tensors["t2d"] = DraftVocab.from_offsets(tensors["d2t"], self.shape.vocab_size).t2d
        return tensors


def own_name(name: str) -> str:
    return name.removeprefix("model.").replace("layers.0.", "midlayer.", 1)


def read_source(directory: Path, *, capture_layers: Sequence[int] | None, verifier: VerifierDir | None) -> Source:
    """A drafter of another program.

    Args:
        capture_layers: k, for a config.json that names none.
        verifier: needed where the drafter brings an embedding: it must be the verifier's, bit by bit.

    Raises:
        ValueError: a network that this program does not compute, or tensors that are not that network's.
    """
    directory = find_drafter(directory)
    file = directory / CONFIG
    config = read_json(file)
    speculators = is_speculators(config)
    flat = own_config(config, file) if speculators else _as_ours(config, file)
    shape = shape_of(_with_layers(flat, capture_layers, file), file)
    tensors = _read_weights(directory / WEIGHTS)
    embeddings = [name for name in tensors if own_name(name) == EMBEDDING]
    for name in embeddings:
        _refuse_trained_embedding(tensors.pop(name), directory / WEIGHTS, verifier)
    if any("layers.0." in name for name in tensors):
        form = "speculators' format" if speculators else "tensors named layers.0"
    else:
        form = "another program's drafter"
    source = Source(form, shape, tensors)
    _refuse_misfits(source, directory / WEIGHTS)
    return source


def _as_ours(config: dict[str, Any], file: Path) -> dict[str, Any]:
    """A flat config.json with what every reader of a Llama takes for granted."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names or names[0] not in NAMES_OF_LLAMA:
        raise ValueError(f"{file}: architectures is {names}, must be one of {', '.join(NAMES_OF_LLAMA)}")
    flat = {**config, "architectures": [ARCHITECTURE]}
    if "head_dim" not in config and {"hidden_size", "num_attention_heads"} <= config.keys():
        flat["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    if config.get("target_hidden_size") == config.get("hidden_size"):
        flat.pop("target_hidden_size", None)
    return flat


def _with_layers(config: dict[str, Any], capture_layers: Sequence[int] | None, file: Path) -> dict[str, Any]:
    if capture_layers is None:
        return config
    if config.get(LAYER_IDS) is not None or (config.get("eagle_config") or {}).get(LAYER_IDS) is not None:
        raise ValueError(f"{file} names its layers itself; leave out --capture-layers")
    return {**config, "capture_layers": list(capture_layers)}


def _read_weights(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file}: not a whole safetensors file ({error}); fetch the drafter again") from None


def _refuse_trained_embedding(theirs: Tensor, file: Path, verifier: VerifierDir | None) -> None:
    """Engines share the verifier's embedding, so a drafter's own one is lost; it may be no other."""
    if verifier is None:
        raise ValueError(
            f"{file} brings {EMBEDDING}: give the verifier's directory with --verifier, to see that it is the same"
        )
    verifier.embedding()  # names what is missing, where the weights are not there
    if not is_verifiers(theirs, verifier):
        raise ValueError(
            f"{file}: its {EMBEDDING} {list(theirs.shape)} is not that of {verifier.directory}: it was trained with "
            "the drafter, or is broken, and SGLang would put the verifier's in its place"
        )


def _refuse_misfits(source: Source, file: Path) -> None:
    floats = {tensor.dtype for tensor in source.tensors.values() if tensor.is_floating_point()}
    if len(floats) != 1 or not floats <= set(DTYPES):
        raise ValueError(f"{file}: its weights are in {sorted(map(str, floats))}, must be in one of {list(DTYPES)}")
    codes = {torch.int64: "I64", torch.bool: "BOOL", **DTYPES}
    found = {
        name: (tuple(t.shape), codes[t.dtype] if t.dtype in codes else str(t.dtype))
        for name, t in source.own_tensors().items()
    }
    faults = misfits(found, source.shape, DTYPES[floats.pop()])
    if faults:
        raise ValueError(f"{file}: its tensors are not those of its config.json: {'; '.join(faults)}")
