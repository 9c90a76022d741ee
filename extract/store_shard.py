"""One shard: its samples as tensors, its file, its line of the index."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from extract.store_codec import encode
from extract.store_format import ShardLine, StoredSample
from extract.store_tensors import temporary_of, write_temporary


@dataclass(frozen=True)
class FullShard:
    """Samples that become shard `number`, about `num_bytes` in its file."""

    number: int
    samples: tuple[StoredSample, ...]
    num_bytes: int


def write_shard(samples: Sequence[StoredSample], file: Path, *, codec: str, layers: int) -> ShardLine:
    """Writes the temporary file of `file`, fsynced. OSError leaves none behind."""
    lengths = [len(sample.input_ids) for sample in samples]
    tensors = {
        "offsets": [torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)],
        "input_ids": [torch.tensor(sample.input_ids, dtype=torch.int32) for sample in samples],
        **_states(samples, codec, layers),
        "loss_mask": [torch.tensor(sample.loss_mask, dtype=torch.uint8) for sample in samples],
    }
    num_bytes, sha256 = write_temporary(file, tensors)
    entries = tuple(
        {
            "id": sample.id,
            "conversation": sample.conversation,
            "tokens": len(sample.input_ids),
            "temperature": sample.temperature,
            "supervised": sum(sample.loss_mask),
        }
        for sample in samples
    )
    return ShardLine(file.name, num_bytes, sha256, temporary_of(file).stat().st_mtime_ns, sum(lengths), entries)


def _states(samples: Sequence[StoredSample], codec: str, layers: int) -> dict[str, list[Tensor]]:
    """By falling item size, as write_tensors wants it."""
    aux, last = [sample.aux for sample in samples], [sample.last for sample in samples]
    if codec == "none":
        return {"aux": aux, "last": last}
    coded = [encode(states, layers) for states in aux]
    return {"aux_scale": [scales for _, scales in coded], "last": last, "aux": [codes for codes, _ in coded]}
