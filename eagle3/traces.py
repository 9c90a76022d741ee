"""What Hydra writes before a script begins is worth nothing if the script then has nothing to do: it is removed."""

import shutil
from contextlib import suppress
from pathlib import Path

PASSING = ("dry-run", "refused")
"""Names that `eagle3.naming.run_dir` gives to directories in which no run ever lies."""


def clear_traces(run_dir: Path, job_name: str) -> None:
    """Removes a run directory in which no run began, and the directories above it that this leaves empty."""
    log_file = run_dir / f"{job_name}.log"
    if not run_dir.is_dir() or (run_dir / "run.json").exists():
        return
    if {path.name for path in run_dir.iterdir()} - {".hydra", log_file.name}:
        return
    if run_dir.name not in PASSING and log_file.exists() and log_file.stat().st_size:
        return
    shutil.rmtree(run_dir / ".hydra", ignore_errors=True)
    log_file.unlink(missing_ok=True)
    outputs = Path.cwd() / "outputs"
    for path in (run_dir, *run_dir.parents):
        if path != run_dir and not path.is_relative_to(outputs):
            return
        with suppress(OSError):  # something else is in it
            path.rmdir()
