"""Evaluation in a real engine: the same prompts without and with the drafter, then judged in process.

The engine's own counters say what it accepted; they know nothing of this program. Our decoder is led along the very
text that the engine wrote, and the text is replayed by training's path: three counts of one text, for `eagle3.gate`.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from transformers import PreTrainedModel

from eagle3 import replayed
from eagle3.drafter import Eagle3Drafter
from eagle3.evaluate import Decoder, Settings, check_fit, full_float32
from eagle3.gate import Counts, counts_of, inside_response, total
from eagle3.questions import Prompt, Questions
from eagle3.report import PromptResult
from eagle3.truth import BF16_TIE_ULPS, Parting, parting, second_look, shortfall_ulps
from extract.engines.base import Completion, Counters


class Server(Protocol):
    """A running engine that answers one prompt at a time."""

    @property
    def version(self) -> str:
        """The engine's own."""

    def complete(self, ids: Sequence[int], *, max_new_tokens: int, stop_ids: Collection[int]) -> Completion:
        """The greedy response; a server with a drafter also says what each verification accepted."""

    def counters(self) -> Counters:
        """Raw totals since the start, of a server with a drafter."""


Start = Callable[[bool], AbstractContextManager[Server]]
"""Starts the engine: False without a drafter, True with it."""
Told = Callable[[str, int], AbstractContextManager[Callable[..., None]]]
"""Progress of a phase: title and number of prompts; gives the function to call after each."""


@dataclass(frozen=True)
class Answered:
    prompt: Prompt
    plain: Completion
    speculative: Completion


@dataclass(frozen=True)
class Answers:
    version: str
    prompts: tuple[Answered, ...]
    raw: Counts
    """The engine's own totals, with drafts that it accepted past the end of a response."""


def answer(
    start: Start,
    questions: Questions,
    settings: Settings,
    check_prompts: Callable[[Collection[Prompt]], None],
    told: Told,
) -> Answers:
    """All prompts in both lives of the engine.

    The first life, without a drafter, decides what later turns of a conversation ask; the second is asked the same.

    Raises:
        ValueError: an answer is longer than was asked for, or the engine's totals are not the sum of what it said of
            each prompt.
    """
    plain: list[tuple[Prompt, Completion]] = []
    with start(False) as server, told("engine alone", questions.total) as advance:
        while prompts := questions.next_round():
            check_prompts(prompts)
            if not plain:
                _complete(server, prompts[0], settings)  # warms up: a first answer takes half as long again
            for prompt in prompts:
                plain.append((prompt, _complete(server, prompt, settings)))
                questions.answered(prompt, plain[-1][1].ids)
                advance(1)
    answered = []
    with start(True) as server, told("engine with drafter", len(plain)) as advance:
        _complete(server, plain[0][0], settings)
        before = server.counters()
        for prompt, alone in plain:
            answered.append(Answered(prompt, alone, _complete(server, prompt, settings)))
            advance(1)
        version, raw = server.version, _since(before, server.counters())
    said = total(counts_of(a.speculative.accepted, settings.drafts) for a in answered)
    if said != raw:
        raise ValueError(
            f"the engine's counters say {raw}, its answers to the same prompts sum to {said}: somebody else is using "
            "this server, or it lost requests"
        )
    return Answers(version, tuple(answered), raw)


def _complete(server: Server, prompt: Prompt, settings: Settings) -> Completion:
    """An engine that says too much both times would agree with itself, on texts that nobody asked for."""
    stop_ids, most = settings.end_of_turn_ids, settings.max_new_tokens
    answer = server.complete(prompt.ids, max_new_tokens=most, stop_ids=stop_ids)
    end = next((at for at, token in enumerate(answer.ids, start=1) if token in stop_ids), most)
    if len(answer.ids) > min(most, end):
        asked = f"the end of turn, {end}" if end < most else f"evaluation.max_new_tokens={most}"
        raise ValueError(
            f"prompt {prompt.id}: the engine answered with {len(answer.ids)} tokens, beyond {asked}; it does not heed "
            "what a request asks of it, so its counts cannot be compared"
        )
    return answer


def _since(before: Counters, after: Counters) -> Counts:
    pairs = zip(after.accepted_per_pos, before.accepted_per_pos, strict=True)
    return Counts(after.drafts - before.drafts, tuple(a - b for a, b in pairs))


@dataclass(frozen=True)
class Judged:
    """One prompt: what the engine counted, and what the verifier and our own decoder say of its text."""

    result: PromptResult
    """Counts of our decoder and of the replay, along the engine's text; seconds are the engine's."""
    accepted: tuple[int, ...]
    """Drafts that the engine accepted in each verification, those past the end of the response included."""
    engine: Counts
    """Its own, of drafts inside the response."""
    parting: Parting | None
    """Where the engine's text without the drafter parts from the one with it."""
    unlikely: int
    """Tokens of the engine's text that the verifier in float32 would not choose, ties aside."""


def judge(
    model: PreTrainedModel,
    drafter: Eagle3Drafter,
    answered: Sequence[Answered],
    settings: Settings,
    served: Callable[[], PreTrainedModel] | None = None,
    advance: Callable[..., None] = lambda n: None,
) -> list[Judged]:
    """`model` and `drafter` in float32; `served` gives the verifier in the engine's precision if that is another one.

    Raises:
        ReplayDiffers: our decoder and the replay disagree: this program is at fault, not the engine.
    """
    check_fit(model, drafter)
    decoder, judged = Decoder(model, drafter.eval(), settings), []
    with full_float32():
        for one in answered:
            judged.append(_judge(decoder, one, served))
            advance(1)
    return judged


def _judge(decoder: Decoder, one: Answered, served: Callable[[], PreTrainedModel] | None) -> Judged:
    spoken = one.speculative
    text = replayed.capture(decoder.model, one.prompt.ids, spoken.ids, decoder.drafter.shape.capture_layers)
    parted = parting(spoken.ids, one.plain.ids, text.logits)
    if parted is not None and not parted.tie and served is not None:
        parted = second_look(parted, served(), one.prompt.ids, spoken.ids)
    inside = inside_response(spoken.accepted, len(spoken.ids))
    return Judged(
        result=decoder.follow(one.prompt, spoken.ids, text, plain_s=one.plain.seconds, speculative_s=spoken.seconds),
        accepted=spoken.accepted,
        engine=counts_of(inside, decoder.settings.drafts),
        parting=parted,
        unlikely=int((shortfall_ulps(text.logits, spoken.ids) > BF16_TIE_ULPS).sum()),
    )
