"""Drafters of other programs, there and back: the same logits, or a refusal that names what this network lacks."""

import json
import shutil
from dataclasses import replace

import pytest
import reference
import torch
from drafter_files import config_of, edit_config, edit_tensors
from safetensors.torch import load_file, save_file
from tiny_drafter import ORIGIN, tiny_drafter
from transformers import AutoModelForCausalLM

from eagle3.export import parity
from eagle3.export.__main__ import main
from eagle3.export.check import check
from eagle3.export.convert import Source, read_source
from eagle3.export.directory import load_drafter, save_drafter
from eagle3.export.verifier import read_verifier

ROPE = {"rope_type": "default", "rope_theta": 5000.0}


@pytest.fixture
def saved(model, tmp_path):
    return save_drafter(tiny_drafter(model, rope_parameters=ROPE), tmp_path / "ours", origin=ORIGIN)


def speculators(directory, verifier, *, embedding=None, **network):
    """As speculators 0.9.0 saves it, written from its documentation and not by the code under test."""
    drafter = tiny_drafter(
        AutoModelForCausalLM.from_pretrained(verifier, dtype=torch.float32), rope_parameters=ROPE, **network
    )
    for parameter in drafter.parameters():  # norms too: weights of one would hide a lost tensor
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
    tensors = {n.replace("midlayer.", "layers.0."): t.detach().contiguous() for n, t in drafter.state_dict().items()}
    if embedding is not None:
        tensors["embed_tokens.weight"] = embedding
    config = {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "speculators_version": "0.9.0",
        "draft_vocab_size": 200, "norm_before_residual": False, "norm_before_fc": False,
        "fc_norm": drafter.shape.fc_norm, "norm_output": drafter.shape.norm_output, "embed_requires_grad": False,
        "target_hidden_size": None, "eagle_aux_hidden_state_layer_ids": [1, 2, 4], "tie_word_embeddings": False,
        "dtype": "float32",
        "transformer_layer_config": {
            "model_type": "llama", "vocab_size": 320, "hidden_size": 48, "intermediate_size": 56,
            "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
            "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_parameters": ROPE,
        },
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1,
                                  "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": str(verifier), "architectures": ["LlamaForCausalLM"]},
        },
    }  # fmt: skip
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def edit_layer(directory, **changes):
    edit_config(directory, transformer_layer_config={**config_of(directory)["transformer_layer_config"], **changes})


@pytest.mark.parametrize("fc_norm", [False, True])
@pytest.mark.parametrize("norm_output", [False, True])
def test_speculators_format_gives_the_logits_of_the_independent_network(
    verifier, model, tmp_path, fc_norm, norm_output
):
    source = speculators(tmp_path / "theirs", verifier, fc_norm=fc_norm, norm_output=norm_output)
    assert main([str(source), "--out", str(tmp_path / "ours"), "--verifier", str(verifier)]) == 0
    weights = {n.replace("layers.0.", "midlayer."): t for n, t in load_file(source / "model.safetensors").items()}
    net = reference.Network(weights, head_dim=8, eps=1e-5, theta=5000.0, fc_norm=fc_norm, norm_output=norm_output)
    table = model.get_input_embeddings().weight.data
    ours = load_drafter(tmp_path / "ours", table)
    logits, tokens, aux = parity_outputs(ours)
    document = reference.Document(tokens, [True] * len(tokens), torch.arange(len(tokens)), aux, aux, True)
    for k, state in enumerate(reference.states(net, reference.Verifier(table, table), document, 3)):
        theirs = reference.rms_norm(state, weights["norm.weight"], 1e-5) @ weights["lm_head.weight"].T
        torch.testing.assert_close(logits[k], theirs[: logits.shape[1]], rtol=1e-4, atol=1e-5)
    targets = weights["d2t"] + torch.arange(200)
    assert torch.equal(ours.target_ids(torch.arange(200)), targets)


