"""The teacher pass: what the verifier would say after each stored token, from `last` and the verifier's head.

It runs over a finished store, shard by shard, and writes shards/NNNNN.teacher.safetensors: top1 [N] int32,
the argmax over the full vocabulary, and lse [N] float32, the log of the sum of exp over it: two numbers in
place of all logits. A shard is done when teacher.jsonl has its line.
"""

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Float32, Int32
from torch import Tensor

from extract.store import Store, open_store
from extract.store_check import teacher_lines
from extract.store_format import (
    INDEX,
    SHARDS,
    TEACHER,
    ShardLine,
    append_line,
    locked,
    read_lines,
    repair_lines,
    teacher_name,
)
from extract.store_space import told_when_full
from extract.store_tensors import write_tensors

log = logging.getLogger(__name__)

VOCAB_BLOCK = 8_192
"""Vocabulary rows multiplied at once, so that logits take chunk_tokens x 8,192 numbers at most."""


@dataclass(frozen=True)
class TeacherProgress:
    """`tokens` more are done; `resumed` if an earlier run did them."""

    tokens: int
    shard: str
    resumed: bool


def teacher_pass(
    store_path: Path, head: Float[Tensor, "V H"], *, device: torch.device | str, chunk_tokens: int
) -> Iterator[TeacherProgress]:
    """Compute top1 and lse of every token of a store; the events add up to its tokens.

    The product is computed in the head's dtype, as the verifier itself does, the log-sum-exp in float32.
    Memory: the head, chunk_tokens rows of `last`, and chunk_tokens x 8,192 logits. Shards that an earlier
    run finished with the same head are kept. ValueError if the head does not fit the store, StoreFull if the
    disk is full.
    """
    store = open_store(store_path)
    if head.shape[1] != store.manifest["hidden_size"]:
        raise ValueError(
            f"the head is {list(head.shape)}, but {store_path} holds states of a verifier with hidden size "
            f"{store.manifest['hidden_size']}: it belongs to another verifier"
        )
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}, must be 1 or more")
    return _shards(store, head, torch.device(device), chunk_tokens)


def _shards(store: Store, head: Tensor, device: torch.device, chunk_tokens: int) -> Iterator[TeacherProgress]:
    head_sha256 = _fingerprint(head)
    head = head.to(device)
    with locked(store.path):
        repair_lines(store.path / TEACHER)
        lines = [ShardLine.parse(record, store.path / INDEX) for record in read_lines(store.path / INDEX)[0]]
        finished = teacher_lines(store.path, lines)
        for line in lines:
            if line.file in finished and finished[line.file]["head_sha256"] == head_sha256:
                yield TeacherProgress(line.tokens, line.file, resumed=True)
        for line in lines:
            if line.file in finished and finished[line.file]["head_sha256"] != head_sha256:
                log.warning("%s: its teacher pass was made with another head; made again", line.file)
            elif line.file in finished:
                continue
            yield from _one_shard(store, line, head, head_sha256, chunk_tokens)


def _one_shard(
    store: Store, line: ShardLine, head: Tensor, head_sha256: str, chunk_tokens: int
) -> Iterator[TeacherProgress]:
    top1, lse = [], []
    for start in range(0, line.tokens, chunk_tokens):
        stop = min(start + chunk_tokens, line.tokens)
        last = store.read((line.number, start, stop), ("last",))["last"]
        chunk_top1, chunk_lse = teach(last.to(head.device, head.dtype), head)
        top1.append(chunk_top1.cpu())
        lse.append(chunk_lse.cpu())
        if stop < line.tokens:
            yield TeacherProgress(stop - start, line.file, resumed=False)
    file = store.path / SHARDS / teacher_name(line.number)
    with told_when_full(file, 8 * line.tokens):
        num_bytes, sha256 = write_tensors(file, {"top1": top1, "lse": lse})
        record = {"file": file.name, "bytes": num_bytes, "sha256": sha256, "shard": line.file}
        append_line(store.path / TEACHER, record | {"shard_sha256": line.sha256, "head_sha256": head_sha256})
    yield TeacherProgress(stop - start, line.file, resumed=False)


@torch.no_grad()
def teach(last: Float[Tensor, "T H"], head: Float[Tensor, "V H"]) -> tuple[Int32[Tensor, "T"], Float32[Tensor, "T"]]:
    """argmax and log-sum-exp over the vocabulary of `last @ head.T`; of equal logits the lowest id wins."""
    best = torch.full(last.shape[:1], -torch.inf, dtype=torch.float32, device=last.device)
    top1 = torch.zeros(last.shape[:1], dtype=torch.int64, device=last.device)
    lse = best.clone()
    for first in range(0, head.shape[0], VOCAB_BLOCK):
        logits = (last @ head[first : first + VOCAB_BLOCK].T).float()
        block_top1 = logits.argmax(dim=1)
        block_best = logits.gather(1, block_top1[:, None])
        # In place: on the CPU a fresh buffer of this size costs more than the exp itself.
        block_lse = logits.sub_(block_best).exp_().sum(dim=1).log_().add_(block_best[:, 0])
        higher = block_best[:, 0] > best
        top1 = torch.where(higher, block_top1 + first, top1)
        best = torch.where(higher, block_best[:, 0], best)
        lse = torch.logaddexp(lse, block_lse)
    return top1.int(), lse


def _fingerprint(head: Tensor) -> str:
    """sha256 of a head's dtype, shape and values: with another head the pass must be made again."""
    digest = hashlib.sha256(f"{head.dtype} {list(head.shape)}".encode())
    for rows in head.detach().split(8192):
        digest.update(rows.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
