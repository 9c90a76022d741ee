"""A drafter in vLLM beside our own counts: `python -m benchmarks.served [the overrides of the evaluation]`.

Runs `evaluate.py server=vllm`, for the quickstart's drafter unless told otherwise, and keeps every prompt's counts.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.record import write_result
from eagle3.served_report import COUNTS
from extract.progress import shown_path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        own = ["server=vllm", "tracking=local", f"hydra.run.dir={directory}"]
        subprocess.run([sys.executable, str(ROOT / "evaluate.py"), *sys.argv[1:], *own], check=True)
        summary = json.loads((Path(directory) / "summary.json").read_text())
        rows = [json.loads(line) for line in (Path(directory) / COUNTS).read_text().splitlines()]
    path = write_result("served", rows, engine=summary["engine"])
    sys.stdout.write(f"written to {shown_path(path)}\n")


if __name__ == "__main__":
    main()
