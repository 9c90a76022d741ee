"""python -m eagle3.export: from a training or a directory to one that an engine serves, or a message and exit 1."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from drafter_files import config_of, edit_config
from safetensors.torch import load_file, save_file
from tiny import tiny_verifier
from tiny_drafter import ORIGIN, tiny_drafter
from transformers import AutoModelForCausalLM

from eagle3.checkpoints import publish
from eagle3.export.__main__ import main
from eagle3.export.check import check
from eagle3.export.directory import load_drafter, read_origin, save_drafter
from eagle3.export.verifier import read_verifier

NESTED = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    torch.set_num_threads(1)
    return tiny_verifier(tmp_path_factory.mktemp("verifier") / "v")


@pytest.fixture(scope="module")
def drafter(verifier):
    return tiny_drafter(AutoModelForCausalLM.from_pretrained(verifier, dtype=torch.float32), capture_layers=(3, 4, 6))


@pytest.fixture(scope="module")
def origin(verifier):
    return replace(ORIGIN, verifier_sha256=read_verifier(verifier).sha256())


@pytest.fixture
def run(drafter, origin, tmp_path):
    """A training's run directory with its best checkpoint."""
    step = save_drafter(drafter, tmp_path / "run" / "checkpoints" / "step-000007", origin=origin)
    (step / "trainer.ckpt").write_bytes(b"optimizer")
    publish(tmp_path / "run", 7)
    return tmp_path / "run"


def test_a_training_is_exported_beside_its_best_drafter(run, origin, capsys):
    assert main([str(run), "--sglang", "0.5.23"]) == 0
    out = run / "drafter-sglang-0.5.23"
    told = " ".join(capsys.readouterr().out.replace("\\\n", " ").split())
    assert f"next: python evaluate.py drafter_dir={out}" in told and "--speculative-algorithm EAGLE3" in told
    assert check(out, "sglang", "0.5.23") == check(out, "vllm") == []
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "model.safetensors"]
    assert read_origin(out) == origin, "what it was made for stays with it"
    best = load_file(run / "drafter" / "model.safetensors")
    assert all(torch.equal(best[name], tensor) for name, tensor in load_file(out / "model.safetensors").items())
    assert main([str(run), "--sglang", "0.5.23"]) == 0, "the same command again writes the same"


def test_another_sglang_is_told_other_ids(drafter, tmp_path):
    origin = ORIGIN.__class__(**{**vars(ORIGIN), "verifier_family": "kimi_k25"})
    ours = save_drafter(drafter, tmp_path / "ours", origin=origin)
    assert config_of(ours)["eagle_config"][NESTED] == [3, 4, 6]
    assert check(ours, "sglang", "0.5.12.post1") != []
    assert main([str(ours), "--sglang", "0.5.12.post1", "--out", str(tmp_path / "old")]) == 0
    assert config_of(tmp_path / "old")["eagle_config"][NESTED] == [2, 3, 5]
    assert config_of(tmp_path / "old")["sglang_versions"] == ["0.5.10.post1", "0.5.12.post1"]
    assert check(tmp_path / "old", "sglang", "0.5.12.post1") == []


def test_a_trainings_own_checkpoint_is_never_overwritten(run, caplog):
    for out in (run / "drafter", run / "checkpoints" / "step-000007"):
        assert main([str(run), "--out", str(out)]) == 1
        assert "trainer.ckpt" in caplog.text
    assert (run / "drafter" / "trainer.ckpt").read_bytes() == b"optimizer"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sglang", "0.5.24"], "SGLang 0.5.24 is not known"),
        (["--sglang", "latest"], "'latest' is no version"),
        (["--verifier", "nowhere"], "nowhere/config.json: not found; --verifier is"),
        (["--capture-layers", "1", "2", "3"], "names its layers itself; leave out --capture-layers"),
    ],
)
def test_what_cannot_be_exported_is_a_message_and_exit_1(run, arguments, message, caplog):
    assert main([str(run), *arguments]) == 1
    assert message in caplog.text
    assert sorted(p.name for p in run.iterdir()) == ["checkpoints", "drafter"], "nothing was written"


