"""Tests of eagle3.rows: the split by conversation, and which pieces of which samples lie in rows."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eagle3.data import count_rows
from eagle3.rows import count_tokens, plan_rows, require_greedy, split_conversations
from eagle3.supervision import row_counts
from extract.store import SampleRef, Store
from tests.packed import LENGTHS, ROW_TOKENS, VOCAB, all_rows, make_store, sample


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return make_store(tmp_path / "store", [sample(n, length) for n, length in enumerate(LENGTHS)])


def refs_of(conversations: int, turns: int = 2, temperature: float = 0.0) -> list[SampleRef]:
    return [
        SampleRef(f"s{c}.{t}", f"c{c}", temperature, 0, 0, 10, 5) for c in range(conversations) for t in range(turns)
    ]


def test_a_conversation_is_on_one_side_only_and_nothing_is_lost():
    refs = refs_of(50)
    train, val = split_conversations(refs, 0.1, seed=0)
    assert len({ref.conversation for ref in val}) == 5
    assert not {ref.conversation for ref in train} & {ref.conversation for ref in val}
    assert sorted(train + val, key=refs.index) == refs
    assert train == sorted(train, key=refs.index)


def test_split_depends_on_seed_and_names_not_on_order():
    refs = refs_of(50)
    _, val = split_conversations(refs, 0.1, seed=0)
    _, reversed_val = split_conversations(refs[::-1], 0.1, seed=0)
    assert {r.id for r in val} == {r.id for r in reversed_val}
    assert {r.id for r in val} != {r.id for r in split_conversations(refs, 0.1, seed=1)[1]}
    assert {r.conversation for r in val} != {f"c{c}" for c in range(5)}


@pytest.mark.parametrize("fraction", [1e-9, 0.999999])
def test_both_sides_have_a_conversation(fraction: float):
    train, val = split_conversations(refs_of(3), fraction, seed=0)
    assert train and val


def test_split_refuses_what_cannot_be_split():
    with pytest.raises(ValueError, match="val_fraction 0"):
        split_conversations(refs_of(3), 0.0, seed=0)
    with pytest.raises(ValueError, match=r"1 conversation\(s\)"):
        split_conversations(refs_of(1), 0.1, seed=0)
    with pytest.raises(ValueError, match="temperature 0"):
        split_conversations(refs_of(9, temperature=0.7), 0.1, seed=0)


def test_a_validation_split_without_a_greedy_row_is_refused_before_any_training(tmp_path: Path):
    for temperature in (0.7, 0.0):
        what = [replace(sample(n, 20), temperature=temperature) for n in range(2)]
        store = make_store(tmp_path / f"store-{temperature}", what)
        plan = plan_rows(store, store.samples, ROW_TOKENS, overlong="split")
        if temperature == 0.0:
            require_greedy(plan)
            continue
        with pytest.raises(ValueError, match="val/accept_len has no meaning"):
            require_greedy(plan)


def test_long_prompt_that_fills_the_row_is_dropped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    samples = [sample(0, 505, prompt=500), sample(1, 20), sample(2, 300, prompt=255)]
    store = make_store(tmp_path / "store", samples)
    plan = plan_rows(store, store.samples, 256, overlong="cut")
    assert {piece.sample for pack in plan.packs for piece in pack} == {1}
    assert (plan.report.dropped, plan.report.samples) == (2, 3)
    assert "2 of 3 samples" in caplog.text and "s0, s2" in caplog.text
    kept = plan_rows(store, store.samples, 256, overlong="split")
    assert sorted(piece for pack in kept.packs for piece in pack) == [
        (0, 256, 505),
        (1, 0, 20),
        (2, 256, 300),
    ]


def test_nothing_to_draft_at_all_is_refused(tmp_path: Path):
    store = make_store(tmp_path / "store", [sample(n, 8, prompt=7) for n in range(3)])
    with pytest.raises(ValueError, match="none of the 3 samples has two assistant tokens"):
        plan_rows(store, store.samples, 16, overlong="cut")


def test_dropped_pieces_hold_no_active_row(store: Store):
    refs = store.samples
    for row_tokens in (3, 4, 5, 7):
        dataset = all_rows(store, row_tokens=row_tokens)
        active = count_rows(dataset, row_counts, torch.ones(VOCAB, dtype=torch.bool), 2).active[:, 0]
        assert bool((active > 0).all())
        starts = {(refs.index(ref), s) for ref in refs for s in range(0, ref.tokens, row_tokens)}
        for number, start in starts - {p[:2] for pack in dataset.plan.packs for p in pack}:
            mask = store.ids_and_masks(refs[number])[1][start : start + row_tokens].tolist()
            assert not any(mask[r + 1] and mask[r + 2] for r in range(len(mask) - 2))


def test_digest_changes_with_the_rows(store: Store):
    plan = plan_rows(store, store.samples, ROW_TOKENS, overlong="split")
    assert plan.digest == plan_rows(store, store.samples, ROW_TOKENS, overlong="split").digest
    assert plan.digest != plan_rows(store, store.samples[1:], ROW_TOKENS, overlong="split").digest
    assert plan.digest != plan_rows(store, store.samples, 32, overlong="split").digest


def test_token_counts_of_a_store(store: Store):
    counts = count_tokens(store, store.samples[:2], VOCAB)
    expected = Counter(t % VOCAB for t in range(2, 10)) + Counter((7 + t) % VOCAB for t in range(2, 6))
    assert {token: n for token, n in enumerate(counts.tolist()) if n} == dict(expected)
    with pytest.raises(ValueError, match=r"sample s1: token ids 7\.\.12 do not fit .* 11"):
        count_tokens(store, store.samples[:2], 11)
