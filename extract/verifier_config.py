"""What the small files of a verifier's directory say: sizes, RoPE, end-of-turn ids, chat template."""

import hashlib
import json
from pathlib import Path

import transformers
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

NORM_EPS_KEYS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")
LOGIT_CHANGES = {
    "final_logit_softcapping": (None,),
    "logits_scaling": (None, 1.0),
    "logit_scale": (None, 1.0),
}
"""Config keys by which logits are more than last @ head.T, with the values that mean "not used"."""


def read_config(directory: Path, trust_remote_code: bool) -> PreTrainedConfig:
    """The whole config; ValueError naming the file where transformers cannot read it."""
    file = directory / "config.json"
    if not file.is_file():
        raise ValueError(f"{file}: not found; verifier.path must be a Hugging Face model directory")
    try:
        return AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except (ValueError, OSError, KeyError, ImportError) as error:
        raise ValueError(
            f"{file}: transformers {transformers.__version__} cannot read it: {error} "
            f"(verifier.trust_remote_code={str(trust_remote_code).lower()})"
        ) from error


def text_sizes(config: PreTrainedConfig, directory: Path) -> dict:
    """The sizes of the text model under VerifierSpec's names; head_dim is derived only if not stated."""
    for key, unused in LOGIT_CHANGES.items():
        if getattr(config, key, None) not in unused:
            raise ValueError(
                f"{directory}/config.json: {key}={getattr(config, key)} changes the logits after the head; "
                "the teacher here is softmax(last @ head.T), so this verifier is not supported"
            )
    wanted = (
        "hidden_size",
        "num_hidden_layers",
        "vocab_size",
        "num_attention_heads",
        "max_position_embeddings",
    )
    absent = [key for key in (*wanted, "intermediate_size") if getattr(config, key, None) is None]
    eps = next((getattr(config, key) for key in NORM_EPS_KEYS if hasattr(config, key)), None)
    act = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
    if absent or eps is None or act is None:
        raise ValueError(
            f"{directory}/config.json: lacks {absent or NORM_EPS_KEYS if eps is None else ['hidden_act']}; "
            "a decoder-only language model is needed"
        )
    heads = config.num_attention_heads
    return {
        "model_type": config.model_type,
        "hidden_size": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "num_heads": heads,
        "num_kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "intermediate_size": config.intermediate_size,
        "rms_norm_eps": float(eps),
        "hidden_act": act,
        "rope_parameters": _rope_parameters(config),
        "max_position_embeddings": config.max_position_embeddings,
    }


def _rope_parameters(config: PreTrainedConfig) -> dict:
    """New-style RoPE of the text model (transformers translates the old); full attention's, if several."""
    rope = dict(getattr(config, "rope_parameters", None) or {})
    rope = dict(rope["full_attention"]) if "full_attention" in rope else rope
    rope.pop("type", None)  # the old spelling of rope_type, which transformers has read already
    return rope


def says_tied(config: PreTrainedConfig) -> bool:
    """Whether the head is the embedding, by the wrapper's or the text model's word."""
    return any(bool(getattr(c, "tie_word_embeddings", False)) for c in (config, config.get_text_config()))


def end_of_turn_ids(directory: Path, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every id that any of the three places names as end of sequence: they rarely agree in chat models."""
    sources = [getattr(c, "eos_token_id", None) for c in (config, config.get_text_config(), tokenizer)]
    if (directory / "generation_config.json").is_file():
        sources.append(GenerationConfig.from_pretrained(directory).eos_token_id)
    merged: set[int] = set()
    for ids in sources:
        merged.update([] if ids is None else [ids] if isinstance(ids, int) else ids)
    vocab_size = config.get_text_config().vocab_size
    if not merged or max(merged) >= vocab_size:
        raise ValueError(
            f"{directory}: end-of-turn ids {sorted(merged)} (eos_token_id of config.json, "
            f"generation_config.json and the tokenizer) must be at least one, each "
            f"below vocab_size {vocab_size}; correct them there"
        )
    return tuple(sorted(merged))


def template_sha256(override: str | None, tokenizer: PreTrainedTokenizerBase, directory: Path) -> str:
    """SHA-256 of the template in force; a model without one cannot answer prompts and is refused."""
    template = override if override is not None else tokenizer.chat_template
    if not template:
        raise ValueError(
            f"{directory}: the tokenizer has no chat template; set verifier.chat_template to a .jinja file, "
            "or use the instruction-tuned model"
        )
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
