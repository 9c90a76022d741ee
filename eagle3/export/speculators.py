"""The directory format of vllm-project/speculators (0.9.0), there and back.

It keeps the decoder layer's sizes in `transformer_layer_config`, says in `speculators_config` how and beside which
verifier to serve it, and calls the layer `layers.0`. Layer ids are vLLM's, which are ours.
"""

from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from eagle3.drafter import DrafterShape
from eagle3.export.config import FIXED, FLAGS, LAYER_IDS, SIZES
from eagle3.export.verifier import VerifierDir

TYPE = "speculators_model_type"
VERSION = "0.9.0"
LAYER_KEYS = ("num_hidden_layers", "hidden_act", "attention_bias", "mlp_bias")
"""What both formats say of the layer beside its sizes."""
LAYER_SIZES = tuple(key for key in SIZES if key != "draft_vocab_size")


def is_speculators(config: dict[str, Any]) -> bool:
    return TYPE in config


def own_config(config: dict[str, Any], file: Path) -> dict[str, Any]:
    """The same network in our keys; ValueError names file and key of one that this program cannot compute."""
    layer = config.get("transformer_layer_config")
    if config[TYPE] != "eagle3" or not isinstance(layer, dict):
        raise ValueError(f"{file}: {TYPE} is {config[TYPE]!r}, only eagle3 with a transformer_layer_config is read")
    if layer.get("model_type") != "llama":
        raise ValueError(
            f"{file}: transformer_layer_config.model_type is {layer.get('model_type')!r}, whose layer computes "
            "something else; only llama is read"
        )
    if config.get("norm_before_residual") is not False:
        raise ValueError(
            f"{file}: norm_before_residual is {config.get('norm_before_residual')!r}, must be false: neither this "
            "program nor SGLang has that residual (and vLLM takes an absent key for true)"
        )
    if layer.get("sliding_window") is not None or "sliding_attention" in (layer.get("layer_types") or ()):
        raise ValueError(f"{file}: transformer_layer_config has a sliding window; here every key is attended to")
    resolved = LlamaConfig(**{key: value for key, value in layer.items() if key != "model_type"}).to_dict()
    rope = dict(resolved["rope_parameters"])
    if rope.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"{file}: rope_parameters turn a part of each head only; here it is all of it")
    flags = {flag: bool(config.get(flag)) for flag in (*FLAGS, "norm_before_fc")}
    wide = {} if config.get("target_hidden_size") is None else {"target_hidden_size": config["target_hidden_size"]}
    return {
        **FIXED,
        **{key: resolved[key] for key in (*LAYER_SIZES, *LAYER_KEYS, "rms_norm_eps")},
        "rope_parameters": rope,
        "draft_vocab_size": config.get("draft_vocab_size"),
        LAYER_IDS: config.get(LAYER_IDS),
        **flags,
        **wide,
    }


def as_vllm_reads(config: dict[str, Any]) -> dict[str, Any]:
    """What vLLM 0.32 makes of it (transformers_utils/configs/speculators): an absent norm_before_residual is true."""
    layer = config.get("transformer_layer_config")
    layer = layer if isinstance(layer, dict) else {}
    said = {key: config[key] for key in ("draft_vocab_size", "norm_before_fc", *FLAGS) if key in config}
    known = {key: config[key] for key in ("target_hidden_size", LAYER_IDS, "dtype") if config.get(key)}
    names = {"llama": "Eagle3LlamaForCausalLM", "qwen3": "Eagle3Qwen3ForCausalLM"}
    return {
        **layer,
        **said,
        **known,
        "norm_before_residual": config.get("norm_before_residual", True),
        "architectures": [names.get(layer.get("model_type", "llama"))],
    }


def speculators_config(shape: DrafterShape, dtype: str, verifier: VerifierDir, drafts: int) -> dict[str, Any]:
    """config.json of this format for a drafter of ours; `drafts` is how many tokens vLLM drafts at a time."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": drafts,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        TYPE: "eagle3",
        "speculators_version": VERSION,
        "draft_vocab_size": shape.draft_vocab_size,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": shape.fc_norm,
        "norm_output": shape.norm_output,
        "embed_requires_grad": False,
        LAYER_IDS: list(shape.capture_layers),
        "tie_word_embeddings": False,
        "dtype": dtype,
        "transformer_layer_config": {
            "model_type": "llama",
            **{key: getattr(shape, SIZES[key]) for key in LAYER_SIZES},
            **{key: FIXED[key] for key in LAYER_KEYS},
            "rms_norm_eps": shape.rms_norm_eps,
            "rope_parameters": dict(shape.rope_parameters),
            "tie_word_embeddings": False,
            "dtype": dtype,
        },
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "name_or_path": str(verifier.directory),
                "architectures": list(verifier.architectures),
            },
        },
    }
