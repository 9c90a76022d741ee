"""The JSON file of a measurement: what was run, on what, and every raw row, so that a table can be made again."""

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3.runlog import provenance

RESULTS = Path(__file__).parent / "results"
"""Results that the README shows, in git."""
FRESH = Path("outputs/benchmarks")
"""Where a measurement writes; `python -m benchmarks.figures` takes it over into RESULTS."""


def write_result(name: str, rows: Sequence[Mapping[str, Any]], *, path: Path | None = None, **facts: Any) -> Path:
    """outputs/benchmarks/NAME.json, or `path`, with command, code, versions, device, `facts` and `rows`."""
    seen = provenance()
    command = " ".join(["python", "-m", f"benchmarks.{name}", *map(shlex.quote, sys.argv[1:])])
    kept = {key: seen[key] for key in ("git_sha", "git_dirty", "source_sha256", "versions", "device", "started")}
    path = FRESH / f"{name}.json" if path is None else path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"command": command, **kept, **facts, "rows": list(rows)}, indent=2) + "\n")
    return path


def read_result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())
