"""Two controls that a drafter must beat, on the same texts as its evaluation: does it use what it was given?

    bigram     the most frequent successor of each token in the training answers: no network, no states
    permuted   the same drafter, trained and replayed on states that belong to other tokens: no use of the states

Both are replayed (see `eagle3.metrics.replay`) and compared prompt by prompt, with a paired bootstrap.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from eagle3 import replayed
from eagle3.bootstrap import Interval, paired_difference
from eagle3.drafter import Eagle3Drafter
from eagle3.metrics import acceptance_length
from eagle3.permuted import permute
from eagle3.report import PromptResult, counts_by_conversation
from eagle3.supervision import Supervision
from extract.store import SampleRef, Store

Counts = tuple[int, int]
"""Verifications and accepted drafts of one prompt."""


def bigram_table(store: Store, refs: Sequence[SampleRef], vocab_size: int) -> Int[Tensor, "V"]:
    """For every token its most frequent successor in the answers of these samples; -1 where it has none.

    Counted are pairs of which the assistant wrote both. Of equally frequent successors the lowest id is taken.
    """
    pairs = []
    for ref in refs:
        ids, mask = (tensor.long() for tensor in store.ids_and_masks(ref))
        both = (mask[:-1] * mask[1:]).bool()
        pairs.append(ids[:-1][both] * vocab_size + ids[1:][both])
    table = torch.full((vocab_size,), -1, dtype=torch.long)
    pair, times = torch.cat(pairs).unique(return_counts=True)
    order = times.argsort(stable=True, descending=True)  # `pair` is sorted, so that ties stay by id
    first, second = pair[order] // vocab_size, pair[order] % vocab_size
    # A later write to the same place wins on no device for sure: keep the first of each token instead.
    token, where = first.unique(return_inverse=True)
    best = torch.full((len(token),), len(first)).scatter_reduce(0, where, torch.arange(len(first)), "amin")
    table[token] = second[best]
    return table


def bigram_counts(table: Int[Tensor, "V"], text: replayed.Capture, plan: Supervision) -> Counts:
    """Replay of a chain of K lookups. As long as the chain is right, the token looked up is the true one."""
    tokens = table.to(text.input_ids.device)[text.input_ids[plan.index]]
    visited, by_position = replayed.count(text, plan, tokens)
    return visited, sum(by_position)


def drafter_counts(drafter: Eagle3Drafter, text: replayed.Capture, plan: Supervision, aux: Tensor) -> Counts:
    """Replay of a drafter on states that it is given."""
    visited, by_position = replayed.count(text, plan, replayed.drafts_of(drafter, text, plan, aux).tokens)
    return visited, sum(by_position)


@dataclass(frozen=True)
class Compared:
    """One control beside our drafter, pooled over the prompts."""

    name: str
    ours: float
    accept_len: float
    difference: Interval
    """Ours minus the control's, 95 % over prompts."""

    @property
    def beaten(self) -> bool:
        return self.difference.low > 0


def compare(
    name: str, results: Sequence[PromptResult], control: Sequence[Counts], *, resamples: int, seed: int
) -> Compared:
    """Paired by prompt; turns of one conversation stay together."""
    ours = counts_by_conversation((r.id, r.verifications, sum(r.accepted)) for r in results)
    other = counts_by_conversation((r.id, *counts) for r, counts in zip(results, control, strict=True))
    lengths = [acceptance_length(*counts.sum(0).tolist()) for counts in (ours, other)]
    assert lengths[0] is not None and lengths[1] is not None, "make_report refuses texts without a verification"
    return Compared(name, lengths[0], lengths[1], paired_difference(ours, other, resamples, seed))


def control_counts(
    model: PreTrainedModel,
    results: Sequence[PromptResult],
    table: Int[Tensor, "V"],
    permuted: Eagle3Drafter,
    *,
    drafts: int,
    seed: int,
    advance: Callable[[int], None] = lambda n: None,
) -> dict[str, list[Counts]]:
    """Both controls on the texts of an evaluation; the states of all texts together are permuted for the second."""
    layers = permuted.shape.capture_layers
    texts = []
    for r in results:
        text = replayed.capture(model, r.prompt_ids, r.response_ids, layers)
        # Logits over the vocabulary of every text at once would not fit for long.
        texts.append((replace(text, logits=text.logits[:0]), text.plan(permuted, drafts)))
        advance(1)
    aux_of_all = torch.cat([text.aux for text, _ in texts])
    shuffled = permute(aux_of_all, seed).split([len(text.aux) for text, _ in texts])
    counts: dict[str, list[Counts]] = {"bigram": [], "permuted": []}
    for (text, plan), aux in zip(texts, shuffled, strict=True):
        counts["bigram"].append(bigram_counts(table, text, plan))
        counts["permuted"].append(drafter_counts(permuted, text, plan, aux))
    return counts
