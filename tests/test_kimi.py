"""Kimi-K2.5 on eight GPUs, as far as it goes without the weights: sizes, command lines, and what is missing."""

import sys
from dataclasses import replace

import pytest
import torch
from composed import SCRIPTS, config
from fake_sglang import installed
from scripts import Script
from test_vllm_server import SPEC
from tiny import tiny_verifier
from tiny_job import write_prompts
from tiny_serve import untrained_drafter

from eagle3.build import shape_of
from eagle3.drafter import Eagle3Drafter
from eagle3.plan import parameter_counts
from eagle3.vocab import DraftVocab
from extract.layers import check_capture_layers
from extract.numbering import sglang_layer_ids
from extract.store_space import bytes_per_token

GIVEN = ("experiment=kimi_k25", "verifier.path=/models/kimi")
KIMI = replace(SPEC, name="kimi_k25", model_type="deepseek_v3", hidden_size=7168, num_layers=61, vocab_size=163840,
               num_heads=64, num_kv_heads=64, head_dim=64, max_position_embeddings=262144)  # fmt: skip
"""What transformers makes of its config.json; head_dim is that of its rotated part alone."""


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_has_the_first_runs_choices(script):
    told = config(*GIVEN, script=script)
    assert (told.name, told.verifier.capture_layers, told.extraction.limit) == ("kimi_k25", [3, 31, 59], 10_000)
    assert (told.hardware.devices, told.hardware.flags["sglang"]["tp_size"], told.server.engine) == (8, 8, "sglang")
    assert told.drafter.ttt_steps == told.evaluation.drafts == 3 and told.drafter.draft_vocab_size == 32000
    layers = check_capture_layers(told.verifier.capture_layers, KIMI.num_layers)
    assert sglang_layer_ids(KIMI.model_type, "0.5.16", layers) == [3, 31, 59], "SGLang takes these unchanged"
    rows = told.optimizer.batch_tokens // told.extraction.max_len
    assert rows % told.hardware.devices == 0, "every GPU has as many rows as any other"


def test_its_drafter_has_1_19_billion_trained_weights_and_a_token_takes_56_kib():
    settings = config(*GIVEN).drafter
    shape = shape_of(settings, KIMI, (3, 31, 59))
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.intermediate_size) == (64, 64, 128, 18432)
    vocab = DraftVocab(torch.arange(32000), KIMI.vocab_size, None)
    _ = vocab.d2t, vocab.t2d  # computed before the meta device is on, where there are no values
    with torch.device("meta"):
        drafter = Eagle3Drafter(shape, vocab, torch.empty(KIMI.vocab_size, KIMI.hidden_size))
    trained, frozen = parameter_counts(drafter)
    assert round(trained / 1e9, 2) == 1.19 and frozen == 163840 * 7168
    size = bytes_per_token(hidden_size=7168, num_capture_layers=3, dtype="bfloat16", codec="none")
    assert 922 < 17.3e6 * size / 2**30 < 926


def test_without_its_directory_each_script_says_what_is_missing(tmp_path):
    write_prompts(tmp_path / "p.jsonl", [["What is a river?"]])
    words = ("experiment=kimi_k25", "extraction.prompts=p.jsonl", "dry_run=true")
    unset = {name: Script(f"{name}.py", *words, cwd=tmp_path) for name in SCRIPTS}
    absent = {name: Script(f"{name}.py", *words, "verifier.path=/models/kimi", cwd=tmp_path) for name in SCRIPTS}
    for script in unset.values():
        done = script.wait()
        assert done.code == 1 and "verifier.path is not set; give it on the command line" in done.output
    for name, script in absent.items():
        done = script.wait()
        missing = "drafter" if name == "evaluate" else "verifier.path=/models/kimi: there is no directory"
        assert done.code == 1 and missing in done.output


def test_a_plan_on_a_stand_in_shows_the_servers_of_every_script_that_starts_one(tmp_path):
    """No GPU, no weights of any size: what would be run, in full."""
    tiny_verifier(tmp_path / "v")
    write_prompts(tmp_path / "p.jsonl", [["What is a river?"], ["And what is not?"]])
    drafter = untrained_drafter(tmp_path)
    words = ("experiment=kimi_k25", "verifier.path=v", "verifier.capture_layers=null", "extraction.prompts=p.jsonl",
             "evaluation.prompts=p.jsonl", "extraction.max_len=256", "extraction.max_new_tokens=64",
             "evaluation.max_new_tokens=64", "verifier.dtype=float32", f"server.python={sys.executable}",
             f"server.env.PYTHONPATH={installed(tmp_path / 'site')}", "dry_run=true")  # fmt: skip
    starts = {"extract": (), "evaluate": (f"drafter_dir={drafter}",), "serve": (f"drafter_dir={drafter}",)}
    running = {name: Script(f"{name}.py", *words, *more, cwd=tmp_path) for name, more in starts.items()}
    for name, script in running.items():
        done = script.wait()
        assert done.code == 0, done.output
        lines = [line for line in done.output.splitlines() if line.startswith("env ")]
        assert len(lines) == {"extract": 2, "evaluate": 2, "serve": 1}[name]
        for line in lines:
            assert "NCCL_PROTO=LL" in line and "--tp-size 8" in line and "--attention-backend triton" in line
        speculates = ["--speculative-num-steps 3 " in line for line in lines]
        assert speculates == {"extract": [False] * 2, "evaluate": [False, True], "serve": [True]}[name]
