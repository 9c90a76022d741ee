"""The draft vocabulary: which target ids the drafter can propose, and the maps between the two numberings.

A draft id i stands for the target id i + d2t[i]; draft ids are sorted by target id; t2d marks the target ids
that have a draft id. A drafter directory owns its vocabulary: a warm start loads it and never builds it anew.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Int, Int64, Integer
from torch import Tensor


@dataclass(frozen=True, eq=False)
class DraftVocab:
    """A sorted subset of a verifier's token ids."""

    target_ids: Int64[Tensor, "D"]
    """Target id of every draft id, strictly rising."""
    vocab_size: int
    """V, the verifier's vocabulary as its weights have it (padding rows included)."""
    coverage: float | None
    """Share of the supervised tokens that can be drafted; None where no counts are known (a warm start)."""

    def __post_init__(self) -> None:
        ids = self.target_ids
        if len(ids) == 0:
            raise ValueError("the draft vocabulary is empty: a drafter needs its d2t and t2d, or counts to choose from")
        if int(ids.min()) < 0 or int(ids.max()) >= self.vocab_size:
            raise ValueError(
                f"draft vocabulary holds target ids {int(ids.min())}..{int(ids.max())}, "
                f"but the verifier's vocabulary is 0..{self.vocab_size - 1}"
            )
        if bool((ids.diff() <= 0).any()):
            at = int((ids.diff() <= 0).nonzero()[0])
            raise ValueError(f"draft vocabulary is not sorted: ids {ids[at : at + 2].tolist()} at draft id {at}")

    @property
    def size(self) -> int:
        """D, the number of draft ids."""
        return len(self.target_ids)

    @cached_property
    def d2t(self) -> Int64[Tensor, "D"]:
        """Offsets: target id = i + d2t[i]."""
        return self.target_ids - torch.arange(self.size)

    @cached_property
    def t2d(self) -> Bool[Tensor, "V"]:
        """True for the target ids that have a draft id."""
        mask = torch.zeros(self.vocab_size, dtype=torch.bool)
        mask[self.target_ids] = True
        return mask

    def covered(self, counts: Int64[Tensor, "V"]) -> float | None:
        """Share of `counts` (supervised tokens per target id) that can be drafted; None if there are none."""
        return _share(counts, self.target_ids)

    @classmethod
    def whole(cls, vocab_size: int) -> "DraftVocab":
        """Every target id can be drafted and is its own draft id: nothing to map."""
        return cls(torch.arange(vocab_size), vocab_size, None)

    @classmethod
    def from_offsets(cls, d2t: Int[Tensor, "D"], vocab_size: int) -> "DraftVocab":
        """The vocabulary of a drafter that stores no `t2d`; ValueError if the ids do not rise within the verifier's."""
        return cls(d2t.to(torch.int64) + torch.arange(len(d2t)), vocab_size, None)

    @classmethod
    def from_tensors(
        cls, d2t: Int[Tensor, "D"], t2d: Bool[Tensor, "V"], *, coverage: float | None = None
    ) -> "DraftVocab":
        """The vocabulary that a drafter's `d2t` and `t2d` describe; ValueError where the two disagree."""
        marked = t2d.nonzero().flatten()
        if len(d2t) == 0 or len(marked) != len(d2t):
            raise ValueError(
                f"d2t has {len(d2t)} draft ids but t2d marks {len(marked)} target ids: "
                "the drafter's vocabulary maps do not belong together"
            )
        target_ids = d2t.to(torch.int64) + torch.arange(len(d2t))
        if not torch.equal(target_ids, marked):
            absolute = torch.equal(d2t.to(torch.int64), marked)
            hint = (
                "d2t holds absolute target ids; subtract arange(D) from it"
                if absolute
                else _first_gap(target_ids, marked)
            )
            raise ValueError(f"i + d2t[i] does not hit the ids that t2d marks, in order: {hint}")
        return cls(target_ids, len(t2d), coverage)


def build_vocab(counts: Int64[Tensor, "V"], size: int, always: Collection[int]) -> DraftVocab:
    """The `size` most frequent target ids, `always` (special and end-of-turn ids) included.

    `counts[v]` is how often token v is supervised. Equal counts go by the lower id, so ids that were never
    seen fill the rest from the lowest up. ValueError if `size` is out of range or an id of `always` does not
    exist.
    """
    vocab_size = len(counts)
    if not 1 <= size <= vocab_size:
        raise ValueError(
            f"drafter.draft_vocab_size {size} is outside 1..{vocab_size}, the verifier's vocabulary: lower it"
        )
    forced = sorted(set(always))
    if forced and not 0 <= forced[0] <= forced[-1] < vocab_size:
        raise ValueError(
            f"special token ids {[i for i in forced if not 0 <= i < vocab_size]} are outside the verifier's "
            f"vocabulary 0..{vocab_size - 1}: the tokenizer has more tokens than the weights have rows"
        )
    if len(forced) > size:
        raise ValueError(
            f"drafter.draft_vocab_size {size} is smaller than the {len(forced)} special and end-of-turn ids "
            "that are always in: raise it"
        )
    ranked = counts.clone()
    ranked[forced] = counts.max() + 1
    chosen = ranked.argsort(descending=True, stable=True)[:size].sort().values
    return DraftVocab(chosen, vocab_size, _share(counts, chosen))


def add_supervised(
    counts: Int64[Tensor, "V"], input_ids: Int[Tensor, "T"], loss_mask: Integer[Tensor, "T"] | Bool[Tensor, "T"]
) -> None:
    """Add to `counts` how often each target id is supervised here; ValueError if any id is outside 0..V-1."""
    lowest, highest = (int(end) for end in input_ids.aminmax()) if len(input_ids) else (0, 0)
    if lowest < 0 or highest >= len(counts):
        raise ValueError(
            f"token ids {lowest}..{highest} do not fit the verifier's vocabulary of {len(counts)}: "
            "the store was made with another tokenizer"
        )
    ids = input_ids[loss_mask.bool()].to(torch.int64)
    counts.index_add_(0, ids, torch.ones_like(ids))  # a bincount would touch all of V for every sample


def _share(counts: Int64[Tensor, "V"], target_ids: Int64[Tensor, "D"]) -> float | None:
    total = int(counts.sum())
    return int(counts[target_ids].sum()) / total if total else None


def _first_gap(target_ids: Int64[Tensor, "D"], marked: Int64[Tensor, "D"]) -> str:
    at = int((target_ids != marked).nonzero()[0])
    return f"draft id {at} gives {int(target_ids[at])}, t2d marks {int(marked[at])}"
