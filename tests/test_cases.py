"""tests/cases.md names, for each known fault of such tools, the test that keeps it away. Here: those tests exist."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINE = re.compile(r"^\| (C\d+) \| (.+) \|$")
NAMED = re.compile(r"tests/test_\w+\.py::test_\w+")
COVERED = {
    "config": ["C01", "C02", "C04", "C05", "C07", "C08", "C09", "C10", "C11", "C12"],
    "server": [f"C{n}" for n in range(13, 20)],
    "extraction": [f"C{n}" for n in (*range(22, 31), *range(32, 38), 39, 40, *range(42, 45))],
    "data": [f"C{n}" for n in (*range(45, 49), *range(50, 57), *range(58, 66))],
    "vocab": ["C66", "C67", "C68", "C69", "C71", "C72", "C73"],
    "model": ["C75", "C76", "C77", "C78", "C79", "C80", "C82", "C83"],
}
"""Parts that are covered as a whole; other lines of the file are extra."""


def lines() -> dict[str, str]:
    found = [LINE.match(line) for line in (ROOT / "tests" / "cases.md").read_text().split("\n")]
    return {match[1]: match[2] for match in found if match}


@cache
def defined_in(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("case", [case for part in COVERED.values() for case in part])
def test_every_case_has_a_line(case: str):
    assert case in lines()


def test_every_line_names_tests_that_exist_or_says_why_not():
    for case, text in lines().items():
        named = NAMED.findall(text)
        assert named or text.startswith("cannot occur: "), case
        for name in named:
            path, test = name.split("::")
            assert test in defined_in(path), f"{case}: {name} does not exist"
