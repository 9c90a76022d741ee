"""Disk space: how much a store will take, and what is said when the disk has no more."""

import contextlib
import errno
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

from extract.store_format import DTYPES

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_IDS_AND_MASK_BYTES, _TEACHER_BYTES = 4 + 1, 4 + 4
_FP8_BYTES, _SCALE_BYTES = 1, 4


class StoreFull(ValueError):
    """Disk, quota or file size limit is used up. What was acknowledged is safe; run again to go on."""


def shard_bytes_per_token(*, hidden_size: int, num_capture_layers: int, dtype: str, codec: str) -> int:
    """Bytes of one token in a shard: captured layers, last state, id and mask."""
    last = hidden_size * DTYPES[dtype].itemsize
    layer = hidden_size * _FP8_BYTES + _SCALE_BYTES if codec == "fp8" else last
    return num_capture_layers * layer + last + _IDS_AND_MASK_BYTES


def bytes_per_token(*, hidden_size: int, num_capture_layers: int, dtype: str, codec: str) -> int:
    """Bytes on disk of one token: those in its shard, and the teacher's two numbers."""
    sizes = {"hidden_size": hidden_size, "num_capture_layers": num_capture_layers}
    return shard_bytes_per_token(**sizes, dtype=dtype, codec=codec) + _TEACHER_BYTES


def free_bytes(path: Path) -> int:
    """Bytes free to this user where `path` is, or will be."""
    path = path.resolve()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def require_space(path: Path, needed_bytes: int) -> None:
    """Refuse, before any work, what the disk cannot hold."""
    free = free_bytes(path)
    if needed_bytes > free:
        raise StoreFull(
            f"{path.resolve()}: {size_text(needed_bytes)} needed, {size_text(free)} free; free space "
            f"there or choose another directory"
        )


@contextlib.contextmanager
def told_when_full(file: Path, needed_bytes: int) -> Iterator[None]:
    """Around the writing of a file: a full disk becomes StoreFull, best before the first byte is written."""
    free = free_bytes(file.parent)
    try:
        if needed_bytes > free:
            raise OSError(errno.ENOSPC, "disk nearly full")
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise StoreFull(
            f"{file.resolve()}: no room ({error.strerror}): {size_text(needed_bytes)} needed, "
            f"{size_text(free)} free. Everything before it is safe; free space and run the same command again"
        ) from error


def size_text(num_bytes: int) -> str:
    """Bytes for people: 1.5 GiB."""
    power = min(int(math.log(num_bytes, 1024)), 4) if num_bytes > 0 else 0
    return f"{num_bytes} B" if power == 0 else f"{num_bytes / 1024**power:.1f} {'KMGT'[power - 1]}iB"
