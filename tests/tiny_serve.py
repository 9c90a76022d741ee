"""A benchmark of serve.py on the fake SGLang: a tiny verifier, a drafter for it, and the command line."""

import sys
from pathlib import Path

import httpx
import torch
from fake_sglang import installed
from tiny import tiny_verifier
from tiny_drafter import LAYERS, ORIGIN, tiny_drafter
from tiny_job import SUBJECTS, settings, write_prompts
from transformers import AutoModelForCausalLM

from eagle3.export.directory import save_drafter

CONCURRENCIES, NEW_TOKENS, PREFILL_TOKENS = (1, 3), 6, 60


def serve_settings(folder: Path) -> list[str]:
    """Writes verifier, prompts and engine into `folder`; the command line that measures a server there."""
    tiny_verifier(folder / "v")
    write_prompts(folder / "e.jsonl", [[f"How many days are there in {subject}?"] for subject in SUBJECTS])
    told = {
        "server": "sglang", "server__python": sys.executable, "server__request_timeout_s": 20,
        "serving__prompts": "e.jsonl", "serving__new_tokens": NEW_TOKENS, "serving__prefill_tokens": PREFILL_TOKENS,
        "serving__concurrencies": f"[{','.join(map(str, CONCURRENCIES))}]", "serving__requests_per_client": 2,
        "serving__single_requests": 2, "serving__prefill_requests": 2, "serving__warmup": 1, "serving__repeats": 2,
    }  # fmt: skip
    return [*settings(**told), f"server.env.PYTHONPATH={installed(folder / 'site')}"]


def untrained_drafter(folder: Path) -> Path:
    """A drafter directory for the verifier in `folder`, untrained."""
    model = AutoModelForCausalLM.from_pretrained(folder / "v", dtype=torch.float32)
    drafter = tiny_drafter(model, capture_layers=LAYERS)
    save_drafter(drafter, folder / "drafter", dtype=torch.float32, origin=ORIGIN)
    return folder / "drafter"


def ours(folder: Path) -> list[int]:
    """Servers that were started for a job in `folder`."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if str(folder) in words and "launch_server" in words:
            found.append(int(file.parent.name))
    return found


def answered(port: int) -> int:
    """The status with which a server answers one request."""
    body = {"input_ids": [3, 4], "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
    return httpx.post(f"http://127.0.0.1:{port}/generate", json=body, trust_env=False, timeout=20).status_code
