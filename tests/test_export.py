"""The drafter directory: every figure an engine reads is in it, and nothing wrong in it is loaded."""

import json
from dataclasses import replace

import pytest
import torch
from drafter_files import config_of, edit_tensors
from safetensors.torch import load_file, save_file
from tiny import edit_json
from tiny_drafter import LAYERS, ORIGIN, PROMPTS, tiny_drafter
from transformers import LlamaConfig

from eagle3 import replayed
from eagle3.export.directory import backup_of, load_drafter, read_origin, read_shape, read_vocab, save_drafter

TENSORS = {
    "fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d",
    "midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight", "midlayer.post_attention_layernorm.weight",
    "midlayer.self_attn.q_proj.weight", "midlayer.self_attn.k_proj.weight", "midlayer.self_attn.v_proj.weight",
    "midlayer.self_attn.o_proj.weight", "midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight",
    "midlayer.mlp.down_proj.weight",
}  # fmt: skip
"""What SGLang and vLLM read; no embedding, which both share from the verifier."""


@pytest.fixture
def drafter(model):
    return tiny_drafter(model)


@pytest.fixture
def saved(drafter, tmp_path):
    return save_drafter(drafter, tmp_path / "drafter", origin=ORIGIN)


def embedding_of(model):
    return model.get_input_embeddings().weight.data


@pytest.mark.parametrize("fc_norm", [False, True])
@pytest.mark.parametrize("norm_output", [False, True])
def test_round_trip_in_float32_reproduces_the_logits(model, tmp_path, fc_norm, norm_output):
    drafter = tiny_drafter(model, fc_norm=fc_norm, norm_output=norm_output)
    for parameter in drafter.parameters():  # norms too: an untouched weight of ones would hide a lost tensor
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
    save_drafter(drafter, tmp_path / "d", origin=ORIGIN, dtype=torch.float32)
    again = load_drafter(tmp_path / "d", embedding_of(model))
    assert again.shape == drafter.shape == read_shape(tmp_path / "d")
    for key in ("fc_norm", "norm_output"):
        config = config_of(tmp_path / "d")
        assert config[key] == config["eagle_config"][key] == getattr(drafter.shape, key)
    text = replayed.capture(model, PROMPTS[1], [3, 5, 7, 9, 11, 13], LAYERS)
    plan = text.plan(drafter, 3)
    before, after = (replayed.drafts_of(d, text, plan) for d in (drafter, again))
    assert torch.equal(before.tokens, after.tokens) and torch.equal(before.lead, after.lead)
    assert all(torch.equal(again.state_dict()[n], t) for n, t in drafter.state_dict().items())


def test_config_says_what_both_engines_read(saved, drafter, model):
    config = config_of(saved)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["model_type"] == "llama"
    assert config["draft_vocab_size"] == drafter.lm_head.weight.shape[0] == 200
    assert config["vocab_size"] == model.config.vocab_size
    assert config["tie_word_embeddings"] is False and config["num_hidden_layers"] == 1
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (4, 2, 8)


def test_capture_layers_are_in_the_numbering_of_each_engine(model, tmp_path):
    drafter = tiny_drafter(model, capture_layers=(2, 3, 5))
    config = config_of(save_drafter(drafter, tmp_path / "d", origin=ORIGIN))
    assert config["capture_layers"] == config["eagle_aux_hidden_state_layer_ids"] == [2, 3, 5]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
    assert config["eagle_config"]["use_aux_hidden_state"] is True


def test_capture_layers_are_told_by_the_verifiers_family(model, tmp_path):
    drafter = tiny_drafter(model, capture_layers=(3, 4, 6))
    directory = save_drafter(drafter, tmp_path / "d", origin=replace(ORIGIN, verifier_family="kimi_k25"))
    config = config_of(directory)
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [3, 4, 6], "SGLang 0.5.16 adds nothing here"
    assert config["sglang_versions"] == ["0.5.14", "0.5.16", "0.5.18", "0.5.20", "0.5.23"]
    assert read_shape(directory).capture_layers == (3, 4, 6)
    edit_json(directory / "config.json", sglang_versions=["0.5.12.post1"])
    with pytest.raises(ValueError, match=r"contradict each other: .*in SGLang 0.5.12.post1 for kimi_k25': \[4, 5, 7\]"):
        read_shape(directory)


def test_position_limit_is_the_verifiers_and_the_trained_length_is_noted(saved):
    assert config_of(saved)["max_position_embeddings"] == 512
    assert read_origin(saved) == ORIGIN and ORIGIN.max_len == 64


@pytest.mark.parametrize(("dtype", "code"), [(torch.bfloat16, "bfloat16"), (torch.float32, "float32")])
def test_dtype_is_as_asked_in_tensors_and_config(drafter, tmp_path, dtype, code):
    directory = save_drafter(drafter, tmp_path / "d", origin=ORIGIN, dtype=dtype)
    tensors = load_file(directory / "model.safetensors")
    assert config_of(directory)["torch_dtype"] == code
    assert {t.dtype for n, t in tensors.items() if n not in ("d2t", "t2d")} == {dtype}
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool


