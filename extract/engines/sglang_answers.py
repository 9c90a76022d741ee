"""What SGLang answers, read and compared with what was asked: it ignores unknown fields without a word."""

from collections.abc import Collection
from typing import Any

import torch

from extract.engines.base import Generated
from extract.launcher import ServerError
from extract.probe import Told


def read_answer(answer: dict[str, Any], most: int, stop_ids: Collection[int], vocab_size: int) -> Generated:
    """The body of an answer of `/generate`.

    SGLang ends an answer at the model's own end tokens too, which `stop_ids` must hold; the last id is the stop token.
    It says "length" of an answer whose stop token is the last that it might have: its turn has ended all the same.

    Raises:
        ServerError: it lacks something, or is no answer to a request for at most `most` ids.
    """
    try:
        ids, reason = answer["output_ids"], answer["meta_info"]["finish_reason"]["type"]
    except (KeyError, TypeError) as error:
        raise ServerError(f"SGLang's answer lacks {error}: {str(answer)[:500]}") from error
    stops = [place for place, token in enumerate(ids) if token in stop_ids]
    ended = [len(ids) - 1] if reason == "stop" or stops == [most - 1] else []
    inside = bool(ids) and min(ids) >= 0 and max(ids) < vocab_size
    whole = len(ids) <= most and (bool(ended) or len(ids) == most)
    if reason not in ("stop", "length") or not inside or stops != ended or not whole:
        raise ServerError(
            f"SGLang's answer is not what was asked for: {len(ids)} of at most {most} ids, end-of-turn tokens at "
            f"{stops}, finish_reason {reason}, ids {ids[:8]}..."
        )
    return Generated(ids, "stop" if ended else "length")


def read_logprobs(answer: dict[str, Any], tokens: int) -> Told:
    """The most likely next token after each but the last of a prompt's `tokens` tokens; ServerError if they lack."""
    try:
        tops = [row[0] for row in answer["meta_info"]["input_top_logprobs"][1:]]
        told = Told(torch.tensor([row[1] for row in tops]), torch.tensor([row[0] for row in tops]))
    except (KeyError, IndexError, TypeError) as error:
        raise ServerError(f"SGLang's answer lacks input_top_logprobs: {str(answer)[:500]}") from error
    if len(tops) != tokens - 1:
        raise ServerError(f"SGLang tells {len(tops)} log-probabilities of {tokens} tokens")
    return told
