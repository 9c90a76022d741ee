"""Shapes at tensor boundaries are checked in every test; hypothesis has no deadline, for machines are slow at times."""

import signal

import pytest
import torch
from hypothesis import settings
from jaxtyping import install_import_hook
from tiny import tiny_verifier
from transformers import AutoModelForCausalLM

pytest_plugins = ["whole_job"]
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs would ignore

settings.register_profile("project", deadline=None, max_examples=25)
settings.load_profile("project")
CHECKED = ("drafter", "ttt", "loss", "row_losses", "supervision", "metrics", "vocab", "decode", "replayed")
install_import_hook([f"eagle3.{name}" for name in CHECKED], "beartype.beartype")


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    """Directory of a tiny verifier; files that need another kind have a fixture of this name of their own."""
    torch.set_num_threads(1)
    return tiny_verifier(tmp_path_factory.mktemp("verifier") / "v")


@pytest.fixture(scope="module")
def model(verifier):
    """The verifier's model in float32."""
    return AutoModelForCausalLM.from_pretrained(verifier, dtype=torch.float32).eval().requires_grad_(False)