WRONG = [[], {}, "x", -1, 1.5, True, [1], ["a"], {"a": 1}, None]
KEYS = ["architectures", "torch_dtype", "rope_scaling", "rope_parameters", "rope_theta", "layer_types", "eagle_config",
        "verifier_family", "sglang_versions", "origin", "vocab_size", "capture_layers", "rms_norm_eps",
        "partial_rotary_factor", "dtype", "speculators_model_type", "eos_token_id", "fc_norm", "draft_vocab_size",
        f"eagle_config.{NESTED}", "eagle_config.use_aux_hidden_state"]  # fmt: skip


@pytest.mark.parametrize("key", KEYS)
def test_no_value_of_any_key_is_met_with_a_traceback(run, drafter, verifier, tmp_path, key):
    place, seen = run / "drafter", set()
    before = config_of(place)
    for wrong in (*WRONG, ...):
        if wrong is ... and key not in before:
            continue
        edit_config(place, **{key: wrong})
        for arguments in (
            ["check", str(run), "--engine", "sglang"],
            ["check", str(run), "--engine", "vllm", "--verifier", str(verifier)],
            [str(run), "--out", str(tmp_path / "out")],
            ["to-speculators", str(run), "--out", str(tmp_path / "theirs"), "--verifier", str(verifier)],
        ):
            seen.add(main(arguments))
        with suppress(ValueError):
            load_drafter(place, drafter.embedding)
        (place / "config.json").write_text(json.dumps(before))
    assert seen <= {0, 1} and (1 in seen or key == "eos_token_id")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"torch_dtype": ["bfloat16"]}, "torch_dtype is ['bfloat16'], must be a name"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', must be an object"),
        ({"verifier_family": ...}, "origin, verifier_family is None, which this program does not write"),
        ({"verifier_family": ..., "origin": ...}, "does not say for which verifier it is; give the verifier's"),
        ({"origin": {"ttt_steps": 3}}, "origin, verifier is None"),
    ],
)
def test_a_wrong_value_is_named_with_its_key_and_a_remedy(run, changes, message, caplog):
    edit_config(run / "drafter", **changes)
    assert main([str(run)]) == 1
    assert message in caplog.text and str(run) in caplog.text


@pytest.mark.parametrize("key", ["text_config", "num_hidden_layers", "max_position_embeddings", "model_type"])
@pytest.mark.parametrize("wrong", ["x", [], None, 1.5, -1])
def test_a_verifiers_config_that_cannot_be_one_is_a_message(run, verifier, tmp_path, key, wrong, caplog):
    other = shutil.copytree(verifier, tmp_path / "other")
    edit_config(other, **{key: wrong})
    told = main(["check", str(run), "--engine", "sglang", "--verifier", str(other)])
    harmless = (key, wrong) in [("model_type", "x"), ("text_config", None)]
    assert harmless or (told == 1 and f"{other / 'config.json'}: " in caplog.text and key in caplog.text)


def test_out_may_be_a_link_and_the_directory_behind_it_is_written_again_and_again(run, tmp_path):
    (tmp_path / "disk").mkdir()
    link = tmp_path / "link"
    link.symlink_to("disk/served")
    for sglang in ("0.5.23", "0.5.16", "0.5.23"):
        assert main([str(run), "--out", str(link), "--sglang", sglang]) == 0
        assert link.is_symlink() and check(link, "sglang", sglang) == []
        assert sorted(p.name for p in (tmp_path / "disk").iterdir()) == ["served"]


@pytest.mark.parametrize("command", [[], ["to-speculators"]])
def test_out_within_the_drafter_that_is_read_is_refused(run, verifier, command, caplog):
    for source in (run, run / "drafter", run / "checkpoints" / "step-000007"):
        out = ["--out", str(run / "drafter" / "below" / "it"), "--verifier", str(verifier)]
        assert main([*command, str(source), *out]) == 1
        assert "lies within the drafter" in caplog.text
        caplog.clear()
    assert sorted(p.name for p in (run / "drafter").iterdir()) == ["config.json", "model.safetensors", "trainer.ckpt"]


