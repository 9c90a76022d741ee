"""Tests of eagle3.packing: every token once, rows never overfull, the same result every time."""

import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.packing import Pack, Piece, cut_pieces, pack, pack_pieces, report

LENGTHS = st.lists(st.integers(1, 40), max_size=60)


def tokens_of(packs: list[Pack]) -> Counter:
    return Counter((p.sample, t) for row in packs for p in row for t in range(p.start, p.stop))


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 32))
def test_split_keeps_every_token_exactly_once(lengths: list[int], row_tokens: int):
    packs = pack(lengths, row_tokens, overlong="split")
    assert tokens_of(packs) == Counter((s, t) for s, length in enumerate(lengths) for t in range(length))
    assert all(sum(p.tokens for p in row) <= row_tokens and row for row in packs)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 32))
def test_cut_keeps_the_first_tokens_of_every_sample(lengths: list[int], row_tokens: int):
    packs = pack(lengths, row_tokens, overlong="cut")
    expected = Counter((s, t) for s, length in enumerate(lengths) for t in range(min(length, row_tokens)))
    assert tokens_of(packs) == expected
    assert sum(len(row) for row in packs) == len(lengths)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 32))
def test_tree_gives_what_a_plain_first_fit_gives(lengths: list[int], row_tokens: int):
    pieces = cut_pieces(lengths, row_tokens, overlong="split")
    rows: list[list[Piece]] = []
    for piece in sorted(pieces, key=lambda p: -p.tokens):
        fits = (row for row in rows if sum(p.tokens for p in row) + piece.tokens <= row_tokens)
        row = next(fits, None)
        if row is None:
            rows.append(row := [])
        row.append(piece)
    assert pack_pieces(pieces, row_tokens) == [tuple(row) for row in rows]


def test_packs_by_hand():
    assert pack([3, 8, 5, 2], 8, overlong="split") == [
        (Piece(1, 0, 8),),
        (Piece(2, 0, 5), Piece(0, 0, 3)),
        (Piece(3, 0, 2),),
    ]
    assert pack([9], 4, overlong="split") == [(Piece(0, 0, 4),), (Piece(0, 4, 8),), (Piece(0, 8, 9),)]
    assert pack([9], 4, overlong="cut") == [(Piece(0, 0, 4),)]
    assert pack([], 4, overlong="cut") == []


def test_report_counts_split_cut_and_dropped():
    lengths = [10, 3, 4, 9]
    done = report(pack(lengths, 4, overlong="split"), lengths, 4)
    assert (done.samples, done.tokens, done.split, done.cut, done.dropped) == (4, 26, 2, 0, 0)
    assert done.fill == 26 / (4 * done.rows)
    done = report(pack(lengths, 4, overlong="cut"), lengths, 4)
    assert (done.tokens, done.split, done.cut, done.cut_tokens, done.rows) == (15, 0, 2, 11, 4)
    some = [piece for piece in cut_pieces(lengths, 4, overlong="cut") if piece.sample != 1]
    assert report(pack_pieces(some, 4), lengths, 4).dropped == 1
    assert report([], [], 4).fill == 0.0


@pytest.mark.parametrize(
    ("lengths", "row_tokens", "named"),
    [([3, 0], 4, "sample 1 has 0 tokens"), ([3], 0, "max_len")],
)
def test_what_cannot_be_packed_is_refused(lengths: list[int], row_tokens: int, named: str):
    with pytest.raises(ValueError, match=named):
        pack(lengths, row_tokens, overlong="cut")


def test_piece_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match="5 tokens"):
        pack_pieces([Piece(0, 0, 5)], 4)


def test_many_samples_are_packed_in_seconds():
    lengths = [1 + (i * 7919) % 2500 for i in range(50_000)]
    began = time.perf_counter()
    packs = pack(lengths, 2048, overlong="split")
    assert time.perf_counter() - began < 30
    assert report(packs, lengths, 2048).fill > 0.95
