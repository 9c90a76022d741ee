"""The README's figures are those of the measured rows, and its commands are those of the Makefile and the scripts."""

import re
from pathlib import Path

from benchmarks.figures import BLOCKS, README, rendered

ROOT = Path(__file__).parent.parent


def test_figures_are_recomputed_from_the_raw_rows():
    text = README.read_text()
    assert rendered(text) == text
    assert set(re.findall(r"<!-- figures:(\w+) -->", text)) == set(BLOCKS)


def test_commands_exist():
    text = README.read_text()
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make ([\w-]+)", text)) <= targets
    for script in re.findall(r"python (\w+\.py)", text):
        assert (ROOT / script).exists(), script
    for module in re.findall(r"python -m ([\w.]+)", text):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
