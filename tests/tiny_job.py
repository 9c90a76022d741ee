"""A whole job on a tiny verifier: its prompts and the settings that the scripts are given."""

import json
from pathlib import Path

from tiny import tiny_verifier

SUBJECTS = ("the river", "a compiler", "Paris", "the week", "a walk in the mountains", "the quick brown fox")
QUESTIONS = ("What is {}?", "Write a short story about {}.", "Please list three things about {}.", "Explain {}.")


def write_inputs(folder: Path) -> None:
    """`v`, a verifier; `p.jsonl`, 24 prompts, four of them with two turns; `e.jsonl`, four others."""
    tiny_verifier(folder / "v", hidden=64)
    asked = [[question.format(subject)] for question in QUESTIONS for subject in SUBJECTS]
    asked[::6] = [[*turns, "And why?"] for turns in asked[::6]]
    write_prompts(folder / "p.jsonl", asked)
    write_prompts(folder / "e.jsonl", [[f"How many days are there in {subject}?"] for subject in SUBJECTS[:4]])


def write_prompts(file: Path, asked: list[list[str]]) -> None:
    lines = [json.dumps({"id": f"{file.stem}-{n:02}", "turns": turns}) for n, turns in enumerate(asked)]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


SETTINGS = {
    "verifier": "hf",
    "verifier.name": "tiny",
    "verifier.path": "v",
    "verifier.dtype": "float32",
    "extraction.prompts": "p.jsonl",
    "extraction.dtype": "float32",
    "extraction.max_new_tokens": "40",
    "extraction.max_len": "160",
    "extraction.concurrency": "8",
    "extraction.capture_tokens": "512",
    "extraction.shard_mib": "1",
    "evaluation.prompts": "e.jsonl",
    "evaluation.bootstrap": "50",
    "drafter.draft_vocab_size": "64",
    "data.val_every_steps": "4",
    "optimizer.batch_tokens": "800",
    "optimizer.lr": "3e-3",
    "optimizer.epochs": "4",
    "tracking": "local",
    "tracking.tensorboard": "false",
    "name": "tiny",
    "store": "store",
    "hardware.precision": "32-true",
}


def settings(**changes: object) -> list[str]:
    """The command line of the tiny job; a double underscore stands for a dot: optimizer__lr=1e-3."""
    told = SETTINGS | {key.replace("__", "."): str(value) for key, value in changes.items()}
    return [f"{key}={value}" for key, value in told.items()]
