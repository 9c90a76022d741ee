"""A copy of a store whose captured states belong to other tokens: what a drafter learns from it, it learns without
the verifier's states. Everything else of the store, teacher included, stays in place.
"""

import shutil
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from extract.store import Store, StoredSample, create_or_resume, open_store
from extract.store_check import teacher_lines
from extract.store_format import INDEX, SHARDS, TEACHER, ShardLine, append_line, read_lines, teacher_name

MAX_SHARD_BYTES = 1 << 30


def permute(aux: Float[Tensor, "N AH"], seed: int) -> Float[Tensor, "N AH"]:
    """Rows in another order, over all positions."""
    return aux[torch.randperm(len(aux), generator=torch.Generator().manual_seed(seed))]


def permuted_store(source: Path, target: Path, *, seed: int) -> Path:
    """Writes the copy, shard by shard, and returns it; what an interrupted call has finished is kept.

    Raises:
        ValueError: the source is not finished, or `target` is another store.
    """
    store = open_store(source, need_teacher=True, need_complete=True)
    manifest = {key: value for key, value in store.manifest.items() if key not in ("complete", "counts")}
    manifest["must_match"] = {**manifest["must_match"], "aux_permuted_seed": seed}
    lines = _lines(source)
    with create_or_resume(target, manifest, shard_bytes=MAX_SHARD_BYTES) as writer:
        for line in lines:
            for sample in _permuted_samples(store, line, seed):
                if sample.id not in writer.done:
                    writer.add(sample)
            writer.flush()
        writer.finish([ref.id for ref in store.samples])
    _copy_teacher(source, target)
    return target


def _permuted_samples(store: Store, line: ShardLine, seed: int) -> list[StoredSample]:
    whole = store.read((line.number, 0, line.tokens), ("aux", "last", "input_ids", "loss_mask"))
    whole["aux"] = permute(whole["aux"], seed + line.number)
    samples = []
    for ref in line.refs():
        own = {name: tensor[ref.start : ref.start + ref.tokens] for name, tensor in whole.items()}
        samples.append(
            StoredSample(
                id=ref.id,
                conversation=ref.conversation,
                temperature=ref.temperature,
                input_ids=own["input_ids"].tolist(),
                loss_mask=own["loss_mask"].tolist(),
                aux=own["aux"],
                last=own["last"],
            )
        )
    return samples


def _copy_teacher(source: Path, target: Path) -> None:
    """The teacher reads `last` alone, which is as it was: its files are copied and named for the new shards."""
    old, new = _lines(source), _lines(target)
    assert [line.samples for line in old] == [line.samples for line in new], "shards were cut elsewhere"
    records, finished = teacher_lines(source, old), teacher_lines(target, new)
    for before, after in zip(old, new, strict=True):
        if after.file in finished:
            continue
        name = teacher_name(after.number)
        shutil.copyfile(source / SHARDS / teacher_name(before.number), target / SHARDS / name)
        append_line(
            target / TEACHER,
            {**records[before.file], "file": name, "shard": after.file, "shard_sha256": after.sha256},
        )


def _lines(path: Path) -> list[ShardLine]:
    return [ShardLine.parse(record, path / INDEX) for record in read_lines(path / INDEX)[0]]
