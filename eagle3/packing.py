"""Packing: samples of any length into rows of a fixed number of tokens, the same way every time.

First-fit decreasing: the longest piece first, each into the first row with room for it. The result depends on
the lengths alone; a run packs once and shuffles whole rows afterwards.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

Overlong = Literal["split", "cut"]


class Piece(NamedTuple):
    """Tokens `start` to `stop` (exclusive) of sample `sample`."""

    sample: int
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start


Pack = tuple[Piece, ...]
"""The pieces of one row, in order."""


@dataclass(frozen=True)
class PackReport:
    """What packing did with the samples."""

    samples: int
    rows: int
    tokens: int
    """Tokens in rows."""
    split: int
    """Samples in more than one piece."""
    cut: int
    """Samples that lost their end."""
    cut_tokens: int
    dropped: int
    """Samples without a piece in any row."""
    fill: float
    """Share of the rows' tokens that are no padding."""


def pack(lengths: Sequence[int], row_tokens: int, *, overlong: Overlong) -> list[Pack]:
    """Rows of at most `row_tokens` tokens that hold every sample (`overlong`: see `cut_pieces`)."""
    return pack_pieces(cut_pieces(lengths, row_tokens, overlong=overlong), row_tokens)


def cut_pieces(lengths: Sequence[int], row_tokens: int, *, overlong: Overlong) -> list[Piece]:
    """One piece a sample; a longer sample gives several (`split`) or loses its end (`cut`).

    ValueError for a sample without tokens or a row of less than one token.
    """
    if row_tokens < 1:
        raise ValueError(f"rows of {row_tokens} tokens hold nothing: raise extraction.max_len")
    assert overlong in get_args(Overlong)
    pieces = []
    for sample, length in enumerate(lengths):
        if length < 1:
            raise ValueError(f"sample {sample} has {length} tokens: leave empty samples out before packing")
        kept = length if overlong == "split" else min(length, row_tokens)
        starts = range(0, kept, row_tokens)
        pieces += [Piece(sample, start, min(start + row_tokens, kept)) for start in starts]
    return pieces


def pack_pieces(pieces: Sequence[Piece], row_tokens: int) -> list[Pack]:
    """First-fit decreasing; equal lengths keep their order. ValueError for a piece longer than a row."""
    rows: list[list[Piece]] = []
    free = _Free(len(pieces), row_tokens)
    for piece in sorted(pieces, key=lambda piece: -piece.tokens):
        if not 1 <= piece.tokens <= row_tokens:
            raise ValueError(f"{piece} has {piece.tokens} tokens; a row holds 1..{row_tokens}")
        row = free.take(piece.tokens)
        if row == len(rows):
            rows.append([])
        rows[row].append(piece)
    return [tuple(row) for row in rows]


def report(packs: Sequence[Pack], lengths: Sequence[int], row_tokens: int) -> PackReport:
    """Counts of what `packs` hold of samples of these `lengths`."""
    pieces: dict[int, int] = {}
    ends: dict[int, int] = {}
    tokens = 0
    for piece in (piece for pack in packs for piece in pack):
        pieces[piece.sample] = pieces.get(piece.sample, 0) + 1
        ends[piece.sample] = max(ends.get(piece.sample, 0), piece.stop)
        tokens += piece.tokens
    lost = [lengths[sample] - end for sample, end in ends.items() if end < lengths[sample]]
    return PackReport(
        samples=len(lengths),
        rows=len(packs),
        tokens=tokens,
        split=sum(count > 1 for count in pieces.values()),
        cut=len(lost),
        cut_tokens=sum(lost),
        dropped=len(lengths) - len(ends),
        fill=tokens / (len(packs) * row_tokens) if packs else 0.0,
    )


class _Free:
    """Free tokens of `rows` empty rows, as a tree of maxima: first fit costs log(rows) steps a piece."""

    def __init__(self, rows: int, row_tokens: int) -> None:
        self.leaves = 1 << max(0, rows - 1).bit_length()
        self.most = [row_tokens] * (2 * self.leaves)

    def take(self, tokens: int) -> int:
        """The first row with room for `tokens`; takes them from it."""
        assert self.most[1] >= tokens
        node = 1
        while node < self.leaves:
            node = 2 * node if self.most[2 * node] >= tokens else 2 * node + 1
        row = node - self.leaves
        self.most[node] -= tokens
        while node > 1:
            node //= 2
            self.most[node] = max(self.most[2 * node], self.most[2 * node + 1])
        return row
