"""Shapes at tensor boundaries are checked in every test; hypothesis has no deadline, for machines are slow at times."""

from hypothesis import settings
from jaxtyping import install_import_hook

pytest_plugins = ["whole_job"]

settings.register_profile("project", deadline=None, max_examples=25)
settings.load_profile("project")
CHECKED = ("drafter", "ttt", "loss", "row_losses", "supervision", "metrics", "vocab", "decode", "replayed")
install_import_hook([f"eagle3.{name}" for name in CHECKED], "beartype.beartype")
