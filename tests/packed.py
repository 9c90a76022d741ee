"""A small store with teacher, packed: for the tests of everything between the store and the batch."""

from pathlib import Path

import torch

from eagle3.data import PackedStore, count_rows
from eagle3.packing import Overlong
from eagle3.rows import plan_rows
from eagle3.sampler import StepSampler
from eagle3.supervision import row_counts
from extract.store import Store, StoredSample, create_or_resume, open_store
from extract.teacher import teacher_pass

HIDDEN, VOCAB, ROW_TOKENS, TTT_STEPS = 4, 50, 16, 3
LENGTHS = [10, 6, 16, 7, 5, 9, 12, 4, 8, 14, 4, 11]


def sample(number: int, length: int, *, prompt: int = 2, temperature: float = 0.0, turn: str = "") -> StoredSample:
    """States tell where they come from: aux is 100 * sample + token in every column, last is minus that."""
    rows = (100 * number + torch.arange(length)).to(torch.float32)[:, None]
    return StoredSample(
        id=f"s{number}{turn}",
        conversation=f"c{number}",
        temperature=temperature,
        input_ids=[(7 * number + token) % VOCAB for token in range(length)],
        loss_mask=[int(token >= prompt) for token in range(length)],
        aux=rows.expand(-1, 3 * HIDDEN).contiguous(),
        last=-rows.expand(-1, HIDDEN).contiguous(),
    )


def make_store(path: Path, samples: list[StoredSample], *, teacher: bool = True, codec: str = "none") -> Store:
    manifest = {"last": "post_norm", "dtype": "float32", "codec": codec, "capture_layers": [1, 2, 3],
                "hidden_size": HIDDEN, "must_match": {}}  # fmt: skip
    with create_or_resume(path, manifest, shard_bytes=4000) as writer:
        for one in samples:
            assert writer.add(one)
        writer.finish([one.id for one in samples])
    if teacher:
        head = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(0))
        for _ in teacher_pass(path, head, device="cpu", chunk_tokens=64):
            pass
    return open_store(path)


def all_rows(store: Store, *, overlong: Overlong = "split", row_tokens: int = ROW_TOKENS) -> PackedStore:
    return PackedStore(store, plan_rows(store, store.samples, row_tokens, overlong=overlong))


def sampler_for(dataset: PackedStore, **changes: int | None) -> StepSampler:
    counts = count_rows(dataset, row_counts, torch.ones(VOCAB, dtype=torch.bool), TTT_STEPS)
    return StepSampler(counts.supervised, **({"rows_per_step": 3, "micro_rows": 2, "epochs": 2, "seed": 0} | changes))


def counts_of(batch: dict, drafted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    small = {name: batch[name] for name in ("input_ids", "loss_mask", "document", "top1")}
    return row_counts(**small, in_draft_vocab=drafted, ttt_steps=TTT_STEPS)
