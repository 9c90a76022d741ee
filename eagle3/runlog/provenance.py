"""Where a run comes from: code, versions, command line, device and time, as a plain dict."""

import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("torch", "transformers", "pytorch-lightning", "hydra-core", "omegaconf", "safetensors", "wandb")
SOURCES = ("*.py", "eagle3/**/*.py", "extract/**/*.py", "conf/**/*.yaml")
SOURCE_ROOT = Path(__file__).resolve().parents[2]


def provenance(root: Path = SOURCE_ROOT) -> dict[str, object]:
    """Facts about this process and the code under `root`. Outside git the three git entries are None."""
    return {
        **git_state(root),
        "source_sha256": source_sha256(root),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        "argv": list(sys.argv),
        "device": _device(),
        "host": platform.node(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def source_sha256(root: Path = SOURCE_ROOT) -> str:
    """Over the code and the config files below `root`: equal where the same program runs, in git or not."""
    files = [path for pattern in SOURCES for path in root.glob(pattern)]
    return files_sha256(sorted(files), root)


def files_sha256(files: Sequence[Path], root: Path) -> str:
    """Over the names below `root` and the contents of files."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(root)}\0{file.stat().st_size}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def git_diff(root: Path = SOURCE_ROOT) -> str:
    """All that differs from HEAD, and the names of untracked files; what `git_diff_sha256` is over.

    What sweeps leave in multirun/ is kept in git and is no code: a sweep must not make itself differ.
    """
    where = ("--", ".", ":(exclude)multirun")
    return (_git(root, "diff", "HEAD", *where) or "") + (_git(root, "status", "--porcelain", *where) or "")


def git_state(root: Path = SOURCE_ROOT) -> dict[str, object]:
    """`git_sha`, `git_dirty`, `git_diff_sha256` (over the diff to HEAD and the names of untracked files)."""
    sha = _git(root, "rev-parse", "HEAD")
    # An installed copy may lie inside somebody else's repository, whose commit says nothing about this code.
    tracked = _git(root, "ls-files", "--", ".")
    if sha is None or not tracked:
        return {"git_sha": None, "git_dirty": None, "git_diff_sha256": None}
    changes = git_diff(root)
    digest = hashlib.sha256(changes.encode()).hexdigest() if changes else None
    return {"git_sha": sha.strip(), "git_dirty": bool(changes), "git_diff_sha256": digest}


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None  # no git here, or no repository: both are allowed
    return done.stdout.decode(errors="replace")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _device() -> str:
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return f"cpu, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
