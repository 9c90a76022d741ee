"""The judge from outside: a drafter that this pipeline trained, in real vLLM. `make vllm-env` makes its environment."""

import json
from pathlib import Path

import pytest
from scripts import Script, succeed
from tiny import tiny_verifier
from tiny_job import QUESTIONS, SUBJECTS, settings, write_prompts

PYTHON = Path(__file__).parent.parent / ".venv-vllm" / "bin" / "python"
LEARNED = {"optimizer__epochs": 60, "data__val_every_steps": 60, "server__python": PYTHON}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny pipeline's working directory. vLLM on a CPU has kernels for heads of 32 and more."""
    path = tmp_path_factory.mktemp("vllm")
    tiny_verifier(path / "v", hidden=64, heads=2, kv_heads=1, head_dim=32, initializer_range=0.1)
    write_prompts(path / "p.jsonl", [[question.format(subject)] for question in QUESTIONS for subject in SUBJECTS])
    write_prompts(path / "e.jsonl", [[f"What is {subject}? And why?"] for subject in SUBJECTS])
    for script in ("extract.py", "train.py"):
        succeed(script, *settings(**{k: v for k, v in LEARNED.items() if k != "server__python"}), cwd=path)
    return path


@pytest.mark.engine
def test_three_counts_agree_in_vllm(folder):
    assert PYTHON.exists(), f"{PYTHON} is missing: `make vllm-env` makes it"
    done = Script("evaluate.py", *settings(server="vllm", **LEARNED), cwd=folder).wait(timeout_s=900)
    assert done.code == 0, done.output
    assert "passed: three counts agree" in done.output
    (summary_file,) = (folder / "outputs" / "evaluate").glob("*/summary.json")
    summary = json.loads(summary_file.read_text())
    assert summary["engine"].startswith("vLLM 0.")
    assert summary["accept_len_replayed"] > 1.3 and all(check["passed"] for check in summary["gate"])
    assert summary["raw"]["verifications"] >= summary["verifications"] > 50
    rows = [json.loads(line) for line in (summary_file.parent / "counts.jsonl").read_text().splitlines()]
    assert len(rows) == len(SUBJECTS)
    for name in ("vllm_alone", "vllm_with_drafter"):
        assert "--dtype float32" in (summary_file.parent / name / "command.txt").read_text()
