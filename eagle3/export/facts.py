"""A drafter directory as an engine sees it before it loads a weight: config.json, the tensors' headers, the id maps."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eagle3.drafter import DrafterShape
from eagle3.export.config import CONFIG, WEIGHTS
from eagle3.export.files import read_json
from eagle3.export.network import read_network
from eagle3.export.verifier import VerifierDir

MAPS = ("d2t", "t2d")
EMBEDDING = "embed_tokens.weight"


class VerifierSizes(Protocol):
    """What is asked of a verifier; `extract.verifier.VerifierSpec` and `eagle3.export.verifier.VerifierDir` say it."""

    @property
    def model_type(self) -> str: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...


@dataclass(frozen=True)
class Contents:
    file: Path
    """config.json."""
    config: dict[str, Any]
    nested: dict[str, Any]
    """eagle_config."""
    tensors: dict[str, tuple[tuple[int, ...], str]]
    """Shape and safetensors' dtype by name."""
    maps: dict[str, Tensor]
    """d2t and t2d, as far as they are there."""
    trained: DrafterShape | None
    """What the weights say of themselves."""
    own_embedding: bool
    """Whether an embedding is in the file that is not known to be the verifier's, bit by bit."""
    verifier: VerifierSizes | None

    @property
    def family(self) -> str | None:
        """`model_type` of the verifier; None where nobody says it."""
        return self.config.get("verifier_family") if self.verifier is None else self.verifier.model_type


def read_contents(directory: Path, verifier: VerifierSizes | None = None) -> Contents:
    """ValueError names a file that is absent or unreadable."""
    config, file = read_json(directory / CONFIG), directory / WEIGHTS
    nested = config.get("eagle_config")
    if not file.is_file():
        raise ValueError(f"{file}: not found; a drafter's weights are in this one file")
    try:
        with safe_open(file, framework="pt") as stored:
            slices = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118 - no mapping
            return Contents(
                directory / CONFIG,
                config,
                nested if isinstance(nested, dict) else {},
                {name: (tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()},
                {name: stored.get_tensor(name) for name in MAPS if name in slices},
                read_network(stored.metadata(), file),
                EMBEDDING in slices and not is_verifiers(stored.get_tensor(EMBEDDING), verifier),
                verifier,
            )
    except SafetensorError as error:
        raise ValueError(f"{file}: not a whole safetensors file ({error}); export the drafter again") from None


def is_verifiers(embedding: Tensor, verifier: VerifierSizes | None) -> bool:
    """Whether this is the verifier's embedding in this tensor's precision; False where its weights are not at hand."""
    if isinstance(verifier, VerifierDir):
        with suppress(ValueError):
            theirs = verifier.embedding()
            return theirs.shape == embedding.shape and torch.equal(theirs.to(embedding.dtype), embedding)
    return False
