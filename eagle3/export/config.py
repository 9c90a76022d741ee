"""config.json of a drafter directory: written in the spellings of both engines, read back without guessing.

Capture layer k is the residual stream after k decoder layers, the input of layer k. vLLM's top-level list says k.
SGLang's nested list is what `extract.numbering` makes of k for the verifier's family and the `sglang_versions` that
the directory is written for. `capture_layers` says k outright.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from packaging.version import Version

from eagle3.drafter import DrafterShape
from eagle3.export.files import read_json, required
from extract.numbering import known_version, sglang_captures, sglang_layer_ids, versions_capturing

CONFIG, WEIGHTS = "config.json", "model.safetensors"
ARCHITECTURE = "LlamaForCausalLMEagle3"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
FLAGS = ("fc_norm", "norm_output")
SINCE = {"fc_norm": "0.5.12.post1", "norm_output": "0.5.12.post1"}
"""SGLang versions before these leave a flag unread and compute another network (read in its llama_eagle3.py)."""
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
    verifier_family: str
    """`model_type` of its text model: engines number its layers by it."""
    verifier_sha256: str
    tokenizer_sha256: str
    chat_template_sha256: str
    end_of_turn_ids: tuple[int, ...]
    ttt_steps: int
    """K, draft steps unrolled in training."""
    max_len: int
    """Tokens of the longest row trained on; `max_position_embeddings` is the verifier's and may be more."""


ORIGIN_KINDS: dict[str, Any] = {
    **dict.fromkeys((field.name for field in fields(Origin)), str),
    "end_of_turn_ids": list,
    "ttt_steps": int,
    "max_len": int,
}


@dataclass(frozen=True)
class Serving:
    """What SGLang is told of the captured layers."""

    family: str
    ids: tuple[int, ...]
    versions: tuple[str, ...]
    """All known versions in which `ids` mean the captured layers and the whole network is computed."""


def serving_of(shape: DrafterShape, family: str, version: str) -> Serving:
    """For a verifier of `family`, served by SGLang `version`.

    Raises:
        ValueError: no list says these layers there, or that version does not compute this network.
    """
    ids = sglang_layer_ids(family, version, shape.capture_layers)
    for flag, since in _needed(shape):
        if Version(known_version(version)) < since:
            raise ValueError(f"SGLang {version} does not know {flag} and would draft something else; {since} does")
    versions = {*versions_capturing(family, ids, shape.capture_layers), known_version(version)}
    able = [v for v in versions if all(Version(v) >= since for _, since in _needed(shape))]
    return Serving(family, tuple(ids), tuple(sorted(able, key=Version)))


def _needed(shape: DrafterShape) -> list[tuple[str, Version]]:
    return [(flag, Version(since)) for flag, since in SINCE.items() if getattr(shape, flag)]


def config_of(
    shape: DrafterShape, dtype: str, *, family: str, serving: Serving | None, origin: Origin | None
) -> dict[str, Any]:
    """The whole config.json.

    Args:
        dtype: as in torch_dtype.
        family: `model_type` of the verifier.
        serving: None where SGLang cannot be told the layers; vLLM can.
        origin: None for a drafter that another program trained.
    """
    rope = dict(shape.rope_parameters)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    flags = {"fc_norm": shape.fc_norm, "norm_output": shape.norm_output}
    nested = {} if serving is None else {LAYER_IDS: list(serving.ids)}
    return {
        **FIXED,
        **{key: getattr(shape, name) for key, name in SIZES.items()},
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if scaling["rope_type"] == "default" else {**scaling, "type": scaling["rope_type"]},
        "torch_dtype": dtype,
        "capture_layers": list(shape.capture_layers),
        LAYER_IDS: list(shape.capture_layers),
        "eagle_config": {"use_aux_hidden_state": True, **nested, **flags},
        **flags,
        "verifier_family": family,
        "sglang_versions": [] if serving is None else list(serving.versions),
        **({} if origin is None else _said_of(origin)),
    }


def _said_of(origin: Origin) -> dict[str, Any]:
    values = asdict(origin)
    del values["verifier_family"]
    end_of_turn = list(origin.end_of_turn_ids)
    return {
        "eos_token_id": end_of_turn[0] if len(end_of_turn) == 1 else end_of_turn,
        "chat_template_sha256": values.pop("chat_template_sha256"),
        "origin": values,
    }


