"""Tests of benchmarks.peers: what a peer says becomes a row, and what it does not say becomes a reason."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import PEERS, SCRIPT, compare, measure_peer, row_of, script_in

SIZES = {"shape": "tiny", "ttt": 3, "seq_len": 512, "rows": 4, "steps": 2, "warmup": 1}
SAID = {"shape": "tiny", "ttt": 3, "tokens_per_s": 500.0, "peak_mem_gib": 9.0, "mem_built_gib": 3.0,
        "params_trainable": 2**28, "argv": ["--json", "/somewhere"]}  # fmt: skip


def script(directory: Path, text: str) -> Path:
    (directory / SCRIPT).write_text(text)
    return script_in(directory)


def test_a_folder_without_the_script_is_refused_by_name(tmp_path: Path):
    with pytest.raises(ValueError, match=f"--peers {tmp_path}: there is no {SCRIPT}"):
        script_in(tmp_path)


def test_a_peer_is_run_with_our_sizes_and_its_own_options(tmp_path: Path):
    text = """import json, sys
with open(sys.argv[sys.argv.index("--json") + 1], "w") as f:
    json.dump({"peak_mem_gib": None, "said": sys.argv[1:]}, f)"""
    row = measure_peer(PEERS[0], script(tmp_path, text), **SIZES, timeout_s=60)
    said = row["said"]
    assert row["who"] == "speculators 0.9.0" and said[said.index("--peer") + 1] == "speculators"
    assert set(PEERS[0].options) <= set(said)
    for option, value in (("shape", "tiny"), ("ttt", "3"), ("seq-len", "512"), ("batch", "4"), ("steps", "2")):
        assert said[said.index(f"--{option}") + 1] == value


@pytest.mark.parametrize(
    ("text", "reason"),
    [("raise MemoryError('too large')", "exit code 1: MemoryError: too large"),
     ("import time; time.sleep(60)", "no end after 1 s")],
)  # fmt: skip
def test_a_peer_that_fails_says_why(tmp_path: Path, text: str, reason: str):
    row = measure_peer(PEERS[1], script(tmp_path, text), **SIZES, timeout_s=1 if "sleep" in text else 60)
    assert row == {"who": "SpecForge 0.2.0", "shape": "tiny", "ttt": 3, "error": reason}


def test_activations_are_what_does_not_outlive_a_step():
    row = row_of(PEERS[0], SAID)
    assert row["activation_gib"] == 9.0 - 3.0 - 12 * 0.25
    assert "argv" not in row, "it names folders of a machine"
    assert "activation_gib" not in row_of(PEERS[0], SAID | {"peak_mem_gib": None})


def test_we_are_held_against_the_faster_and_the_leaner_peer():
    ours: dict[str, Any] = {"shape": "tiny", "ttt": 3, "tokens_per_s": 900.0, "activation_gib": 1.0}
    fast = ours | {"tokens_per_s": 600.0, "activation_gib": 5.0}
    lean = ours | {"tokens_per_s": 300.0, "activation_gib": 2.5}
    other = fast | {"shape": "kimi", "tokens_per_s": 1.0, "activation_gib": 0.1}
    failed = {"shape": "tiny", "ttt": 3, "error": "no end"}
    assert compare(ours, [fast, lean, other, failed]) == {
        "times_the_faster_peer": 1.5, "of_the_leaner_peers_activations": 0.4}  # fmt: skip
    assert compare(ours, [other, failed]) == {}
