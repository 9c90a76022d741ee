"""What makes files survive a crash: fsync of files and directories, and small files that are old or new, never torn."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Make a file's bytes, or the renames in a directory, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_file(path: Path, content: bytes) -> None:
    """Write a small file atomically: readers and a crash see the old content or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync(path.parent)
