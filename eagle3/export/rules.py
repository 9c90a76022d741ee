"""The steps of the engines' loaders, each as a rule: what is wrong in a directory, and what the engine does then.

A rule yields (what is wrong, what the engine would do), the latter as a verb phrase. `eagle3.export.engines` knows the
facts.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from eagle3.export.config import FLAGS, LAYER_IDS, SINCE, SIZES, other_attention, rope_of, shape_of
from eagle3.export.engines import Engine
from eagle3.export.facts import EMBEDDING, MAPS, Contents
from eagle3.vocab import DraftVocab
from extract.numbering import sglang_captures

Found = Iterator[tuple[str, str]]

DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
BIASES = ("attention_bias", "qkv_bias", "mlp_bias", "bias")
GUESS = "guess the layers 2, n // 2 and n - 3, whatever it was trained on"
LLAMA = "take transformers' default for a Llama"
IN_TRAINING = {
    "rope_parameters": "turn queries and keys by other angles than in training",
    "rms_norm_eps": "norm with another epsilon than in training",
    "max_position_embeddings": "take another position limit than the verifier's",
    "fc_norm": "fuse the captured layers otherwise than in training",
    "norm_output": "feed the next step another state than in training",
}
"""What comes of a config.json that is not that of its weights; sizes come out as tensors of a wrong shape."""


def faults(c: Contents, e: Engine) -> Found:
    """Everything; tensors are not judged by sizes that are wrong themselves."""
    sizes = list(_sizes(c))
    sizes += list(_draft_vocab_size(c, e))
    yield from sizes
    for rule in (_form, _rope, _switches, _layer_ids):
        yield from rule(c, e)
    if not sizes:
        yield from _tensors(c, e)
        yield from _vocabulary(c, e)
    yield from as_trained(c)
    if c.verifier is not None:
        yield from _beside_verifier(c, e)


def as_trained(c: Contents) -> Found:
    """config.json against what the weights say of themselves, key by key; layer ids are judged as engines read them."""
    if c.trained is None:
        return
    said = {key: c.config.get(key) for key in (*SIZES, "rms_norm_eps")}
    with suppress(ValueError):  # a fault of its own
        said["rope_parameters"] = rope_of(c.config, c.file)
    said |= {flag: bool(c.config.get(flag)) for flag in FLAGS}
    for key, value in said.items():
        trained = getattr(c.trained, SIZES.get(key, key))
        if value is not None and value != trained:
            effect = IN_TRAINING.get(key, "not compute the trained network")
            yield f"{key} is {value}, the weights were trained with {trained}", effect


def unreadable(c: Contents) -> Found:
    """What this program minds and no engine does."""
    try:
        if c.trained is not None:
            shape_of(c.config, c.file)
    except ValueError as error:
        yield str(error).removeprefix(f"{c.file}: "), "serve what this program would not load"


def _form(c: Contents, e: Engine) -> Found:
    names = c.config.get("architectures")
    if not isinstance(names, list) or not names or names[0] not in e.architectures:
        yield f"architectures is {names}, must be {list(e.architectures[:1])}", "refuse it, or load another network"
    for key, wanted, effect in (
        ("model_type", "llama", "read the sizes by another family's names"),
        ("num_hidden_layers", 1, "build other layers than that one and leave them random without a word"),
    ):
        if c.config.get(key) != wanted:
            yield f"{key} is {_told(c, key)}, must be {wanted!r}", effect
    if c.config.get("hidden_act", "silu") != "silu":
        yield f"hidden_act is {_told(c, 'hidden_act')}, must be 'silu'", "refuse to start"
    if c.config.get("tie_word_embeddings") and e.kind == "sglang":
        yield "tie_word_embeddings is true", "take the verifier's embedding for the head and skip lm_head.weight"
    for key, effect in other_attention(c.config):
        yield f"{key} is {_told(c, key)}", effect
    for key in BIASES:
        if c.config.get(key):
            yield f"{key} is {_told(c, key)}", "look for biases, which this network does not have"


def _sizes(c: Contents) -> Found:
    for key in SIZES:
        if key == "draft_vocab_size" or (key == "head_dim" and key not in c.config):
            continue
        value = c.config.get(key)
        if type(value) is not int or value < 1:
            yield f"{key} is {_told(c, key)}, must be a positive integer", LLAMA if value is None else "refuse to start"
    if type(c.config.get("rms_norm_eps")) not in (int, float):
        yield f"rms_norm_eps is {_told(c, 'rms_norm_eps')}, must be a number", LLAMA
    if "target_hidden_size" in c.config and c.config["target_hidden_size"] != c.config.get("hidden_size"):
        null = c.config["target_hidden_size"] is None
        effect = "multiply null and die at start" if null else "expect states of that width and an embedding beside"
        yield f"target_hidden_size is {_told(c, 'target_hidden_size')}; leave it out", effect


def _draft_vocab_size(c: Contents, e: Engine) -> Found:
    value = c.config.get("draft_vocab_size")
    if type(value) is not int or value < 1:
        effect = "take the verifier's vocabulary for it" if e.kind == "vllm" else "refuse to start"
        if value is None and "draft_vocab_size" in c.config and e.kind == "sglang":
            effect = "take the verifier's head and skip lm_head.weight"
        yield f"draft_vocab_size is {_told(c, 'draft_vocab_size')}, must be the rows of lm_head.weight", effect


def _rope(c: Contents, e: Engine) -> Found:
    try:
        rope_of(c.config, c.file)
    except ValueError as error:
        known = "rope_theta" in c.config or c.config.get("rope_parameters")
        effect = "choose one of the two" if known else "take 10000 for the base"
        yield str(error).removeprefix(f"{c.file}: "), effect


def _switches(c: Contents, e: Engine) -> Found:
    for flag, since in SINCE.items():
        if c.config.get(flag) and not e.knows(since):
            yield f"{flag} is set, which SGLang knows from {since} on", "drop it without a word"
        if c.nested.get(flag) and not c.config.get(flag):
            yield f"{flag} is set in eagle_config alone", "look for it at the top of config.json and not find it"
    if c.config.get("use_aux_norm"):
        known = e.kind == "sglang" and e.knows("0.5.12.post1")
        effect = "norm the captured layers, and the other not" if known else "drop it"
        yield "use_aux_norm is set; fc_norm is its name in both engines", effect
    if c.config.get("norm_before_residual"):
        if e.kind == "sglang":
            yield "norm_before_residual is set", "add the un-normed residual all the same: it has no such switch"
        elif c.trained is not None:
            yield "norm_before_residual is set", "norm the residual, which it was not trained with"
    if c.nested.get("norm_before_fc", c.config.get("norm_before_fc")):
        if not e.knows("0.5.18"):
            yield "norm_before_fc is set, which SGLang knows from 0.5.18 on", "drop it without a word"
        elif c.trained is not None:
            yield "norm_before_fc is set", "norm the captured states before fc, which it was not trained with"
    if not c.nested.get("use_aux_hidden_state", True):
        yield "eagle_config.use_aux_hidden_state is false", "feed it the last state instead of the captured layers"


def _layer_ids(c: Contents, e: Engine) -> Found:
    """SGLang reads the nested list alone, by family and version; vLLM the top list, or the nested one as it stands."""
    nested, top = c.nested.get(LAYER_IDS), c.config.get(LAYER_IDS)
    key, ids = (LAYER_IDS, top) if e.kind == "vllm" and top else (f"eagle_config.{LAYER_IDS}", nested)
    if not isinstance(ids, list) or not ids or any(type(layer) is not int for layer in ids):
        yield f"{key} is {ids}, must be a list of layer numbers", GUESS
        return
    if e.kind == "vllm":
        captured = ids
        if not top:
            yield f"{LAYER_IDS} is not at the top of config.json", "take eagle_config's numbers, which are SGLang's"
    else:
        try:
            captured = _sglang_layers(c, e, ids)
        except ValueError as error:
            yield str(error), "read the layer ids by a rule that is not known"
            return
    trained = _capture_layers(c, e)
    if trained is not None and captured != trained:
        yield f"{key} is {ids}", f"feed it the inputs of layers {captured}, and it was trained on {trained}"
    if c.verifier is not None and not all(1 <= layer < c.verifier.num_layers for layer in captured):
        yield f"{key} is {ids}, of a verifier with {c.verifier.num_layers} layers", "not capture all of them"


def _sglang_layers(c: Contents, e: Engine, ids: list[int]) -> list[int]:
    if c.family is None:
        return [layer + 1 for layer in ids]  # what most families mean; who serves another one has to name it
    layers = None if c.verifier is None else c.verifier.num_layers
    return sglang_captures(c.family, str(e.version), ids, num_layers=layers)


def _capture_layers(c: Contents, e: Engine) -> list[int] | None:
    """What it was trained on, by the best word there is; None if only the engine's own list says anything."""
    if c.trained is not None:
        return list(c.trained.capture_layers)
    other = c.config.get(LAYER_IDS) if e.kind == "sglang" else None
    return c.config.get("capture_layers", other)