def parity_outputs(drafter):
    """(logits [K, R, D], tokens, aux) on random states, through the unroll that training runs."""
    tokens = torch.randint(320, (8,), generator=torch.Generator().manual_seed(1))
    aux = torch.randn(8, 3 * 48, generator=torch.Generator().manual_seed(2))
    rows = torch.arange(5)
    index = rows + 1 + torch.arange(3)[:, None]
    zeros = torch.zeros(1, 8, dtype=torch.long)
    with torch.inference_mode():
        states = torch.stack(parity.ttt.unroll(drafter, aux, tokens, torch.arange(8), zeros, rows, index))
        return drafter.lm_head(drafter.norm(states)), tokens.tolist(), aux


@pytest.mark.parametrize("size", [200, 320])
def test_ours_to_speculators_and_back(model, verifier, tmp_path, size):
    origin = replace(ORIGIN, verifier_sha256=read_verifier(verifier).sha256())
    ours = save_drafter(tiny_drafter(model, draft_vocab_size=size), tmp_path / "ours", origin=origin)
    theirs, back = tmp_path / "theirs", tmp_path / "back"
    assert main(["to-speculators", str(ours), "--out", str(theirs), "--verifier", str(verifier)]) == 0
    config = config_of(theirs)
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": str(verifier), "architectures": ["LlamaForCausalLM"],
    }  # fmt: skip
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == ORIGIN.ttt_steps
    assert config["norm_before_residual"] is False, "vLLM takes an absent key for true"
    assert check(theirs, "vllm", None, read_verifier(verifier)) == [], "its embedding is the verifier's"
    assert "embed_tokens.weight" in str(check(theirs, "vllm")), "which nobody knows without the verifier"
    assert main([str(theirs), "--out", str(back), "--verifier", str(verifier)]) == 0
    for name, tensor in load_file(ours / "model.safetensors").items():
        assert torch.equal(load_file(back / "model.safetensors")[name], tensor)
    unknown = {"origin", "chat_template_sha256", "eos_token_id"}
    assert config_of(back) == {key: value for key, value in config_of(ours).items() if key not in unknown}


@pytest.mark.parametrize("prefix", ["layers.0.", "model.layers.0."])
def test_tensors_named_layers_0(saved, verifier, tmp_path, prefix, capsys):
    theirs = shutil.copytree(saved, tmp_path / "theirs")
    tensors = {n.replace("midlayer.", prefix): t for n, t in load_file(saved / "model.safetensors").items()}
    del tensors["t2d"]  # some programs write d2t alone
    save_file(tensors, theirs / "model.safetensors")
    edit_config(theirs, sglang_versions=..., verifier_family=..., origin=...)
    assert main([str(theirs), "--verifier", str(verifier)]) == 0
    assert "tensors named layers.0" in capsys.readouterr().out
    written = tmp_path / "theirs-sglang-0.5.16"
    assert all(
        torch.equal(load_file(written / "model.safetensors")[name], tensor)
        for name, tensor in load_file(saved / "model.safetensors").items()
    )


