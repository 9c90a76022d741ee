"""A verifier's directory as an export needs it: sizes and family from its config.json, and the embedding.

Nothing is loaded and no code of the model's is run, so a config.json that was copied from another machine will do.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from eagle3.export.files import read_json
from extract import weights

SIZES = {
    "hidden_size": "hidden_size",
    "vocab_size": "vocab_size",
    "num_layers": "num_hidden_layers",
    "max_position_embeddings": "max_position_embeddings",
}


@dataclass(frozen=True)
class VerifierDir:
    directory: Path
    model_type: str
    """Of the text model: the family by which engines number layers."""
    architectures: tuple[str, ...]
    hidden_size: int
    vocab_size: int
    num_layers: int
    max_position_embeddings: int

    def sha256(self) -> str:
        """As `extract.verifier.VerifierSpec` has it, over config.json and weights; ValueError where they are absent."""
        files = weights.weight_files(self.directory)
        return weights.files_fingerprint([self.directory / "config.json", *files.values()])

    def embedding(self) -> Float[Tensor, "V H"]:
        """As stored; ValueError where the weights are not there or hold none."""
        files = weights.weight_files(self.directory)
        key = weights.find_key(files, weights.EMBEDDING_NAMES) or weights.find_key(files, weights.HEAD_NAMES)
        if key is None:
            raise ValueError(f"{self.directory}: no token embedding among its {len(files)} tensors")
        return weights.read_matrix(files, key, (self.vocab_size, self.hidden_size))


def read_verifier(directory: Path) -> VerifierDir:
    """ValueError names the file, and the key that it lacks."""
    file = Path(directory) / "config.json"
    if not file.is_file():
        raise ValueError(f"{file}: not found; --verifier is the verifier's Hugging Face directory")
    config: dict[str, Any] = read_json(file)
    text = config.get("text_config") or config
    absent = [key for key in ("model_type", *SIZES.values()) if key not in text]
    if absent:
        raise ValueError(f"{file}: lacks {', '.join(absent)}; --verifier is a decoder-only language model")
    sizes = {name: text[key] for name, key in SIZES.items()}
    wrong = [f"{SIZES[name]} is {size!r}" for name, size in sizes.items() if type(size) is not int or size < 1]
    if wrong or not isinstance(text["model_type"], str):
        told = ", ".join(wrong) or f"model_type is {text['model_type']!r}"
        raise ValueError(f"{file}: {told}, which no decoder-only language model has; copy the verifier's own")
    architectures = tuple(config["architectures"]) if config.get("architectures") else ()
    return VerifierDir(Path(directory), text["model_type"], architectures, **sizes)