def test_a_model_that_is_no_drafter_is_never_overwritten(run, verifier, tmp_path, caplog):
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(verifier / name, model)
    assert main([str(run), "--out", str(model)]) == 1
    assert "holds a model that is no drafter" in caplog.text
    assert (model / "model.safetensors").read_bytes() == (verifier / "model.safetensors").read_bytes()


def test_to_speculators_takes_the_embedding_of_no_other_verifier(run, verifier, tmp_path, caplog):
    other = shutil.copytree(verifier, tmp_path / "other")
    arguments = ["to-speculators", str(run), "--out", str(tmp_path / "theirs"), "--verifier", str(other)]
    weights = load_file(other / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, other / "model.safetensors", {"format": "pt"})
    assert main(arguments) == 1
    assert "is not the verifier that the drafter was trained for" in caplog.text
    assert not (tmp_path / "theirs").exists()


def test_a_switch_that_this_sglang_does_not_know_is_refused(verifier, tmp_path, caplog):
    model = AutoModelForCausalLM.from_pretrained(verifier, dtype=torch.float32)
    ours = save_drafter(tiny_drafter(model, norm_output=True), tmp_path / "ours", origin=ORIGIN)
    assert main([str(ours), "--sglang", "0.5.10.post1"]) == 1
    assert "SGLang 0.5.10.post1 does not know norm_output" in caplog.text


def test_a_changed_config_is_not_exported(run, caplog):
    edit_config(run / "drafter", norm_output=True, **{"eagle_config.norm_output": True})
    assert main([str(run)]) == 1
    assert "norm_output is True, the weights were trained with False" in caplog.text


def test_another_verifier_is_noticed(run, verifier, tmp_path, caplog):
    other = shutil.copytree(verifier, tmp_path / "other")
    edit_config(other, vocab_size=400)
    assert main([str(run), "--verifier", str(other)]) == 1
    assert "vocab_size is 320, the verifier's is 400" in caplog.text


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_check_says_what_it_looked_at_or_every_fault(run, verifier, engine, capsys):
    arguments = ["check", str(run), "--engine", engine, "--verifier", str(verifier)]
    assert main(arguments) == 0
    assert "would serve" in capsys.readouterr().out
    edit_config(run / "drafter", hidden_act="gelu", rms_norm_eps=1e-6)
    assert main(arguments) == 1
    told = capsys.readouterr().out
    assert "hidden_act is 'gelu'" in told and "refuse to start" in told and "another epsilon" in told


def test_check_of_nothing_and_an_unknown_version_are_messages(run, tmp_path, caplog):
    assert main(["check", str(tmp_path / "nowhere"), "--engine", "vllm"]) == 1
    assert "nowhere is no drafter directory" in caplog.text
    assert main(["check", str(run), "--engine", "vllm", "--version", "0.9"]) == 1
    assert "vLLM 0.9 is not known" in caplog.text


def test_to_speculators_needs_to_know_how_many_tokens_to_draft(run, verifier, tmp_path, caplog, capsys):
    arguments = ["to-speculators", str(run), "--out", str(tmp_path / "theirs"), "--verifier", str(verifier)]
    assert main([*arguments, "--drafts", "5"]) == 0
    assert config_of(tmp_path / "theirs")["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    edit_config(run / "drafter", origin=...)
    assert main(arguments) == 1 and "give --drafts" in caplog.text


def test_the_help_names_every_command(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    told = capsys.readouterr().out
    assert "to-speculators DIR --out" in told and "check DIR --engine" in told and "0.5.10.post1 to 0.5.23" in told


def test_as_a_program_it_fails_without_a_traceback(tmp_path):
    command = [sys.executable, "-m", "eagle3.export", str(tmp_path)]
    failed = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert failed.returncode == 1 and "is no drafter directory" in failed.stderr and "Traceback" not in failed.stderr
