"""Tests of eagle3.data: from a store on disk to batches, whatever the number of workers."""

import pickle
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eagle3.data import PackedStore, count_rows, loader
from eagle3.rows import plan_rows
from eagle3.sampler import EMPTY_ROW, MicroBatch, StepSampler
from eagle3.supervision import row_counts
from extract.store import Store, open_store
from extract.store_format import SHARDS, shard_name
from tests.packed import (
    LENGTHS,
    ROW_TOKENS,
    TTT_STEPS,
    VOCAB,
    all_rows,
    counts_of,
    make_store,
    sample,
    sampler_for,
)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return make_store(tmp_path / "store", [sample(n, length) for n, length in enumerate(LENGTHS)])


def ids_seen(batches: Iterable[dict]) -> list[list[str]]:
    """Sample ids of every batch, in order, as its tensors have them."""
    seen = []
    for batch in batches:
        begins = (batch["position"] == 0) & (batch["document"] >= 0)
        seen.append([f"s{number}" for number in (batch["aux"][begins][:, 0] // 100).int().tolist()])
    return seen


def test_a_store_in_fp8_gives_the_batches_of_one_without_codec(store: Store, tmp_path: Path):
    coded = make_store(tmp_path / "fp8", [sample(n, length) for n, length in enumerate(LENGTHS)], codec="fp8")
    rows = range(len(all_rows(store)))
    one, other = (all_rows(each).read(rows) for each in (store, coded))
    for name in one:
        if name == "aux":  # its columns are equal, so each is its row's largest, which the codec keeps
            torch.testing.assert_close(other[name], one[name], rtol=1e-6, atol=0)
        else:
            assert torch.equal(other[name], one[name]), name


# ---- rows --------------------------------------------------------------------------------------------------


def test_every_token_is_in_the_rows_once_and_in_its_place(store: Store):
    dataset = all_rows(store)
    seen: Counter = Counter()
    for number, pack in enumerate(dataset.plan.packs):
        row = {name: tensor[0] for name, tensor in dataset.read([number]).items()}
        assert {name: tensor.shape[0] for name, tensor in row.items()} == dict.fromkeys(row, ROW_TOKENS)
        for document, piece in enumerate(pack):
            own, ref = row["document"] == document, dataset.plan.refs[piece.sample]
            stored = store.read(ref, ("input_ids", "loss_mask", "aux", "last", "top1", "lse"))
            assert row["position"][own].tolist() == list(range(piece.tokens))
            for name, tensor in stored.items():
                assert row[name][own].tolist() == tensor[piece.start : piece.stop].tolist(), name
            seen.update((ref.id, token) for token in range(piece.start, piece.stop))
    assert seen == Counter((ref.id, token) for ref in store.samples for token in range(ref.tokens))


def test_dtypes_and_padding(store: Store):
    batch = all_rows(store).read([EMPTY_ROW, 0])
    kinds = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in batch.items()}
    assert kinds == {
        "input_ids": (torch.int64, (2, 16)),
        "loss_mask": (torch.bool, (2, 16)),
        "document": (torch.int32, (2, 16)),
        "position": (torch.int64, (2, 16)),
        "greedy": (torch.bool, (2, 16)),
        "aux": (torch.float32, (2, 16, 12)),
        "last": (torch.float32, (2, 16, 4)),
        "top1": (torch.int64, (2, 16)),
        "lse": (torch.float32, (2, 16)),
    }
    assert set(batch["document"][0].tolist()) == {-1}
    assert all(not batch[name][0].any() for name in batch if name != "document")


def test_greedy_marks_the_tokens_of_greedy_samples_only(tmp_path: Path):
    store = make_store(tmp_path / "store", [sample(0, 6), sample(1, 5, temperature=0.7)])
    batch = all_rows(store).read([0])
    assert batch["greedy"][0].tolist() == [True] * 6 + [False] * 10


def test_second_piece_of_a_split_sample_starts_at_position_0(tmp_path: Path):
    store = make_store(tmp_path / "store", [sample(0, 25)])
    batch = all_rows(store).read([0, 1])
    assert batch["position"][1, :9].tolist() == list(range(9))
    assert batch["aux"][1, :9, 0].tolist() == list(range(16, 25))


def test_unfinished_teacher_pass_is_refused(tmp_path: Path):
    store = make_store(tmp_path / "store", [sample(0, 6), sample(1, 6)], teacher=False)
    plan = plan_rows(store, store.samples, 16, overlong="cut")
    with pytest.raises(ValueError, match="teacher pass has not finished"):
        PackedStore(store, plan)


@pytest.mark.parametrize(("value", "name", "workers"), [("nan", "aux", 0), ("inf", "last", 1), ("-inf", "aux", 2)])
def test_bad_value_at_load_names_the_sample(store: Store, value: str, name: str, workers: int):
    ref = store.samples[4]
    _, entries = store._map(shard_name(ref.shard))
    row_bytes = entries[name].row_items * 4
    path = store.path / SHARDS / shard_name(ref.shard)
    content = bytearray(path.read_bytes())
    at = entries[name].begin + (ref.start + 3) * row_bytes
    content[at : at + 4] = torch.tensor([float(value)]).numpy().tobytes()
    path.write_bytes(content)
    dataset = all_rows(open_store(store.path))
    with pytest.raises(ValueError, match=rf"sample s4 has NaN or infinite values in `{name}`, from token 3"):
        list(loader(dataset, sampler_for(dataset, epochs=1), num_workers=workers, pin_memory=False))


def test_counts_from_small_tensors_equal_counts_of_whole_batches(store: Store):
    dataset = all_rows(store)
    batch = dataset.read(range(len(dataset)))
    drafted = torch.ones(VOCAB, dtype=torch.bool)
    drafted[batch["top1"][0, 5]] = False
    counts = count_rows(dataset, row_counts, drafted, TTT_STEPS, rows_at_once=2)
    active, supervised = counts_of(batch, drafted)
    assert torch.equal(counts.active, active) and torch.equal(counts.supervised, supervised)
    assert counts.active.dtype == torch.int64 and bool((counts.supervised < counts.active).any())


def test_neighbours_in_a_row_count_as_if_alone(store: Store):
    packed = all_rows(store)
    every = torch.ones(VOCAB, dtype=torch.bool)
    one_a_row = tuple((piece,) for pack in packed.plan.packs for piece in pack)
    alone = PackedStore(store, replace(packed.plan, packs=one_a_row))
    assert len(alone) > len(packed)
    together, apart = (count_rows(d, row_counts, every, TTT_STEPS) for d in (packed, alone))
    assert torch.equal(together.supervised.sum(0), apart.supervised.sum(0))
    assert torch.equal(together.active.sum(0), apart.active.sum(0))


# ---- loader ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_any_number_of_workers_gives_the_same_batches(store: Store, workers: int):
    dataset = all_rows(store)
    sampler = sampler_for(dataset)
    expected = [dataset[micro] for micro in sampler]
    batches = loader(dataset, sampler, num_workers=workers, pin_memory=False)
    assert len(batches) == len(expected)
    for _ in range(2):  # workers persist: a second pass must be the same
        for batch, wanted in zip(batches, expected, strict=True):
            assert batch.keys() == wanted.keys() and batch["step"] == wanted["step"]
            assert all(torch.equal(batch[name], wanted[name]) for name in wanted if name != "step")


def test_totals_of_a_step_travel_with_each_of_its_micro_batches(store: Store):
    dataset = all_rows(store)
    every = torch.ones(VOCAB, dtype=torch.bool)
    counted: dict[int, torch.Tensor] = {}
    totals: dict[int, list[torch.Tensor]] = {}
    for rank in (0, 1):
        sampler = sampler_for(dataset, world_size=2, rank=rank, micro_rows=1)
        for batch in loader(dataset, sampler, num_workers=0, pin_memory=False):
            _, supervised = counts_of(batch, every)
            counted[batch["step"]] = counted.get(batch["step"], 0) + supervised.sum(0)
            totals.setdefault(batch["step"], []).append(batch["supervised_total"])
    assert len(counted) == sampler.total_steps
    for step, total in counted.items():
        assert len(totals[step]) == 2 * sampler.micro_batches
        assert all(torch.equal(one, total) for one in totals[step])


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_resume_gives_the_samples_of_the_unbroken_run(store: Store, workers: int):
    dataset = all_rows(store)
    sampler = sampler_for(dataset, epochs=3, rows_per_step=2, micro_rows=1)
    unbroken = ids_seen(loader(dataset, sampler, num_workers=0, pin_memory=False))
    first_epoch, second_epoch = (
        unbroken[: sampler.steps_per_epoch * 2],
        unbroken[sampler.steps_per_epoch * 2 :],
    )
    assert first_epoch != second_epoch[: len(first_epoch)]
    for step in (1, sampler.steps_per_epoch, sampler.steps_per_epoch + 1):
        resumed = sampler_for(dataset, epochs=3, rows_per_step=2, micro_rows=1)
        resumed.set_start(step)
        rest = ids_seen(loader(dataset, resumed, num_workers=workers, pin_memory=False))
        assert unbroken[: step * sampler.micro_batches] + rest == unbroken


def test_every_sample_once_an_epoch_over_two_ranks(store: Store):
    dataset = all_rows(store)
    seen: Counter = Counter()
    for rank in (0, 1):
        sampler = sampler_for(dataset, epochs=1, world_size=2, rank=rank)
        for ids in ids_seen(loader(dataset, sampler, num_workers=0, pin_memory=False)):
            seen.update(ids)
    assert seen == Counter(ref.id for ref in store.samples)


def test_nothing_in_a_worker_touches_cuda(store: Store, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA was touched")

    for name in ("_lazy_init", "is_available", "current_device", "device_count", "set_device", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    dataset = all_rows(store)
    for sampler in (sampler_for(dataset), StepSampler.whole(sampler_for(dataset).supervised, micro_rows=2)):
        assert list(loader(dataset, sampler, num_workers=2, pin_memory=False))


def test_dataset_can_be_sent_to_a_spawned_worker(store: Store):
    dataset = all_rows(store)
    dataset.read([0])
    again = pickle.loads(pickle.dumps(dataset))
    assert torch.equal(again.read([0])["aux"], dataset.read([0])["aux"])
    assert len(pickle.dumps(dataset)) < 100_000


def test_a_row_that_does_not_exist_is_refused(store: Store):
    dataset = all_rows(store)
    with pytest.raises(AssertionError):
        dataset[MicroBatch(0, (len(dataset),), (0, 0, 0))]
