"""Third stage: decodes with a drafter and says how much it helps. Three things must hold, or it fails:

the text is that of plain greedy decoding, token by token;
every draft is what the training path computes for that row of the finished text;
so the replayed acceptance length (design of `eagle3.metrics.replay`) is the counted one, exactly.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from eagle3 import replayed
from eagle3.decode import Decoded, Verifier, decode
from eagle3.drafter import Eagle3Drafter
from eagle3.questions import Prompt, Questions
from eagle3.report import PromptResult, Report, make_report
from eagle3.truth import first_difference, judge, plain_greedy

log = logging.getLogger(__name__)

PLAIN_BATCH = 32
"""Prompts of one batch of plain greedy decoding."""


@dataclass(frozen=True)
class Settings:
    drafts: int
    """K, tokens drafted before each verification."""
    max_new_tokens: int
    end_of_turn_ids: frozenset[int]
    bootstrap: int
    """Resamples of the prompts."""
    seed: int
    baseline_prompts: int = 2
    """Prompts that are also decoded plainly at batch 1, for tokens/s at the same concurrency."""


Advance = Callable[..., None]
"""Called with 1 after each prompt, and the acceptance length so far: `extract.progress.Progress.advance`."""


def evaluate(
    model: PreTrainedModel,
    drafter: Eagle3Drafter,
    questions: Questions,
    settings: Settings,
    *,
    check_prompts: Callable[[Collection[Prompt]], None] = lambda prompts: None,
    advance: Advance = lambda n, **fields: None,
) -> Report:
    """Decodes every prompt speculatively and judges the result; `model` and `drafter` in float32.

    `check_prompts` is called with the prompts of each round before they are decoded (see `questions.refuse_trained`).

    Raises:
        OutputDiffers, ReplayDiffers: this program is at fault, with prompt and place.
        ValueError: a model that is not in float32, or a drafter that does not belong to it.
    """
    check_fit(model, drafter)
    with full_float32():
        results = _evaluate_all(model, drafter, questions, settings, check_prompts, advance)
    return make_report(results, settings.drafts, settings.bootstrap, settings.seed)


def _evaluate_all(
    model: PreTrainedModel,
    drafter: Eagle3Drafter,
    questions: Questions,
    settings: Settings,
    check_prompts: Callable[[Collection[Prompt]], None],
    advance: Advance,
) -> list[PromptResult]:
    results: list[PromptResult] = []
    decode_one = Decoder(model, drafter.eval(), settings)
    while prompts := questions.next_round():
        check_prompts(prompts)
        for first in range(0, len(prompts), PLAIN_BATCH):
            batch = prompts[first : first + PLAIN_BATCH]
            plain = decode_one.plain_batch(batch)
            for prompt, truth in zip(batch, plain, strict=True):
                result = decode_one.prompt(prompt, truth, timed=len(results) < settings.baseline_prompts)
                results.append(result)
                questions.answered(prompt, result.response_ids)
                advance(1, accept_len=_so_far(results))
    return results


@contextmanager
def full_float32() -> Iterator[None]:
    """TF32 and its like would make a tie of every second difference."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class Decoder:
    """All that is done with one prompt, and what does not change from one to the next."""

    def __init__(self, model: PreTrainedModel, drafter: Eagle3Drafter, settings: Settings):
        self.model, self.drafter, self.settings = model, drafter, settings

    def plain_batch(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        settings = self.settings
        return plain_greedy(
            self.model,
            [p.ids for p in prompts],
            max_new_tokens=settings.max_new_tokens,
            end_of_turn_ids=settings.end_of_turn_ids,
        )

    def prompt(self, prompt: Prompt, truth: Sequence[int], *, timed: bool) -> PromptResult:
        """Decodes, compares with plain greedy decoding, replays, and compares the counts."""
        decoded, plain_s = self._decode(prompt), None
        batch_tie = first_difference(decoded.response_ids, truth) is not None
        if timed or batch_tie:
            began = time.perf_counter()
            # Padding and neighbours round differently; what counts is the verifier alone.
            [truth] = self.plain_batch([prompt])
            plain_s = time.perf_counter() - began
        text = replayed.capture(self.model, prompt.ids, decoded.response_ids, self.drafter.shape.capture_layers)
        output_ties = judge(prompt.name, decoded.response_ids, truth, text.logits)
        result = self._replayed(prompt, decoded, text)
        return replace(
            result,
            batch_ties=int(batch_tie and output_ties == 0),
            output_ties=output_ties,
            plain_s=plain_s if timed else None,
        )

    def follow(
        self, prompt: Prompt, response: Sequence[int], text: replayed.Capture, *, plain_s: float, speculative_s: float
    ) -> PromptResult:
        """Our own counts along a response that an engine wrote in so many seconds."""
        decoded = self._decode(prompt, follow=response)
        return replace(self._replayed(prompt, decoded, text), plain_s=plain_s, speculative_s=speculative_s)

    def _decode(self, prompt: Prompt, follow: Sequence[int] | None = None) -> Decoded:
        with Verifier(self.model, self.drafter.shape.capture_layers) as verifier:
            return decode(
                verifier,
                self.drafter,
                prompt.ids,
                drafts=self.settings.drafts,
                max_new_tokens=self.settings.max_new_tokens if follow is None else len(follow),
                end_of_turn_ids=self.settings.end_of_turn_ids,
                follow=follow,
            )

    def _replayed(self, prompt: Prompt, decoded: Decoded, text: replayed.Capture) -> PromptResult:
        steps = self.settings.drafts
        plan = text.plan(self.drafter, steps)
        drafts = replayed.drafts_of(self.drafter, text, plan)
        drafts, ties = replayed.agree(prompt.name, decoded.rounds, text, plan, drafts)
        counted = (len(decoded.rounds), decoded.accepted_by_position(steps))
        again = replayed.count(text, plan, drafts.tokens)
        if again != counted:
            raise replayed.ReplayDiffers(
                f"prompt {prompt.name}: decoding counted {counted[0]} verifications with {counted[1]} accepted, the "
                f"replay {again[0]} with {again[1]}; rows visited by decoding: {[r.row for r in decoded.rounds]}"
            )
        return PromptResult(
            id=prompt.id,
            turn=prompt.turn,
            prompt_ids=prompt.ids,
            response_ids=decoded.response_ids,
            verifications=counted[0],
            accepted=tuple(counted[1]),
            replayed_verifications=again[0],
            replayed_accepted=tuple(again[1]),
            draft_ties=ties,
            speculative_s=decoded.prefill_s + decoded.decode_s,
        )


def check_fit(model: PreTrainedModel, drafter: Eagle3Drafter) -> None:
    head = model.get_output_embeddings().weight
    if head.dtype != torch.float32 or drafter.fc.weight.dtype != torch.float32:
        raise ValueError(
            f"evaluation compares texts token by token and needs float32; the verifier is {head.dtype}, the drafter "
            f"{drafter.fc.weight.dtype}"
        )
    sizes = (drafter.shape.vocab_size, drafter.shape.hidden_size)
    if tuple(head.shape) != sizes:
        raise ValueError(
            f"the drafter was made for a verifier with vocabulary and hidden size {sizes}, this one has "
            f"{tuple(head.shape)}; is verifier.path the model that the drafter was trained for?"
        )


def _so_far(results: Sequence[PromptResult]) -> str:
    verified = sum(r.verifications for r in results)
    return f"{1 + sum(sum(r.accepted) for r in results) / verified:.3f}" if verified else "none"
