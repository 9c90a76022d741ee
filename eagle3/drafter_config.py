"""config.json of a drafter directory: written in the spellings of both engines, read back without guessing.

Capture layer k is the residual stream after k decoder layers. SGLang's nested list names the layer whose output that
is (k-1, it adds one), vLLM's top-level list the layer whose input it is (k). `capture_layers` says k outright.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle3.drafter import DrafterShape

ARCHITECTURE = "LlamaForCausalLMEagle3"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
FLAGS = ("fc_norm", "norm_output")
FIXED = {
    "architectures": [ARCHITECTURE],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
"""What is the same in every drafter of this network."""
FOREIGN_FLAGS = (
    "norm_before_residual",
    "norm_before_fc",
    "use_aux_norm",
    "parallel_drafting",
    "target_hidden_size",
)
"""Switches of other EAGLE-3 networks: a drafter that sets one computes something else than this program."""
SIZES = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "draft_vocab_size": "draft_vocab_size",
    "max_position_embeddings": "max_position_embeddings",
}


@dataclass(frozen=True)
class Origin:
    """What a drafter was made for: later stages compare it with what they run."""

    verifier: str
    verifier_sha256: str
    tokenizer_sha256: str
    chat_template_sha256: str
    end_of_turn_ids: tuple[int, ...]
    ttt_steps: int
    """K, draft steps unrolled in training."""
    max_len: int
    """Tokens of the longest row trained on; `max_position_embeddings` is the verifier's and may be more."""


def config_of(shape: DrafterShape, origin: Origin, dtype: str) -> dict[str, Any]:
    """The whole config.json; `dtype` as in torch_dtype."""
    origin_values = asdict(origin)
    rope = dict(shape.rope_parameters)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    flags = {"fc_norm": shape.fc_norm, "norm_output": shape.norm_output}
    end_of_turn = list(origin.end_of_turn_ids)
    return {
        **FIXED,
        **{key: getattr(shape, name) for key, name in SIZES.items()},
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if scaling["rope_type"] == "default" else {**scaling, "type": scaling["rope_type"]},
        "torch_dtype": dtype,
        "eos_token_id": end_of_turn[0] if len(end_of_turn) == 1 else end_of_turn,
        "capture_layers": list(shape.capture_layers),
        LAYER_IDS: list(shape.capture_layers),
        "eagle_config": {
            "use_aux_hidden_state": True,
            LAYER_IDS: [k - 1 for k in shape.capture_layers],
            **flags,
        },
        **flags,
        "chat_template_sha256": origin_values.pop("chat_template_sha256"),
        "origin": origin_values,
    }


def read_config(file: Path) -> dict[str, Any]:
    """The JSON object of a drafter's config.json; ValueError names the file."""
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: unreadable ({error}); export the drafter again") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file}: is no JSON object")
    if config.get("torch_dtype") not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"{file}: torch_dtype is {config.get('torch_dtype')!r}, must be bfloat16, float16 or float32")
    return config


def shape_of(config: dict[str, Any], file: Path) -> DrafterShape:
    """The network that a config.json describes; ValueError names the file and the key that cannot be used."""
    for key, value in FIXED.items():
        if config.get(key, value) != value or (key == "architectures" and key not in config):
            raise ValueError(f"{file}: {key} is {config.get(key)!r}, a drafter of this program has {value!r}")
    nested = config.get("eagle_config") or {}
    for key in FOREIGN_FLAGS:
        if config.get(key) or nested.get(key):
            raise ValueError(f"{file}: {key} is set; that network is not this program's and would draft something else")
    if not nested.get("use_aux_hidden_state", True):
        raise ValueError(f"{file}: use_aux_hidden_state is false; that is no EAGLE-3 drafter")
    sizes: dict[str, Any] = {name: _positive(config, key, file) for key, name in SIZES.items()}
    if sizes["draft_vocab_size"] > sizes["vocab_size"]:
        raise ValueError(
            f"{file}: draft_vocab_size {sizes['draft_vocab_size']} exceeds vocab_size {sizes['vocab_size']}"
        )
    eps = config.get("rms_norm_eps")
    if not isinstance(eps, float | int):
        raise ValueError(f"{file}: rms_norm_eps is {eps!r}, must be a number")
    return DrafterShape(
        **sizes,
        capture_layers=_capture_layers(config, nested, file),
        rms_norm_eps=float(eps),
        rope_parameters=_rope(config, file),
        **{flag: _flag(flag, config, nested, file) for flag in FLAGS},
    )


def _positive(config: dict[str, Any], key: str, file: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        hint = "; null makes engines take the verifier's head" if key == "draft_vocab_size" else ""
        raise ValueError(f"{file}: {key} is {value!r}, must be a positive integer{hint}")
    return value


def _capture_layers(config: dict[str, Any], nested: dict[str, Any], file: Path) -> tuple[int, ...]:
    """k from every spelling that is there; they must agree. Without any, engines would guess: refused."""
    said = {}
    if config.get("capture_layers") is not None:
        said["capture_layers"] = list(config["capture_layers"])
    if config.get(LAYER_IDS) is not None:
        said[LAYER_IDS] = list(config[LAYER_IDS])
    if nested.get(LAYER_IDS) is not None:
        said[f"eagle_config.{LAYER_IDS} + 1"] = [k + 1 for k in nested[LAYER_IDS]]
    if not said:
        raise ValueError(f"{file}: names no capture layers (capture_layers or {LAYER_IDS}); engines would guess them")
    layers, *others = said.values()
    if any(other != layers for other in others):
        raise ValueError(f"{file}: the capture layers contradict each other: {said}")
    return tuple(layers)


def _rope(config: dict[str, Any], file: Path) -> dict[str, Any]:
    """New-style parameters from either spelling; they must agree where both are there."""
    old, new = _old_rope(config), config.get("rope_parameters")
    if new is None and old is None:
        raise ValueError(f"{file}: names neither rope_parameters nor rope_theta; engines would guess the base")
    if new is None:
        assert old is not None
        return old
    if "rope_theta" not in new:
        raise ValueError(f"{file}: rope_parameters has no rope_theta: {new}")
    new = {"rope_type": "default", **new}
    if old is not None and old != new:
        raise ValueError(f"{file}: rope_parameters {new} and rope_theta/rope_scaling {old} contradict each other")
    return new


def _old_rope(config: dict[str, Any]) -> dict[str, Any] | None:
    if "rope_theta" not in config:
        return None
    scaling = dict(config.get("rope_scaling") or {})
    kind = scaling.pop("type", "default")
    return {"rope_type": kind, **scaling, "rope_theta": config["rope_theta"]}


def _flag(flag: str, config: dict[str, Any], nested: dict[str, Any], file: Path) -> bool:
    said = {bool(place[flag]) for place in (config, nested) if flag in place}
    if len(said) > 1:
        raise ValueError(f"{file}: {flag} is {config[flag]} at the top and {nested[flag]} in eagle_config")
    return said.pop() if said else False
