"""Answered turns become samples: token ids with a loss mask that is 1 where the assistant wrote the token."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text
from transformers import PreTrainedTokenizerBase

from extract.prompts import Skipped

log = logging.getLogger(__name__)

MIN_SUPERVISED_SHARE = 0.05
"""Below this share of samples with supervised tokens, prompts and template do not belong together."""


@dataclass(frozen=True)
class Turn:
    """One answered turn: token ids verbatim as they went in and came out."""

    prompt_ids: list[int]
    response_ids: list[int]
    finish_reason: str
    temperature: float


@dataclass(frozen=True)
class Sample:
    """One sequence to capture; `loss_mask[t]` is 1 where the assistant wrote token t (end of turn too)."""

    id: str
    conversation: str
    input_ids: list[int]
    loss_mask: list[int]
    temperature: float
    turns: int


def build_samples(conversation_id: str, turns: Sequence[Turn], *, max_len: int) -> tuple[list[Sample], list[Skipped]]:
    """The samples of one conversation: as many turns in one as continue each other id by id.

    A turn whose prompt does not begin with all ids so far (the template dropped earlier thinking, or the
    text was tokenised differently) starts a new sample. Ids and mask are cut at `max_len` tokens; a sample
    without a supervised token is skipped. Sample ids are `<conversation>#<index of its first turn>`.
    """
    samples: list[Sample] = []
    skipped: list[Skipped] = []
    for first, group in _continuing(turns):
        ids: list[int] = []
        mask: list[int] = []
        for turn in group:
            mask += [0] * (len(turn.prompt_ids) - len(ids)) + [1] * len(turn.response_ids)
            ids = turn.prompt_ids + turn.response_ids
        sample_id = f"{conversation_id}#{first}"
        if not any(mask[:max_len]):
            num_prompt = len(group[0].prompt_ids)
            reason = f"no assistant token among the first {max_len} tokens (the prompt has {num_prompt})"
            skipped.append(Skipped(sample_id, reason))
            continue
        # Greedy only if every turn is: acceptance length is defined on greedy responses.
        temperature = max(turn.temperature for turn in group)
        samples.append(Sample(sample_id, conversation_id, ids[:max_len], mask[:max_len], temperature, turns=len(group)))
    return samples, skipped


def _continuing(turns: Sequence[Turn]) -> list[tuple[int, list[Turn]]]:
    """Runs of turns that each begin with all ids of the one before, and the index of each run's first."""
    runs: list[tuple[int, list[Turn]]] = []
    so_far: list[int] = []
    for index, turn in enumerate(turns):
        if runs and turn.prompt_ids[: len(so_far)] == so_far:
            runs[-1][1].append(turn)
        else:
            runs.append((index, [turn]))
        so_far = turn.prompt_ids + turn.response_ids
    return runs


def require_supervision(num_samples: int, skipped: Sequence[Skipped]) -> None:
    """ValueError if (nearly) no sample has a supervised token: training would look healthy and learn nothing.

    `num_samples` counts the samples kept, `skipped` those left out since the prompts were read.
    """
    total = num_samples + len(skipped)
    log.info("samples: %d with supervised tokens, %d skipped", num_samples, len(skipped))
    if num_samples == 0 or num_samples < MIN_SUPERVISED_SHARE * total:
        why = f"; the first skipped is {skipped[0].id}: {skipped[0].reason}" if skipped else ""
        raise ValueError(
            f"only {num_samples} of {total} samples have tokens written by the assistant{why}. "
            "Check that the chat template is the verifier's and that max_len leaves room for answers"
        )


def mask_preview(
    sample: Sample, tokenizer: PreTrainedTokenizerBase, *, max_tokens: int = 400, brackets: bool = False
) -> Text:
    """A sample's text: green where supervised, else dim; tokens beyond `max_tokens` are only counted.

    `brackets` puts ⟦ ⟧ around what is supervised, for output without colour.
    """
    preview = Text()
    shown = min(len(sample.input_ids), max_tokens)
    start = 0
    for stop in range(1, shown + 1):
        if stop < shown and sample.loss_mask[stop] == sample.loss_mask[start]:
            continue
        run = tokenizer.decode(
            sample.input_ids[start:stop], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        supervised = bool(sample.loss_mask[start])
        text = f"⟦{run}⟧" if brackets and supervised else str(run)
        preview.append(text, style="bold green" if supervised else "dim")
        start = stop
    if shown < len(sample.input_ids):
        preview.append(f" ... and {len(sample.input_ids) - shown} more tokens", style="italic")
    return preview
