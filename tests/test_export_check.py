"""The validator: one broken directory a fault, and what it must say of the engine."""

import re
import shutil
from dataclasses import replace

import pytest
import torch
from drafter_files import config_of, edit_config, edit_tensors
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiny_drafter import ORIGIN, tiny_drafter

from eagle3.build import warn_of_serving
from eagle3.export.check import check
from eagle3.export.directory import read_shape, save_drafter
from eagle3.export.verifier import read_verifier
from extract.numbering import SGLANG_VERSIONS

IDS = "eagle_aux_hidden_state_layer_ids"
NESTED = f"eagle_config.{IDS}"
BOTH = ("sglang", "vllm")


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    return save_drafter(tiny_drafter(model), tmp_path_factory.mktemp("whole") / "drafter", origin=ORIGIN)


@pytest.fixture
def directory(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "drafter")


def assert_fault(directory, engine, what, effect, version=None, verifier=None):
    """One fault says both: `what` is wrong, and what this engine would do."""
    name = f"SGLang {version or '0.5.16'}" if engine == "sglang" else "vLLM 0.32.0"
    found = check(directory, engine, version, verifier)
    assert any(re.search(what, f.what) and re.search(f"^{name} would .*{effect}", f.effect) for f in found), found


@pytest.mark.parametrize(
    ("network", "first"),
    [
        ({}, 0),
        ({"draft_vocab_size": 320}, 0),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}, 0),
        ({"fc_norm": True}, 1),
        ({"norm_output": True}, 1),
    ],
)
def test_what_is_saved_is_served_as_it_was_trained(model, verifier, tmp_path, network, first):
    """`first`: the oldest SGLang did not know the two switches, and the directory does not claim it."""
    directory = save_drafter(tiny_drafter(model, **network), tmp_path / "d", origin=ORIGIN)
    sizes = read_verifier(verifier)
    assert check(directory, "vllm", None, sizes) == []
    assert config_of(directory)["sglang_versions"] == list(SGLANG_VERSIONS[first:])
    for version in SGLANG_VERSIONS:
        assert bool(check(directory, "sglang", version, sizes)) == (version in SGLANG_VERSIONS[:first])


