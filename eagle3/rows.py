"""Which samples of a store train, which validate, and in which rows they lie: decided once a run."""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from eagle3.packing import Overlong, Pack, PackReport, Piece, cut_pieces, pack_pieces, report
from eagle3.vocab import add_supervised
from extract.store import SampleRef, Store

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RowPlan:
    """The rows of one split."""

    refs: tuple[SampleRef, ...]
    packs: tuple[Pack, ...]
    """Pieces number the samples by their place in `refs`."""
    row_tokens: int
    report: PackReport

    @property
    def digest(self) -> str:
        """Equal for equal rows: a checkpoint keeps it, so that a resume with other data can be refused."""
        ids = [ref.id for ref in self.refs]
        return hashlib.sha256(repr((ids, self.packs)).encode()).hexdigest()


def split_conversations(
    refs: Sequence[SampleRef], val_fraction: float, seed: int
) -> tuple[list[SampleRef], list[SampleRef]]:
    """(train, validation) samples, in store order; all samples of a conversation are on one side.

    Conversations are ordered by a hash of seed and name, and the first ones validate: `val_fraction` of them,
    but at least one, and at least one trains. ValueError if that cannot be, or if no validation response is
    greedy: `val/accept_len` is defined on greedy responses only.
    """
    if not 0.0 < val_fraction < 1.0:
        raise ValueError(f"val_fraction {val_fraction} is outside (0, 1): it is the share of held-out conversations")
    names = sorted({ref.conversation for ref in refs}, key=lambda name: (_hash(seed, name), name))
    if len(names) < 2:
        raise ValueError(
            f"the store holds {len(names)} conversation(s), but one must train and another one validate: "
            "extract more prompts"
        )
    held_out = set(names[: min(len(names) - 1, max(1, round(val_fraction * len(names))))])
    train = [ref for ref in refs if ref.conversation not in held_out]
    val = [ref for ref in refs if ref.conversation in held_out]
    if not any(ref.temperature == 0 and ref.supervised > 1 for ref in val):
        raise ValueError(
            f"none of the {len(val)} validation samples is a greedy response (temperature 0) of two tokens "
            "or more, so val/accept_len has no meaning: extract some of them, or raise val_fraction"
        )
    return train, val


def plan_rows(store: Store, refs: Sequence[SampleRef], row_tokens: int, *, overlong: Overlong) -> RowPlan:
    """Pack samples into rows. Pieces that no draft can be trained on are left out, which no gradient notices.

    Split and cut samples are counted in the report, and so are those of which nothing is left (a prompt that
    fills the row). ValueError if that is all of them.
    """
    pieces = cut_pieces([ref.tokens for ref in refs], row_tokens, overlong=overlong)
    kept: list[Piece] = []
    for sample, own in groupby(pieces, key=attrgetter("sample")):
        loss_mask = store.ids_and_masks(refs[sample])[1].bool()
        kept += [piece for piece in own if _has_draft(loss_mask[piece.start : piece.stop])]
    packs = pack_pieces(kept, row_tokens)
    plan = RowPlan(tuple(refs), tuple(packs), row_tokens, report(packs, [ref.tokens for ref in refs], row_tokens))
    _tell_dropped(plan)
    return plan


def require_greedy(plan: RowPlan) -> None:
    """ValueError, before any training, if no packed row of the validation split has a greedy response to replay."""
    if not any(plan.refs[piece.sample].temperature == 0 for pack in plan.packs for piece in pack):
        raise ValueError(
            "no greedy response of the validation split has two tokens in one packed row, so val/accept_len has no "
            "meaning; raise data.val_fraction or extraction.max_len"
        )


def count_tokens(store: Store, refs: Sequence[SampleRef], vocab_size: int) -> Int64[Tensor, "V"]:
    """How often each target id is supervised in these samples; ValueError names a sample with foreign ids."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for ref in refs:
        input_ids, loss_mask = store.ids_and_masks(ref)
        try:
            add_supervised(counts, input_ids, loss_mask)
        except ValueError as error:
            raise ValueError(f"sample {ref.id}: {error}") from error
    return counts


def _has_draft(loss_mask: Bool[Tensor, "T"]) -> bool:
    """Whether A_0 of the piece has a row: one r with x[r+1] and x[r+2] both written by the assistant."""
    return bool((loss_mask[1:-1] & loss_mask[2:]).any())


def _tell_dropped(plan: RowPlan) -> None:
    if plan.report.dropped:
        present = {piece.sample for pack in plan.packs for piece in pack}
        gone = [ref.id for number, ref in enumerate(plan.refs) if number not in present]
        log.warning(
            "%d of %d samples have nothing to draft within %d tokens and are left out: %s%s",
            len(gone), len(plan.refs), plan.row_tokens, ", ".join(gone[:5]), " …" if len(gone) > 5 else "",
        )  # fmt: skip
    if not plan.packs:
        raise ValueError(
            f"none of the {len(plan.refs)} samples has two assistant tokens in a row (rows hold "
            f"{plan.row_tokens} tokens): check the loss masks, or raise extraction.max_len"
        )


def _hash(seed: int, name: str) -> str:
    return hashlib.sha256(f"{seed} {name}".encode()).hexdigest()