def test_an_embedding_is_left_out_only_if_it_is_the_verifiers(verifier, model, tmp_path, caplog):
    table = model.get_input_embeddings().weight.data
    frozen = speculators(tmp_path / "frozen", verifier, embedding=table.clone())
    out = ["--out", str(tmp_path / "ours"), "--verifier", str(verifier)]
    assert main([str(frozen), *out]) == 0
    assert "embed_tokens.weight" not in load_file(tmp_path / "ours" / "model.safetensors")
    with pytest.raises(ValueError, match=r"brings embed_tokens.weight: give the verifier's directory with --verifier"):
        read_source(frozen, capture_layers=None, verifier=None)
    trained = speculators(tmp_path / "trained", verifier, embedding=table + 0.01)
    shutil.rmtree(tmp_path / "ours")
    assert main([str(trained), *out]) == 1
    assert "it was trained with the drafter" in caplog.text and not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_before_residual": True}, "norm_before_residual is True, must be false"),
        ({"norm_before_residual": ...}, "norm_before_residual is None, must be false"),
        ({"norm_before_fc": True}, "norm_before_fc is set"),
        ({"target_hidden_size": 64}, "target_hidden_size is set"),
        ({"speculators_model_type": "dflash"}, "is 'dflash', only eagle3"),
        ({"eagle_aux_hidden_state_layer_ids": None}, "names no capture layers"),
        ({"draft_vocab_size": None}, "draft_vocab_size is None"),
        ({"model_type": "qwen3"}, "model_type is 'qwen3', whose layer computes something else"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2"),
        ({"sliding_window": 2048}, "has a sliding window"),
        ({"layer_types": ["sliding_attention"]}, "has a sliding window"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}, "a part of each head only"),
        (
            {"intermediate_size": 64},
            r"tensors are not those .*gate_proj.weight is F32 \[56, 48\], must be F32 \[64, 48\]",
        ),
    ],
)
def test_a_network_that_this_program_does_not_compute_is_refused(verifier, tmp_path, changes, message):
    source = speculators(tmp_path / "theirs", verifier)
    of_layer = changes.keys() & {"model_type", "num_hidden_layers", "sliding_window", "layer_types", "attention_bias",
                                 "hidden_act", "rope_parameters", "intermediate_size"}  # fmt: skip
    (edit_layer if of_layer else edit_config)(source, **changes)
    with pytest.raises(ValueError, match=f"{source}/.*{message}"):
        read_source(source, capture_layers=None, verifier=None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers__0__self_attn__q_norm__weight": torch.ones(8)}, r"self_attn.q_norm.weight \[8\] is unknown"),
        ({"norm__weight": None}, r"norm.weight \[48\] is missing"),
        ({"fc__weight": lambda t: t.bfloat16()}, r"weights are in \['torch.bfloat16', 'torch.float32'\]"),
        ({"d2t": lambda t: t.int()}, "d2t is torch.int32"),
        ({"d2t": None}, r"d2t \[200\] is missing"),
    ],
)
def test_tensors_of_another_network_are_refused(verifier, tmp_path, changes, message):
    source = speculators(tmp_path / "theirs", verifier)
    edit_tensors(source, **changes)
    with pytest.raises(ValueError, match=f"{source}/model.safetensors.*{message}"):
        read_source(source, capture_layers=None, verifier=None)


def test_what_vllm_takes_for_granted_in_speculators_format_is_told(verifier, tmp_path):
    source = speculators(tmp_path / "theirs", verifier)
    assert check(source, "vllm") == []
    [fault] = check(source, "sglang")
    assert "speculators' format; SGLang 0.5.16 would not know the network" in str(fault)
    edit_config(source, norm_before_residual=...)
    [fault] = check(source, "vllm")
    assert "norm_before_residual is absent; vLLM 0.32.0 would take it for true" in str(fault)


def swapped(tensors):
    gate, up = (f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up"))
    return {**tensors, gate: tensors[up], up: tensors[gate]}


@pytest.mark.parametrize("wrong", [swapped, lambda t: {**t, "lm_head.weight": t["lm_head.weight"].roll(1, 0)}])
def test_a_wrong_conversion_is_noticed_and_nothing_is_written(verifier, tmp_path, monkeypatch, caplog, wrong):
    source = speculators(tmp_path / "theirs", verifier)
    real = Source.own_tensors
    monkeypatch.setattr(Source, "own_tensors", lambda self: wrong(real(self)))
    assert main([str(source), "--out", str(tmp_path / "ours"), "--verifier", str(verifier)]) == 1
    assert "other logits than its source" in caplog.text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["theirs"]


def test_other_draft_ids_are_noticed(saved, verifier, tmp_path):
    source = read_source(saved, capture_layers=None, verifier=None)
    edit_tensors(
        saved, lm_head__weight=lambda t: t, d2t=lambda t: torch.zeros_like(t), t2d=lambda t: torch.arange(320) < 200
    )
    with pytest.raises(ValueError, match="other tokens than its source"):
        parity.refuse_other_outputs(source, saved)


def test_layers_may_be_told_for_a_drafter_that_names_none(saved, verifier, tmp_path, caplog):
    edit_tensors(saved, word=False)
    edit_config(saved, sglang_versions=..., verifier_family=..., origin=..., capture_layers=...,
                eagle_aux_hidden_state_layer_ids=..., eagle_config=...)  # fmt: skip
    arguments = [str(saved), "--out", str(tmp_path / "ours"), "--verifier", str(verifier)]
    assert main(arguments) == 1 and "names no capture layers" in caplog.text
    assert main([*arguments, "--capture-layers", "1", "3", "5"]) == 0
    assert config_of(tmp_path / "ours")["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 4]
    assert read_verifier(verifier).num_layers == 7