def origin_of_config(config: dict[str, Any], file: Path) -> Origin | None:
    """What `config_of` was told; None where it was told none, ValueError where it is not what it writes."""
    if config.get("origin") is None:
        return None
    values = {**config["origin"], **{key: config.get(key) for key in ("chat_template_sha256", "verifier_family")}}
    required(values, ORIGIN_KINDS, file, "origin, ")
    unknown = sorted(values.keys() - ORIGIN_KINDS.keys())
    if unknown:
        raise ValueError(f"{file}: origin, {unknown} are not what this program writes; train again")
    return Origin(**{**values, "end_of_turn_ids": tuple(values["end_of_turn_ids"])})


def read_config(file: Path) -> dict[str, Any]:
    """The JSON object of a drafter's config.json; ValueError names the file."""
    config = read_json(file)
    if config.get("torch_dtype") not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"{file}: torch_dtype is {config.get('torch_dtype')!r}, must be bfloat16, float16 or float32")
    return config


def shape_of(config: dict[str, Any], file: Path) -> DrafterShape:
    """The network that a config.json describes; ValueError names the file and the key that cannot be used."""
    for key, value in FIXED.items():
        if config.get(key, value) != value or (key == "architectures" and key not in config):
            raise ValueError(f"{file}: {key} is {config.get(key)!r}, a drafter of this program has {value!r}")
    nested = config.get("eagle_config") or {}
    if not isinstance(nested, dict):
        raise ValueError(f"{file}: eagle_config is {nested!r}, must be an object")
    for key in FOREIGN_FLAGS:
        if config.get(key) or nested.get(key):
            raise ValueError(f"{file}: {key} is set; that network is not this program's and would draft something else")
    for key, effect in other_attention(config):
        raise ValueError(f"{file}: {key} is {config[key]!r}; an engine would {effect}, which was not trained")
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
        rope_parameters=rope_of(config, file),
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
    for key in ("capture_layers", LAYER_IDS):
        if config.get(key) is not None:
            said[key] = layer_list(config[key], key, file)
    if nested.get(LAYER_IDS) is not None:
        said |= _as_sglang_reads(config, layer_list(nested[LAYER_IDS], f"eagle_config.{LAYER_IDS}", file), file)
    if not said:
        raise ValueError(f"{file}: names no capture layers (capture_layers or {LAYER_IDS}); engines would guess them")
    layers, *others = said.values()
    if any(other != layers for other in others):
        raise ValueError(f"{file}: the capture layers contradict each other: {said}")
    return tuple(layers)


def layer_list(value: Any, key: str, file: Path) -> list[int]:
    """`value` if it is a list of layer numbers; ValueError names file and key."""
    if not isinstance(value, list) or not value or not all(type(layer) is int and layer >= 0 for layer in value):
        raise ValueError(f"{file}: {key} is {value!r}, must be a list of layer numbers")
    return value


def _as_sglang_reads(config: dict[str, Any], ids: list[int], file: Path) -> dict[str, list[int]]:
    """k by the rule of family and versions that the file names; other programs' files name none and mean plus one."""
    family, versions = config.get("verifier_family"), config.get("sglang_versions")
    if family is None or not versions:
        return {f"eagle_config.{LAYER_IDS} + 1": [layer + 1 for layer in ids]}
    try:
        return {
            f"eagle_config.{LAYER_IDS} in SGLang {version} for {family}": sglang_captures(family, version, ids)
            for version in versions
        }
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def other_attention(config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(key, what an engine does of it) for keys that ask for other attention than this network's."""
    if config.get("partial_rotary_factor", 1) != 1:
        yield "partial_rotary_factor", "turn a part of each head alone"
    if "sliding_attention" in (config.get("layer_types") or ()):
        yield "layer_types", "see a window of the text alone"


def rope_of(config: dict[str, Any], file: Path) -> dict[str, Any]:
    """New-style parameters from either spelling; they must agree where both are there."""
    old, new = _old_rope(config), config.get("rope_parameters")
    if new is None and old is None:
        raise ValueError(f"{file}: names neither rope_parameters nor rope_theta; engines would guess the base")
    if old is not None:
        _check_base(old["rope_theta"], file)
    if new is None:
        assert old is not None
        return old
    if "rope_theta" not in new:
        raise ValueError(f"{file}: rope_parameters has no rope_theta: {new}")
    _check_base(new["rope_theta"], file)
    new = {"rope_type": "default", **new}
    if old is not None and old != new:
        raise ValueError(f"{file}: rope_parameters {new} and rope_theta/rope_scaling {old} contradict each other")
    return new


def _check_base(base: Any, file: Path) -> None:
    if type(base) not in (int, float) or base <= 0:
        raise ValueError(f"{file}: rope_theta is {base!r}, must be a positive number")


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