def _tensors(c: Contents, e: Engine) -> Found:
    expected = expected_tensors(c, e)
    weights = {name: held for name, held in c.tensors.items() if name not in MAPS}
    found = {e.tensor_name(name): (name, *held) for name, held in weights.items()}
    for name in weights:
        if found[e.tensor_name(name)][0] != name:
            yield f"{name} and {found[e.tensor_name(name)][0]} are one tensor to it", "keep the one that it reads last"
    for name in sorted(expected.keys() - found.keys()):
        own = "take the verifier's head" if name == "lm_head.weight" and e.kind == "vllm" else e.missing
        yield f"{name} {list(expected[name])} is missing", own
    dtype = c.config.get("torch_dtype", c.config.get("dtype"))
    if dtype not in DTYPES:
        yield (
            f"torch_dtype is {dtype!r}, must be one of {', '.join(DTYPES)}",
            ("serve it in float16" if e.kind == "sglang" else "choose the precision by itself"),
        )
    for name in sorted(found):
        stored, shape, code = found[name]
        if name == EMBEDDING:
            effect = "use it in place of the verifier's" if e.kind == "vllm" else "use the verifier's in its place"
            if c.own_embedding or stored != name:
                yield f"{stored} {list(shape)} is in the file", effect
        elif name not in expected:
            yield f"{stored} {list(shape)} is unknown", e.unknown
        elif shape != expected[name]:
            yield f"{stored} is {list(shape)}, must be {list(expected[name])}", "refuse to start"
        elif dtype in DTYPES and code != DTYPES[dtype]:
            yield f"{stored} is {code}, torch_dtype is {dtype}", "cast it"


