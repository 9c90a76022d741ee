"""The verifier: the model that is made faster. Found, described, hashed and loaded here, and nowhere else."""

import logging
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from jaxtyping import Float
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from extract import gguf, weights
from extract.quiet import quiet_loading
from extract.verifier_config import end_of_turn_ids, read_config, says_tied, template_sha256, text_sizes

log = logging.getLogger(__name__)

HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "*.model",
    "tiktoken*",
)

LAYER_LISTS = ("layers", "h", "blocks")
FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f")


@dataclass(frozen=True)
class VerifierSpec:
    """All that later stages ask about the verifier; `path` is always a Hugging Face directory."""

    name: str
    path: Path
    sha256: str
    tokenizer_sha256: str
    chat_template_sha256: str
    model_type: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    hidden_act: str
    rope_parameters: dict = field(hash=False)
    max_position_embeddings: int
    tied_head: bool
    end_of_turn_ids: tuple[int, ...]
    source: str
    trust_remote_code: bool
    chat_template: str | None = None
    """The text of the template that overrides the tokenizer's own; None: the tokenizer's own is used."""


def resolve_verifier(
    path: str,
    *,
    name: str,
    cache_dir: Path,
    chat_template: str | None,
    trust_remote_code: bool,
    revision: str | None = None,
) -> VerifierSpec:
    """Finds the verifier (downloads or dequantises it if need be) and describes it without loading weights.

    path: a Hugging Face directory, a hub id, a .gguf file, or package:<package>/<file>.gguf.
    chat_template: a .jinja file in place of the tokenizer's template, or None.
    Raises ValueError, naming the file or key and the remedy, for what cannot be a verifier.
    """
    if trust_remote_code:
        log.warning(
            "verifier.trust_remote_code=true: Python code that comes with %s WILL BE RUN on this machine",
            path,
        )
    directory = _find_directory(path, cache_dir, revision, trust_remote_code)
    config = read_config(directory, trust_remote_code)
    override = _read_template(chat_template)
    files = weights.weight_files(directory)
    tokenizer = _read_tokenizer(directory, trust_remote_code)
    head_key = weights.find_key(files, weights.HEAD_NAMES)
    return VerifierSpec(
        name=name,
        path=directory,
        sha256=weights.files_fingerprint([directory / "config.json", *files.values()]),
        tokenizer_sha256=weights.files_fingerprint(_tokenizer_files(directory)),
        chat_template_sha256=template_sha256(override, tokenizer, directory),
        tied_head=head_key is None and says_tied(config),
        end_of_turn_ids=end_of_turn_ids(directory, config, tokenizer),
        source=path,
        trust_remote_code=trust_remote_code,
        chat_template=override,
        **text_sizes(config.get_text_config(), directory),
    )


def load_tokenizer(spec: VerifierSpec) -> PreTrainedTokenizerBase:
    """The verifier's tokenizer, with the chat template in force."""
    tokenizer = _read_tokenizer(spec.path, spec.trust_remote_code)
    if spec.chat_template is not None:
        tokenizer.chat_template = spec.chat_template
    if len(tokenizer) > spec.vocab_size:
        log.warning(
            "the tokenizer of %s has %d ids, the model only %d: texts with ids from %d on are refused",
            spec.path,
            len(tokenizer),
            spec.vocab_size,
            spec.vocab_size,
        )
    return tokenizer


def load_model(spec: VerifierSpec, *, dtype: torch.dtype, device: torch.device | str) -> PreTrainedModel:
    """The whole model in eval mode without gradients; ValueError if a single weight would stay random."""
    config = read_config(spec.path, spec.trust_remote_code)
    nested = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    factory = AutoModelForImageTextToText if nested else AutoModelForCausalLM
    with quiet_loading():
        loaded: Any = factory.from_pretrained(
            spec.path, dtype=dtype, trust_remote_code=spec.trust_remote_code, output_loading_info=True
        )
    model, loading = loaded
    absent, misshapen = sorted(loading["missing_keys"]), sorted(map(str, loading["mismatched_keys"]))
    if absent or misshapen:
        near = weights.near_keys(weights.weight_files(spec.path), absent or misshapen)
        raise ValueError(
            f"{spec.path}: the weights lack {absent[:5]} and have another shape for {misshapen[:5]} "
            f"({len(absent)} and {len(misshapen)} in all; stored keys like these: {near}); "
            "they would stay random: use weights that belong to this config.json"
        )
    return model.to(device).eval().requires_grad_(False)