CONFIG_FAULTS = [
    (BOTH, {"architectures": ["LlamaForCausalLM2"]}, "architectures is", "refuse it, or load another network"),
    (BOTH, {"architectures": []}, "architectures is", "refuse it"),
    (BOTH, {"model_type": "qwen3"}, "model_type is 'qwen3'", "another family's names"),
    (BOTH, {"num_hidden_layers": 2}, "num_hidden_layers is 2", "leave them random without a word"),
    (BOTH, {"num_hidden_layers": ...}, "num_hidden_layers is absent", "random without a word"),
    (BOTH, {"hidden_act": "gelu"}, "hidden_act is 'gelu'", "refuse to start"),
    (("sglang",), {"tie_word_embeddings": True}, "tie_word_embeddings", "the verifier's embedding for the head"),
    (("vllm",), {"tie_word_embeddings": True}, "tie_word_embeddings is True", "this program would not load"),
    (BOTH, {"attention_bias": True}, "attention_bias is True", "look for biases"),
    (BOTH, {"max_position_embeddings": ...}, "max_position_embeddings is absent", "transformers' default"),
    (BOTH, {"num_key_value_heads": ...}, "num_key_value_heads is absent", "transformers' default"),
    (BOTH, {"intermediate_size": "56"}, "intermediate_size is '56'", "refuse to start"),
    (BOTH, {"rms_norm_eps": None}, "rms_norm_eps is None", "transformers' default"),
    (("sglang",), {"draft_vocab_size": None}, "draft_vocab_size is None", "take the verifier's head"),
    (("sglang",), {"draft_vocab_size": ...}, "draft_vocab_size is absent", "refuse to start"),
    (("vllm",), {"draft_vocab_size": None}, "draft_vocab_size is None", "take the verifier's vocabulary for it"),
    (BOTH, {"target_hidden_size": None}, "target_hidden_size is None; leave it out", "multiply null and die"),
    (BOTH, {"target_hidden_size": 64}, "target_hidden_size is 64", "states of that width"),
    (BOTH, {"rope_theta": 1e4}, "rope_parameters .* contradict each other", "choose one of the two"),
    (BOTH, {"rope_theta": ..., "rope_parameters": ...}, "neither rope_parameters nor rope_theta", "10000 for the base"),
    (BOTH, {"rope_theta": 1e4, "rope_parameters": None}, "trained with .*5000", "by other angles than in training"),
    (BOTH, {"rope_theta": None, "rope_parameters": ...}, "rope_theta is None, must be a positive number", "choose one"),
    (BOTH, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5", "turn a part of each head alone"),
    (BOTH, {"layer_types": ["sliding_attention"]}, "layer_types is", "see a window of the text alone"),
    (BOTH, {"rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-06, the weights were trained with 1e-05", "another epsilon"),
    (BOTH, {"max_position_embeddings": 64}, "is 64, the weights were trained with 512", "another position limit"),
    (BOTH, {"norm_output": True, "eagle_config.norm_output": True}, "norm_output is True", "feed the next step"),
    (BOTH, {"fc_norm": True, "eagle_config.fc_norm": True}, "fc_norm.0.weight .* is missing", "leave it"),
    (BOTH, {"eagle_config.norm_output": True}, "norm_output is set in eagle_config alone", "not find it"),
    (("sglang",), {"norm_before_residual": True}, "norm_before_residual is set", "it has no such switch"),
    (("vllm",), {"norm_before_residual": True}, "norm_before_residual is set", "which it was not trained with"),
    (("sglang",), {"norm_before_fc": True}, "which SGLang knows from 0.5.18 on", "drop it without a word"),
    (("vllm",), {"eagle_config.norm_before_fc": True}, "input_norm.weight .* is missing", "leave it as memory was"),
    (("sglang",), {"use_aux_norm": True}, "use_aux_norm is set", "norm the captured layers"),
    (BOTH, {"eagle_config.use_aux_hidden_state": False}, "use_aux_hidden_state is false", "the last state instead"),
    (("sglang",), {NESTED: ...}, f"{NESTED} is None", "guess the layers 2, n // 2 and n - 3"),
    (("sglang",), {"eagle_config": None}, f"{NESTED} is None", "guess the layers 2, n // 2 and n - 3"),
    (("sglang",), {NESTED: [1, 2, 4]}, "is .1, 2, 4.", "inputs of layers .2, 3, 5., and it was trained on .1, 2, 4."),
    (("sglang",), {NESTED: "1,2,4"}, "must be a list of layer numbers", "guess"),
    (("sglang",), {NESTED: [0, 1, 3, 5]}, "fc.weight is .48, 144., must be .48, 192.", "refuse to start"),
    (("sglang",), {"verifier_family": "mamba9"}, "'mamba9' is not known", "by a rule that is not known"),
    (("vllm",), {IDS: [2, 3, 5]}, f"{IDS} is .2, 3, 5.", "inputs of layers .2, 3, 5., and it was trained on .1, 2, 4."),
    (("vllm",), {IDS: ...}, f"{IDS} is not at the top", "numbers, which are SGLang's"),
    (("vllm",), {IDS: ..., "eagle_config": None}, "must be a list of layer numbers", "guess the layers"),
    (BOTH, {"torch_dtype": "float32"}, "fc.weight is BF16, torch_dtype is float32", "cast it"),
    (("sglang",), {"torch_dtype": ...}, "torch_dtype is None", "serve it in float16"),
    (BOTH, {"draft_vocab_size": 199}, "lm_head.weight is .200, 48., must be .199, 48.", "refuse to start"),
    (BOTH, {"draft_vocab_size": 400}, "draft_vocab_size 400 exceeds vocab_size 320", "ids that do not exist"),
    (BOTH, {"head_dim": 12}, "midlayer.self_attn.q_proj.weight is .32, 96., must be .48, 96.", "refuse to start"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("engine", "changes", "what", "effect"),
    [(e, *fault) for engines, *fault in CONFIG_FAULTS for e in engines],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_a_config_that_the_engine_would_misread(directory, engine, changes, what, effect):
    edit_config(directory, **changes)
    assert_fault(directory, engine, what, effect)


def absolute(d2t):
    return d2t + torch.arange(len(d2t))


TENSOR_FAULTS = [
    (("sglang",), {"fc__weight": None}, r"fc.weight \[48, 144\] is missing", "leave it random without a word"),
    (("vllm",), {"norm__weight": None}, r"norm.weight \[48\] is missing", "leave it as memory was"),
    (("sglang",), {"lm_head__weight": None}, "lm_head.weight .* is missing", "leave it random without a word"),
    (("vllm",), {"lm_head__weight": None}, "lm_head.weight .* is missing", "take the verifier's head"),
    (("sglang",), {"fuse__weight": torch.zeros(2)}, r"fuse.weight \[2\] is unknown", "skip it without a word"),
    (("vllm",), {"fc_norm__0__weight": torch.zeros(48)}, r"fc_norm.0.weight \[48\] is unknown", "refuse to start"),
    (("sglang",), {"fc_norm__0__weight": torch.zeros(48)}, "fc_norm.0.weight .* is unknown", "skip it without a word"),
    (("sglang",), {"embed_tokens__weight": torch.zeros(320, 48)}, "embed_tokens.weight", "use the verifier's in its"),
    (("vllm",), {"embed_tokens__weight": torch.zeros(320, 48)}, "embed_tokens.weight", "in place of the verifier's"),
    (BOTH, {"fc__weight": lambda t: t[:, 1:]}, r"fc.weight is \[48, 143\], must be \[48, 144\]", "refuse to start"),
    (BOTH, {"fc__weight": lambda t: t.float()}, "fc.weight is F32, torch_dtype is bfloat16", "cast it"),
    (BOTH, {"layers__0__hidden_norm__weight": torch.ones(48).bfloat16()}, "are one tensor to it", "that it reads last"),
    (BOTH, {"d2t": None}, r"d2t \[200\] is missing", "take draft ids for the verifier's own ids without a word"),
    (BOTH, {"d2t": lambda t: t.int()}, r"d2t is I32 \[200\], must be I64 \[200\]", "read other numbers"),
    (BOTH, {"d2t": lambda t: t[1:]}, r"d2t is I64 \[199\]", "read other numbers"),
    (BOTH, {"d2t": absolute}, "d2t holds absolute target ids; subtract", "draft other tokens than the head means"),
    (BOTH, {"d2t": absolute, "t2d": None}, "draft vocabulary holds target ids", "other tokens than the head means"),
    (BOTH, {"d2t": lambda t: t.flip(0), "t2d": None}, "draft vocabulary is not sorted", "draft other tokens"),
    (BOTH, {"t2d": lambda t: ~t}, "do not belong together", "draft other tokens"),
    (BOTH, {"t2d": lambda t: t.roll(1)}, "does not hit the ids that t2d marks", "draft other tokens"),
    (BOTH, {"t2d": lambda t: t.long()}, r"t2d is I64 \[320\], must be BOOL \[320\]", "contradict each other"),
]


@pytest.mark.parametrize(
    ("engine", "changes", "what", "effect"),
    [(e, *fault) for engines, *fault in TENSOR_FAULTS for e in engines],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_weights_that_the_engine_would_skip_guess_or_misread(directory, engine, changes, what, effect):
    edit_tensors(directory, **changes)
    assert_fault(directory, engine, what, effect)


@pytest.mark.parametrize("engine", BOTH)
def test_maps_beside_a_whole_vocabulary(model, tmp_path, engine):
    directory = save_drafter(tiny_drafter(model, draft_vocab_size=320), tmp_path / "d", origin=ORIGIN)
    edit_tensors(directory, d2t=torch.zeros(320, dtype=torch.long))
    if engine == "vllm":
        assert_fault(directory, "vllm", "d2t is there although draft_vocab_size is vocab_size", "refuse to start")
    else:
        assert check(directory, "sglang") == [], "they map every id to itself"
        edit_tensors(directory, d2t=lambda t: t + 1)
        assert_fault(directory, "sglang", "draft vocabulary holds target ids 1..320", "draft other tokens")


def test_layer_ids_are_read_by_the_family_and_version_that_serve(directory):
    edit_config(directory, **{"verifier_family": "kimi_k25", NESTED: [1, 2, 4], "sglang_versions": ["0.5.12.post1"]})
    assert_fault(directory, "sglang", "is .1, 2, 4.", "inputs of layers .2, 3, 5., and it was trained on .1, 2, 4.")
    edit_config(directory, **{NESTED: [0, 1, 3]})
    assert check(directory, "sglang", "0.5.12.post1") == []
    assert_fault(directory, "sglang", "is .0, 1, 3.", "inputs of layers .0, 1, 3., and it was trained on .1, 2, 4.")


@given(ids=st.lists(st.integers(0, 6), min_size=3, max_size=3, unique=True), engine=st.sampled_from(BOTH))
def test_any_other_layers_are_a_fault(whole, tmp_path_factory, ids, engine):
    directory = shutil.copytree(whole, tmp_path_factory.mktemp("ids") / "d")
    edit_config(directory, **{NESTED if engine == "sglang" else IDS: ids})
    assert (check(directory, engine) == []) == (ids == ([0, 1, 3] if engine == "sglang" else [1, 2, 4]))


@pytest.mark.parametrize(
    ("family", "layers"), [("mamba9", (2, 3, 5)), ("deepseek_v3", (1, 3, 5))], ids=["family", "layers"]
)
def test_a_drafter_that_sglang_cannot_be_told_of_is_written_for_vllm_alone(model, tmp_path, family, layers, caplog):
    drafter = tiny_drafter(model, capture_layers=layers)
    warn_of_serving(drafter.shape, family)
    assert "for vLLM alone" in caplog.text and family in caplog.text
    directory = save_drafter(drafter, tmp_path / "d", origin=replace(ORIGIN, verifier_family=family))
    config = config_of(directory)
    assert config["sglang_versions"] == [] and "eagle_aux_hidden_state_layer_ids" not in config["eagle_config"]
    assert read_shape(directory).capture_layers == layers


@pytest.mark.parametrize(("flag", "version"), [("fc_norm", "0.5.10.post1"), ("norm_output", "0.5.10.post1")])
def test_old_versions_drop_what_they_do_not_know(model, tmp_path, flag, version):
    directory = save_drafter(tiny_drafter(model, **{flag: True}), tmp_path / "d", origin=ORIGIN)
    assert_fault(directory, "sglang", f"{flag} is set, which SGLang knows from", "drop it without a word", version)


def test_names_of_the_decoder_layer_by_version(directory):
    renamed = {f"layers__0__{n[9:]}".replace(".", "__"): t for n, t in midlayer(directory).items()}
    edit_tensors(directory, **renamed, **{n.replace(".", "__"): None for n in midlayer(directory)})
    assert check(directory, "sglang") == check(directory, "vllm") == []
    assert_fault(directory, "sglang", "midlayer.mlp.up_proj.weight .* is missing", "random", "0.5.10.post1")


def midlayer(directory):
    return {n: t for n, t in load_file(directory / "model.safetensors").items() if n.startswith("midlayer.")}


@pytest.mark.parametrize(
    ("engine", "config", "what", "effect"),
    [
        (
            "sglang",
            {"vocab_size": 321},
            "vocab_size is 320, the verifier's is 321",
            "refuse to start, or draft nonsense",
        ),
        ("vllm", {"hidden_size": 64}, "hidden_size is 48, the verifier's is 64", "refuse to start, or draft nonsense"),
        ("sglang", {"max_position_embeddings": 1024}, "is 512, the verifier's is 1024", "refuse to start at its full"),
        ("sglang", {"num_hidden_layers": 4}, "of a verifier with 4 layers", "not capture all of them"),
        ("vllm", {"num_hidden_layers": 4}, "of a verifier with 4 layers", "not capture all of them"),
        ("sglang", {"model_type": "qwen3"}, "verifier_family is llama, the verifier is qwen3", "otherwise"),
    ],
)
def test_another_verifier_than_the_drafters(directory, verifier, tmp_path, engine, config, what, effect):
    other = shutil.copytree(verifier, tmp_path / "other")
    edit_config(other, **config)
    assert_fault(directory, engine, what, effect, verifier=read_verifier(other))


def test_a_drafter_of_another_program_is_taken_at_its_word(directory):
    """Without a word of the weights, what the two engines read must agree; one list alone is no contradiction."""
    edit_tensors(directory, word=False)
    edit_config(directory, capture_layers=..., verifier_family=..., sglang_versions=..., origin=...)
    assert check(directory, "sglang") == check(directory, "vllm") == []
    edit_config(directory, **{NESTED: [1, 2, 4]})
    assert_fault(directory, "sglang", "is .1, 2, 4.", "inputs of layers .2, 3, 5.")
    edit_config(directory, **{NESTED: [0, 1, 3], "rope_parameters": ..., "norm_before_residual": True})
    assert check(directory, "vllm") == [], "vLLM computes it, if that is what was trained"
    assert_fault(directory, "sglang", "norm_before_residual is set", "no such switch")


@pytest.mark.parametrize(
    ("engine", "version", "message"),
    [
        ("sglang", "0.5.24", "SGLang 0.5.24 is not known"),
        ("vllm", "0.11.0", "vLLM 0.11.0 is not known"),
        ("vllm", "new", "'new' is no version"),
        ("tgi", None, "engine 'tgi' is not known; known are sglang and vllm"),
    ],
)
def test_engines_that_were_not_read_are_refused(directory, engine, version, message):
    with pytest.raises(ValueError, match=message):
        check(directory, engine, version)


def test_files_that_cannot_be_read_are_named(directory, tmp_path):
    with pytest.raises(ValueError, match=r"nowhere/config.json: unreadable"):
        check(tmp_path / "nowhere", "vllm")
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        check(directory, "vllm")
    file.unlink()
    with pytest.raises(ValueError, match=r"model.safetensors: not found"):
        check(directory, "vllm")
