"""What vLLM says, read and compared with what was asked: nothing that it leaves out, ignores or changes goes unnoticed.

`/v1/completions` takes unknown fields without a word, so an answer must show that each was heeded, and a counter that
is missing is never 0.
"""

import re
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ValidationError

from extract.engines.base import Completion, Counters
from extract.launcher import ServerError

COUNTER = re.compile(r"^vllm:spec_decode_num_(\w+?)_total\{(.*)\} (\S+)$", re.MULTILINE)
POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True)
class Asked:
    """A request; `drafts` is None for a server without a drafter."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    stop_ids: frozenset[int]
    vocab_size: int
    drafts: int | None


class _Speculation(BaseModel):
    num_spec_steps: int
    per_step_accepted: tuple[int, ...] | None = None
    """None: there was no verification."""
    per_step_drafted: tuple[int, ...] | None = None


class _Metrics(BaseModel):
    speculative_decoding: _Speculation | None = None


class _Choice(BaseModel):
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"]


class _Answer(BaseModel):
    choices: tuple[_Choice]
    metrics: _Metrics | None = None


def read_completion(text: str, asked: Asked, seconds: float) -> Completion:
    """The body of an answer of `/v1/completions`, which took `seconds`.

    Raises:
        ServerError: it lacks something, or is no answer to this very request.
    """
    try:
        answer = _Answer.model_validate_json(text)
        (choice,) = answer.choices
        _check_answer(choice, asked)
        told = None if answer.metrics is None else answer.metrics.speculative_decoding
        accepted, drafted = _steps(told, asked.drafts)
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
        raise ServerError(f"vLLM's answer lacks what was asked for: {faults}; it is {text[:500]}") from error
    except ValueError as error:
        raise ServerError(f"vLLM's answer is not what was asked for: {error}; it is {text[:500]}") from error
    return Completion(choice.token_ids, choice.finish_reason, accepted, drafted, seconds)


def read_counters(metrics: str, drafts: int) -> Counters:
    """vLLM's totals out of its Prometheus text, summed over its engines.

    Raises:
        ServerError: one is missing, or the positions are not 0 .. drafts - 1.
    """
    totals: Counter[str] = Counter()
    positions: Counter[int] = Counter()
    for counter, labels, value in COUNTER.findall(metrics):
        totals[counter] += int(float(value))
        for position in POSITION.findall(labels):
            positions[int(position)] += int(float(value))
    missing = {"drafts", "draft_tokens", "accepted_tokens"} - totals.keys()
    if missing or sorted(positions) != list(range(drafts)):
        raise ServerError(
            f"vLLM's metrics lack vllm:spec_decode_num_* of {sorted(missing)}, or count positions {sorted(positions)} "
            f"and not 0 .. {drafts - 1}; this version of vLLM counts otherwise"
        )
    by_position = tuple(positions[position] for position in range(drafts))
    return Counters(totals["drafts"], totals["draft_tokens"], totals["accepted_tokens"], by_position)


def _check_answer(choice: _Choice, asked: Asked) -> None:
    ids = choice.token_ids
    if choice.prompt_token_ids != asked.prompt:
        raise ValueError("the prompt that it read is not the one that it was sent")
    if not ids or min(ids) < 0 or max(ids) >= asked.vocab_size:
        raise ValueError(f"ids are missing or outside 0 .. {asked.vocab_size - 1}")
    stops = [place for place, token in enumerate(ids) if token in asked.stop_ids]
    ended = [len(ids) - 1] if choice.finish_reason == "stop" else []
    most = asked.max_new_tokens
    if stops != ended or len(ids) > most or (not ended and len(ids) < most):
        raise ValueError(
            f"{len(ids)} of at most {most} ids, stop tokens at {stops}, finish_reason {choice.finish_reason}"
        )


def _steps(told: _Speculation | None, drafts: int | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Accepted and given drafts of each verification; none without a drafter."""
    if told is None and drafts is None:
        return (), ()
    if told is None or drafts is None:
        raise ValueError(f"with {drafts} drafts, its figures of speculative decoding are {told}")
    accepted, drafted = told.per_step_accepted or (), told.per_step_drafted or ()
    if not len(accepted) == len(drafted) == told.num_spec_steps:
        raise ValueError(f"{told.num_spec_steps} verifications, but {len(accepted)} and {len(drafted)} are told")
    if any(not 0 <= a <= d <= drafts for a, d in zip(accepted, drafted, strict=True)):
        raise ValueError(f"accepted {accepted} of {drafted} drafts")
    return accepted, drafted