def test_tensors_are_those_that_engines_read_and_no_embedding(saved, model, tmp_path):
    assert set(load_file(saved / "model.safetensors")) == TENSORS
    fc_norm = save_drafter(tiny_drafter(model, fc_norm=True), tmp_path / "n", origin=ORIGIN)
    assert set(load_file(fc_norm / "model.safetensors")) == TENSORS | {f"fc_norm.{i}.weight" for i in range(3)}
    loaded = load_drafter(saved, embedding_of(model))
    assert torch.equal(loaded.embedding, embedding_of(model))


def test_vocabulary_maps_are_in_the_weight_file(saved):
    tensors = load_file(saved / "model.safetensors")
    targets = tensors["d2t"] + torch.arange(200)
    assert torch.equal(targets, tensors["t2d"].nonzero()[:, 0])
    assert config_of(saved)["draft_vocab_size"] == 200
    assert torch.equal(read_vocab(saved).target_ids, targets)


def test_a_whole_vocabulary_has_a_head_of_its_own_and_no_maps(model, tmp_path):
    drafter = tiny_drafter(model, draft_vocab_size=320)
    drafter.lm_head.weight.data += 0.1
    directory = save_drafter(drafter, tmp_path / "d", origin=ORIGIN, dtype=torch.float32)
    assert set(load_file(directory / "model.safetensors")) == TENSORS - {"d2t", "t2d"}, "vLLM refuses them then"
    assert config_of(directory)["draft_vocab_size"] == 320, "never null, which means the verifier's head"
    again = load_drafter(directory, embedding_of(model))
    assert torch.equal(again.lm_head.weight, drafter.lm_head.weight)
    assert torch.equal(again.target_ids(torch.arange(320)), torch.arange(320)) and bool(again.t2d.all())
    assert torch.equal(read_vocab(directory).target_ids, torch.arange(320))
    with_maps = {**load_file(directory / "model.safetensors"), "d2t": again.d2t, "t2d": again.t2d}
    save_file(with_maps, directory / "model.safetensors")
    assert read_vocab(directory).size == 320, "other programs write them, and they map nothing"


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 100000.0},
        {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 256},
    ],
)  # fmt: skip
def test_rope_is_read_alike_in_both_spellings(model, tmp_path, rope):
    directory = save_drafter(tiny_drafter(model, rope_parameters=rope), tmp_path / "d", origin=ORIGIN)
    config = config_of(directory)
    assert (
        LlamaConfig.from_pretrained(directory).rope_parameters | rope
        == LlamaConfig.from_pretrained(directory).rope_parameters
    )
    for spelling in (("rope_parameters",), ("rope_theta", "rope_scaling")):
        edit_json(directory / "config.json", **dict.fromkeys(spelling))
        assert read_shape(directory).rope_parameters == rope
        (directory / "config.json").write_text(json.dumps(config))


def test_a_config_with_the_fewest_keys_is_read(saved, drafter, model):
    """The form of other exporters: top-level ids and rope_theta, no capture_layers, no flags, no origin."""
    config = config_of(saved)
    for key in ("capture_layers", "rope_parameters", "rope_scaling", "fc_norm", "norm_output", "origin",
                "chat_template_sha256", "verifier_family", "sglang_versions"):  # fmt: skip
        del config[key]
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 1, 3], "use_aux_hidden_state": True}
    (saved / "config.json").write_text(json.dumps(config))
    edit_tensors(saved, word=False)  # other exporters leave no word on the network with the weights
    shape = load_drafter(saved, embedding_of(model)).shape
    assert shape == replace(drafter.shape, rope_parameters={"rope_type": "default", "rope_theta": 5000.0})
    assert read_origin(saved) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"capture_layers": None, "eagle_aux_hidden_state_layer_ids": None, "eagle_config": None}, "names no capture"),
        ({"capture_layers": [1, 2, 5]}, "capture layers contradict each other"),
        ({"draft_vocab_size": None}, "draft_vocab_size is None.*verifier's head"),
        ({"draft_vocab_size": 321}, "draft_vocab_size 321 exceeds vocab_size 320"),
        ({"draft_vocab_size": 199}, "draft_vocab_size is 199, the weights were trained with 200"),
        ({"rope_theta": 10000.0}, "rope_parameters .* and rope_theta/rope_scaling .* contradict"),
        ({"rope_theta": None, "rope_parameters": None}, "names neither rope_parameters nor rope_theta"),
        ({"norm_before_residual": True}, "norm_before_residual is set"),
        ({"fc_norm": True}, "fc_norm is True at the top and False in eagle_config"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"architectures": ["Eagle3Speculator"]}, "architectures is .*LlamaForCausalLMEagle3"),
        ({"torch_dtype": "float32"}, "must be F32"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2"),
    ],
)
def test_a_config_that_would_be_misread_is_refused(saved, model, changes, message):
    edit_json(saved / "config.json", **changes)
    with pytest.raises(ValueError, match=f"{saved}/.*{message}"):
        load_drafter(saved, embedding_of(model))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"midlayer__hidden_norm__weight": None}, r"midlayer.hidden_norm.weight \[48\] is missing"),
        ({"embed_tokens__weight": torch.zeros(320, 48)}, r"embed_tokens.weight \[320, 48\] is unknown"),
        ({"fc__weight": lambda t: t[:, 1:].contiguous()}, r"fc.weight is BF16 \[48, 143\], must be BF16 \[48, 144\]"),
        ({"norm__weight": lambda t: t.float()}, r"norm.weight is F32 \[48\], must be BF16"),
        ({"d2t": lambda t: t.int()}, r"d2t is I32 \[200\], must be I64"),
        ({"d2t": lambda t: t + torch.arange(200)}, "absolute target ids"),
        ({"d2t": None}, r"d2t \[200\] is missing"),
        ({"t2d": lambda t: ~t}, "do not belong together"),
        ({"t2d": lambda t: t.roll(1)}, "does not hit the ids that t2d marks"),
    ],
)
def test_weights_that_would_be_skipped_or_guessed_are_refused(saved, model, changes, message):
    edit_tensors(saved, **changes)
    with pytest.raises(ValueError, match=f"model.safetensors.*{message}"):
        load_drafter(saved, embedding_of(model))