def expected_tensors(c: Contents, e: Engine) -> dict[str, tuple[int, ...]]:
    """Names and shapes that the engine looks for, the verifier's embedding and the id maps apart."""
    hidden, heads = c.config["hidden_size"], c.config["num_attention_heads"]
    head_dim = c.config["head_dim"] if "head_dim" in c.config else hidden // heads
    wide, kv, mlp = heads * head_dim, c.config["num_key_value_heads"] * head_dim, c.config["intermediate_size"]
    aux = _aux_count(c, e)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, aux * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (c.config["draft_vocab_size"], hidden),
    }
    layer = {
        **dict.fromkeys(("input_layernorm", "hidden_norm", "post_attention_layernorm"), (hidden,)),
        "self_attn.q_proj": (wide, 2 * hidden),
        **dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (kv, 2 * hidden)),
        "self_attn.o_proj": (hidden, wide),
        **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (mlp, hidden)),
        "mlp.down_proj": (hidden, mlp),
    }
    shapes |= {f"midlayer.{name}.weight": shape for name, shape in layer.items()}
    if c.config.get("fc_norm") and e.knows(SINCE["fc_norm"]):
        shapes |= {f"fc_norm.{i}.weight": (hidden,) for i in range(aux)}
    if c.nested.get("norm_before_fc", c.config.get("norm_before_fc")) and e.knows("0.5.18"):
        shapes["input_norm.weight"] = (aux * hidden,)
    return shapes


def _aux_count(c: Contents, e: Engine) -> int:
    """How many captured layers the engine builds `fc` for."""
    said, ids = c.config.get("num_aux_hidden_states"), c.nested.get(LAYER_IDS)
    if not e.knows("0.5.12.post1"):
        return 3
    return said if said is not None else len(ids) if isinstance(ids, list) and ids else 3


def _vocabulary(c: Contents, e: Engine) -> Found:
    size, whole = c.config["draft_vocab_size"], c.config["vocab_size"]
    d2t, t2d = c.maps.get("d2t"), c.maps.get("t2d")
    if size > whole:
        yield f"draft_vocab_size {size} exceeds vocab_size {whole}", "draft ids that do not exist"
        return
    if d2t is None:
        if size < whole:
            yield f"d2t [{size}] is missing", "take draft ids for the verifier's own ids without a word"
        return
    if size == whole and e.kind == "vllm":
        yield f"d2t is there although draft_vocab_size is vocab_size ({whole})", "refuse to start: it maps nothing then"
    shape, code = c.tensors["d2t"]
    if (shape, code) != ((size,), "I64"):
        yield f"d2t is {code} {list(shape)}, must be I64 [{size}]", "read other numbers out of it, or die"
        return
    if t2d is not None and c.tensors["t2d"] != ((whole,), "BOOL"):
        shape, code = c.tensors["t2d"]
        yield (
            f"t2d is {code} {list(shape)}, must be BOOL [{whole}]",
            "not look at it, but the two contradict each other",
        )
        return
    try:
        DraftVocab.from_offsets(d2t, whole) if t2d is None else DraftVocab.from_tensors(d2t, t2d)
    except ValueError as error:
        yield str(error), "draft other tokens than the head means"


def _beside_verifier(c: Contents, e: Engine) -> Found:
    assert c.verifier is not None
    for key, theirs in (("vocab_size", c.verifier.vocab_size), ("hidden_size", c.verifier.hidden_size)):
        if c.config.get(key) != theirs:
            yield f"{key} is {_told(c, key)}, the verifier's is {theirs}", "refuse to start, or draft nonsense"
    limit, theirs = c.config.get("max_position_embeddings"), c.verifier.max_position_embeddings
    if e.kind == "sglang" and type(limit) is int and limit < theirs:
        yield f"max_position_embeddings is {limit}, the verifier's is {theirs}", "refuse to start at its full context"
    family = c.config.get("verifier_family")
    if family is not None and family != c.verifier.model_type:
        yield f"verifier_family is {family}, the verifier is {c.verifier.model_type}", "number its layers otherwise"


def _told(c: Contents, key: str) -> Any:
    return repr(c.config[key]) if key in c.config else "absent"
