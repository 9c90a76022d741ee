"""Single tensors of a Hugging Face directory and fingerprints of its files, without loading the model."""

import difflib
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

EMBEDDING_NAMES = (
    "embed_tokens",
    "embeddings",
    "word_embeddings",
    "wte",
    "tok_embeddings",
    "embed_in",
    "embedding",
)
HEAD_NAMES = ("lm_head", "embed_out", "output")

_NOT_TEXT = re.compile(r"(^|\.)(vision|visual|audio|image)|vision_|multi_modal|position|token_type")
_IN_A_LAYER = re.compile(r"(^|\.)((layers|h|blocks)\.\d+|mtp)\.")
"""Prediction layers stored after the last decoder layer (DeepSeek, Kimi) hold copies of both."""

WHOLE_FILE_BYTES = 1 << 30
SAMPLE_BLOCKS, SAMPLE_BLOCK_BYTES = 256, 4096


def weight_files(directory: Path) -> dict[str, Path]:
    """Tensor name -> file, from the index or from the single file; every file is known to exist."""
    index, single = directory / INDEX, directory / SINGLE
    if index.is_file() and single.is_file():
        # transformers would read the one, servers the other
        raise ValueError(f"{directory}: holds both {SINGLE} and {INDEX}; remove the one that is not the verifier's")
    if index.is_file():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        missing = sorted({name for name in weight_map.values() if not (directory / name).is_file()})
        if missing:
            raise ValueError(f"{index}: names {missing}, not found beside it; download the verifier again")
        return {key: directory / name for key, name in weight_map.items()}
    if not single.is_file():
        there = sorted(p.name for p in directory.iterdir())
        raise ValueError(
            f"{directory}: neither {SINGLE} nor {INDEX} is there (files: {there}); "
            "the verifier's weights must be safetensors: load and save_pretrained it once with transformers"
        )
    return dict.fromkeys(_keys(single), single)


def _keys(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except SafetensorError as error:
        raise ValueError(f"{path}: not a whole safetensors file ({error}); download the verifier again") from error


def find_key(files: dict[str, Path], names: Sequence[str]) -> str | None:
    """The one key `<anything>.<name>.weight` of the text model's own tensors, or None; two are an error."""
    wanted = re.compile(rf"(^|\.)({'|'.join(names)})\.weight$")
    found = [key for key in files if wanted.search(key) and not _NOT_TEXT.search(key) and not _IN_A_LAYER.search(key)]
    if len(found) > 1:
        raise ValueError(f"{files[found[0]].parent}: {sorted(found)} could each be the tensor named one of {names}")
    return found[0] if found else None


def near_keys(files: Iterable[str], names: Sequence[str], count: int = 5) -> list[str]:
    """The stored keys outside the layers that look most like one of the names: for error messages."""
    outside = sorted(key for key in files if not _IN_A_LAYER.search(key))
    ranked = sorted(outside, key=lambda key: -max(_likeness(key, name) for name in names))
    return ranked[:count]


def _likeness(key: str, name: str) -> float:
    return max(difflib.SequenceMatcher(None, part, name).ratio() for part in key.split("."))


def read_matrix(files: dict[str, Path], key: str, shape: tuple[int, int]) -> Float[Tensor, "V H"]:
    """One stored tensor; ValueError naming file and key unless it is a plain float matrix of this shape."""
    path = files[key]
    try:
        with safe_open(path, framework="pt") as file:
            tensor = file.get_tensor(key)
    except SafetensorError as error:
        raise ValueError(f"{path}: {key} cannot be read ({error}); download the verifier again") from error
    if tuple(tensor.shape) != shape or not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
        raise ValueError(
            f"{path}: {key} is {tensor.dtype} {list(tensor.shape)}, but the config says vocab_size x "
            f"hidden_size = {list(shape)} in 16 bits or more; embedding and head must be stored whole"
        )
    if not torch.isfinite(tensor.sum(dtype=torch.float64)):
        raise ValueError(f"{path}: {key} holds NaN or inf; download the verifier again")
    return tensor


def file_fingerprint(path: Path) -> str:
    """SHA-256 of a file up to 1 GiB; of a larger one its size, its first MiB and 256 blocks spread over it.

    A terabyte of weights is told apart in a second: any retrained tensor changes some of the blocks.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= WHOLE_FILE_BYTES:
            while block := file.read(1 << 22):
                digest.update(block)
            return digest.hexdigest()
        digest.update(file.read(1 << 20))
        for i in range(SAMPLE_BLOCKS):
            file.seek((size - SAMPLE_BLOCK_BYTES) * i // (SAMPLE_BLOCKS - 1))
            digest.update(file.read(SAMPLE_BLOCK_BYTES))
    return digest.hexdigest()


def files_fingerprint(paths: Iterable[Path]) -> str:
    """One SHA-256 over names and contents of several files, whatever their order."""
    digest = hashlib.sha256()
    for path in sorted(set(paths), key=lambda p: p.name):
        digest.update(f"{path.name}\0{file_fingerprint(path)}\n".encode())
    return digest.hexdigest()