def test_a_cut_off_file_and_an_absent_directory_are_named(saved, model, tmp_path):
    with pytest.raises(ValueError, match=r"nowhere is no drafter directory: it needs config.json .*train.py"):
        read_shape(tmp_path / "nowhere")
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        load_drafter(saved, embedding_of(model))


def test_a_server_of_another_user_can_read_it(saved):
    assert [path.stat().st_mode & 0o777 for path in (saved, *sorted(saved.iterdir()))] == [0o755, 0o644, 0o644]


def test_an_embedding_of_another_verifier_is_refused(saved):
    with pytest.raises(ValueError, match=r"is verifier\.path the model"):
        load_drafter(saved, torch.zeros(321, 48))


def test_the_same_drafter_gives_the_same_bytes(drafter, tmp_path):
    """Runs and evaluations are told apart by the hash of these files."""
    paths = [save_drafter(drafter, tmp_path / str(i), origin=ORIGIN) / "model.safetensors" for i in range(8)]
    assert len({path.read_bytes() for path in paths}) == 1


def test_saving_replaces_the_old_one_whole(saved, model):
    other = tiny_drafter(model, fc_norm=True, seed=5)
    save_drafter(other, saved, origin=ORIGIN, dtype=torch.float32)
    assert torch.equal(load_drafter(saved, embedding_of(model)).fc.weight, other.fc.weight)
    assert sorted(p.name for p in saved.parent.iterdir()) == ["drafter"], "no temporary directory stays"


@pytest.mark.parametrize("survived", [0, 1])
def test_a_death_while_saving_leaves_the_old_one_loadable(saved, drafter, model, monkeypatch, survived):
    """survived 0: killed while writing; 1: killed between the two renames."""
    real, done = type(saved).rename, []

    def rename(self, target):
        if len(done) == survived:
            raise KeyboardInterrupt
        done.append(target)
        return real(self, target)

    other = tiny_drafter(model, seed=5)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(type(saved), "rename", rename)
        save_drafter(other, saved, origin=ORIGIN)
    assert saved.exists() == (survived == 0) and backup_of(saved).exists() == (survived == 1)
    assert torch.equal(load_drafter(saved, embedding_of(model)).fc.weight, drafter.fc.weight.bfloat16().float())
    save_drafter(other, saved, origin=ORIGIN)
    assert torch.equal(load_drafter(saved, embedding_of(model)).fc.weight, other.fc.weight.bfloat16().float())
    assert not backup_of(saved).exists()


def test_a_full_disk_leaves_the_old_one(saved, drafter, model, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("eagle3.export.directory.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        save_drafter(tiny_drafter(model, seed=5), saved, origin=ORIGIN)
    monkeypatch.undo()
    assert torch.equal(load_drafter(saved, embedding_of(model)).fc.weight, drafter.fc.weight.bfloat16().float())
    assert sorted(p.name for p in saved.parent.iterdir()) == ["drafter"]


def test_a_directory_with_other_files_is_not_replaced(drafter, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"thesis\.tex.*which saving would remove"):
        save_drafter(drafter, tmp_path, origin=ORIGIN)
    assert (tmp_path / "thesis.tex").exists()


def test_a_diverged_drafter_is_not_written(drafter, tmp_path):
    drafter.fc.weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"fc.weight is not finite"):
        save_drafter(drafter, tmp_path / "d", origin=ORIGIN)
    assert not (tmp_path / "d").exists()