def load_embedding(spec: VerifierSpec) -> Float[Tensor, "V H"]:
    """The verifier's token embedding, bit by bit as stored; nothing else is read."""
    files = weights.weight_files(spec.path)
    key = weights.find_key(files, weights.EMBEDDING_NAMES)
    if key is None and says_tied(read_config(spec.path, spec.trust_remote_code)):
        key = weights.find_key(files, weights.HEAD_NAMES)
    if key is None:
        raise _no_such_tensor(spec, files, "token embedding", weights.EMBEDDING_NAMES)
    return weights.read_matrix(files, key, (spec.vocab_size, spec.hidden_size))


def load_head(spec: VerifierSpec) -> Float[Tensor, "V H"]:
    """The verifier's output head, bit by bit as stored; the embedding, if it has no own head and is tied."""
    if spec.tied_head:
        return load_embedding(spec)
    files = weights.weight_files(spec.path)
    key = weights.find_key(files, weights.HEAD_NAMES)
    if key is None:
        raise _no_such_tensor(spec, files, "output head (tie_word_embeddings is false)", weights.HEAD_NAMES)
    if key.removesuffix("weight") + "bias" in files:
        raise ValueError(f"{spec.path}: the head {key} has a bias, which no EAGLE-3 drafter can have")
    return weights.read_matrix(files, key, (spec.vocab_size, spec.hidden_size))


def text_backbone(model: PreTrainedModel) -> nn.Module:
    """The module that holds token embedding, decoder layers and final norm, however deep in a wrapper."""
    embedding = model.get_input_embeddings()
    count = model.config.get_text_config().num_hidden_layers
    found = [
        module
        for module in model.modules()
        if any(child is embedding for child in module.children())
        and _layer_list(module, count) is not None
        and any(isinstance(getattr(module, name, None), nn.Module) for name in FINAL_NORMS)
    ]
    if len(found) != 1:
        raise ValueError(
            f"{type(model).__name__}: looked for one module with the token embedding, {count} decoder layers "
            f"under one of {LAYER_LISTS} and a final norm under one of {FINAL_NORMS}, found {len(found)}; "
            "this verifier cannot be captured in process"
        )
    return found[0]


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The verifier's decoder layers in order."""
    layers = _layer_list(text_backbone(model), model.config.get_text_config().num_hidden_layers)
    assert layers is not None
    return layers


def final_norm(model: PreTrainedModel) -> nn.Module:
    """The norm between the last decoder layer and the head."""
    backbone = text_backbone(model)
    return next(getattr(backbone, name) for name in FINAL_NORMS if hasattr(backbone, name))


def _layer_list(module: nn.Module, count: int) -> nn.ModuleList | None:
    lists = [getattr(module, name, None) for name in LAYER_LISTS]
    return next((found for found in lists if isinstance(found, nn.ModuleList) and len(found) == count), None)


def _find_directory(path: str, cache_dir: Path, revision: str | None, trust_remote_code: bool) -> Path:
    if not path or not path.strip():
        raise ValueError("verifier.path is empty: name a Hugging Face directory, a hub id or a GGUF file")
    if path.startswith(gguf.PACKAGE_PREFIX):
        return gguf.dequantise(gguf.find_in_package(path), cache_dir)
    local = Path(path).expanduser()
    if local.is_dir():
        return local.resolve()
    if local.suffix == ".gguf" and local.is_file():
        return gguf.dequantise(local.resolve(), cache_dir)
    if not HUB_ID.match(path) or local.suffix == ".gguf":
        raise ValueError(f"verifier.path={path}: there is no directory or GGUF file {local.absolute()}")
    patterns = HUB_FILES + (["*.py"] if trust_remote_code else [])
    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, OSError, ValueError, httpx.HTTPError) as error:
        raise ValueError(
            f"verifier.path={path}: there is no directory {local.absolute()}, and the hub did not give it "
            f"either ({error}); check the spelling, the network, or log in if it is gated"
        ) from error


def _read_tokenizer(directory: Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except (ValueError, OSError, KeyError, ImportError) as error:
        raise ValueError(f"{directory}: the tokenizer cannot be loaded: {error}") from error


def _read_template(chat_template: str | None) -> str | None:
    if chat_template is None:
        return None
    file = Path(chat_template).expanduser()
    if not file.is_file():
        raise ValueError(f"verifier.chat_template={chat_template}: there is no file {file.absolute()}")
    return file.read_text(encoding="utf-8")


def _tokenizer_files(directory: Path) -> list[Path]:
    return [path for pattern in TOKENIZER_FILES for path in directory.glob(pattern) if path.is_file()]


def _no_such_tensor(spec: VerifierSpec, files: dict[str, Path], what: str, names: tuple[str, ...]) -> ValueError:
    return ValueError(
        f"{spec.path}: no {what} among {len(files)} stored tensors (looked for one of {list(names)}, "
        f".weight; nearest: {weights.near_keys(files, names)}); nothing is ever initialised at random: "
        "use complete weights"
    )
