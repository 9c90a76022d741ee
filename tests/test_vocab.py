"""Tests of eagle3.vocab: choice of draft ids, and the two maps."""

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.vocab import DraftVocab, add_supervised, build_vocab


def counts_of(vocab_size: int, **seen: int) -> torch.Tensor:
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for token, count in seen.items():
        counts[int(token.removeprefix("t"))] = count
    return counts


def test_most_frequent_first_ties_by_the_lower_id():
    counts = counts_of(10, t7=5, t2=3, t4=3, t9=3)
    assert build_vocab(counts, 3, ()).target_ids.tolist() == [2, 4, 7]


def test_padding_is_the_lowest_unseen_ids():
    counts = counts_of(12, t7=5, t9=1)
    assert build_vocab(counts, 6, (11,)).target_ids.tolist() == [0, 1, 2, 7, 9, 11]


def test_special_ids_are_always_in_even_if_never_seen():
    counts = torch.arange(1, 101)
    vocab = build_vocab(counts, 5, (0, 3))
    assert vocab.target_ids.tolist() == [0, 3, 97, 98, 99]


def test_size_equal_to_the_vocabulary_is_the_identity():
    vocab = build_vocab(torch.zeros(50, dtype=torch.int64), 50, (49,))
    assert vocab.d2t.tolist() == [0] * 50 and bool(vocab.t2d.all())


@pytest.mark.parametrize("size", [0, -1, 101, 32000])
def test_size_out_of_range_is_refused(size: int):
    with pytest.raises(ValueError, match=f"draft_vocab_size {size} .*1..100"):
        build_vocab(torch.ones(100, dtype=torch.int64), size, ())


def test_more_special_ids_than_places_is_refused():
    with pytest.raises(ValueError, match="3 special and end-of-turn ids"):
        build_vocab(torch.ones(100, dtype=torch.int64), 2, (1, 2, 3))


def test_vocabulary_larger_than_the_tokenizer_gives_t2d_of_the_larger_size():
    counts = counts_of(128, t99=4)  # a tokenizer of 100 ids over 128 weight rows
    vocab = build_vocab(counts, 8, (98,))
    assert vocab.t2d.shape == (128,) and int(vocab.t2d.sum()) == 8


def test_special_id_beyond_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match=r"\[128\] are outside .*0..127"):
        build_vocab(torch.ones(128, dtype=torch.int64), 8, (5, 128))


def test_coverage_is_the_share_of_supervised_tokens():
    counts = counts_of(20, t3=6, t5=3, t8=1)
    vocab = build_vocab(counts, 2, ())
    assert vocab.coverage == pytest.approx(0.9)
    assert vocab.covered(counts_of(20, t8=4)) == 0.0
    assert build_vocab(torch.zeros(20, dtype=torch.int64), 2, ()).coverage is None


@settings(deadline=None)
@given(st.integers(1, 60), st.data())
def test_maps_agree_and_survive_a_round_trip(vocab_size: int, data: st.DataObject):
    counts = torch.tensor(data.draw(st.lists(st.integers(0, 4), min_size=vocab_size, max_size=vocab_size)))
    always = data.draw(st.sets(st.integers(0, vocab_size - 1), max_size=vocab_size))
    size = data.draw(st.integers(max(1, len(always)), vocab_size))
    vocab = build_vocab(counts, size, always)
    ids = vocab.target_ids.tolist()
    assert len(ids) == size and ids == sorted(set(ids)) and always <= set(ids)
    assert (torch.arange(size) + vocab.d2t).tolist() == ids == vocab.t2d.nonzero().flatten().tolist()
    assert vocab.d2t.dtype == torch.int64 and vocab.t2d.dtype == torch.bool
    left_out = counts[~vocab.t2d]
    chosen = counts[sorted(set(ids) - always)].tolist()
    assert not chosen or len(left_out) == 0 or int(left_out.max()) <= min(chosen)
    again = DraftVocab.from_tensors(vocab.d2t, vocab.t2d)
    assert again.target_ids.tolist() == ids and again.coverage is None


def test_absolute_ids_in_d2t_are_refused():
    vocab = build_vocab(torch.arange(30), 6, ())
    with pytest.raises(ValueError, match="absolute target ids"):
        DraftVocab.from_tensors(vocab.target_ids, vocab.t2d)
    with pytest.raises(ValueError, match="absolute target ids"):
        DraftVocab.from_tensors(torch.arange(30), torch.ones(30, dtype=torch.bool))


def test_maps_that_do_not_belong_together_are_refused():
    vocab = build_vocab(torch.arange(30), 6, ())
    other = vocab.d2t.clone()
    other[2] -= 1
    with pytest.raises(ValueError, match="draft id 2 gives 25, t2d marks 26"):
        DraftVocab.from_tensors(other, vocab.t2d)
    with pytest.raises(ValueError, match="5 draft ids but t2d marks 6"):
        DraftVocab.from_tensors(vocab.d2t[:5], vocab.t2d)


def test_absent_mapping_is_refused():
    empty = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(ValueError, match="0 draft ids but t2d marks 30"):
        DraftVocab.from_tensors(empty, torch.ones(30, dtype=torch.bool))
    with pytest.raises(ValueError, match="0 draft ids"):
        DraftVocab.from_tensors(empty, torch.zeros(30, dtype=torch.bool))


def test_unsorted_or_foreign_ids_are_refused():
    with pytest.raises(ValueError, match="not sorted"):
        DraftVocab(torch.tensor([3, 1]), 10, None)
    with pytest.raises(ValueError, match=r"0\.\.9"):
        DraftVocab(torch.tensor([3, 10]), 10, None)


def test_counts_hold_supervised_tokens_only():
    ids = torch.tensor([4, 4, 2, 4, 1], dtype=torch.int32)
    mask = torch.tensor([0, 1, 1, 1, 0], dtype=torch.uint8)
    counts = torch.zeros(6, dtype=torch.int64)
    add_supervised(counts, ids, mask)
    add_supervised(counts, ids, torch.zeros(5, dtype=torch.uint8))
    add_supervised(counts, ids[:0], mask[:0])
    assert counts.tolist() == [0, 0, 1, 0, 2, 0]
    with pytest.raises(ValueError, match="vocabulary of 4"):  # an id need not be supervised to be foreign
        add_supervised(counts[:4], ids, torch.zeros(5, dtype=torch.uint8))


def test_a_large_vocabulary_takes_no_time():
    counts = torch.randint(0, 50, (163_840,), generator=torch.Generator().manual_seed(0))
    began = time.perf_counter()
    vocab = build_vocab(counts, 32_000, range(163_584, 163_840))
    assert int(vocab.t2d.sum()) == 32_000 and int(vocab.d2t[-1]) == 163_839 - 31_999
    DraftVocab.from_tensors(vocab.d2t, vocab.t2d)
    assert time.perf_counter() - began < 5


def test_ties_go_by_the_lower_id_in_a_large_vocabulary_too():
    counts = torch.arange(100_000) % 2
    assert build_vocab(counts, 60_000, ()).target_ids[-1] == 99_999
    assert build_vocab(counts, 20_000, ()).target_ids.tolist() == list(range(1, 40_000, 2))
    unseen = set(build_vocab(counts, 60_000, ()).target_ids.tolist()) - set(range(1, 100_000, 2))
    assert unseen == set(range(0, 20_000, 2))
