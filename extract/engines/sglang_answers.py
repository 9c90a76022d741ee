"""What SGLang answers, read and compared with what was asked: it ignores unknown fields without a word."""

from collections.abc import Collection, Sequence
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


def read_verifications(answer: dict[str, Any], tokens: int, drafts: int | None) -> tuple[int, ...]:
    """Drafts that each verification of an answer of `tokens` tokens accepted; none without a drafter (`drafts` None).

    SGLang tells how many verifications accepted how many drafts, and not in which order (see `_in_an_order`). Names
    and meaning are those of 0.5.12 to 0.5.23.

    Raises:
        ServerError: a count is missing, or they contradict each other, the answer's length or the number of drafts.
    """
    try:
        meta = answer["meta_info"]
        told = sorted(key for key in meta if key.startswith("spec_"))
        if drafts is None or (tokens == 1 and not told):  # the first token comes from the prompt's forward
            if told:
                raise ValueError(f"without a drafter it tells {told}")
            return ()
        histogram, verified = list(meta["spec_correct_drafts_histogram"]), meta["spec_verify_ct"]
        accepted, proposed = meta["spec_num_correct_drafts"], meta["spec_num_proposed_drafts"]
        if proposed != verified * drafts:
            raise ValueError(f"{proposed} drafts in {verified} verifications are not {drafts} each")
        summed = sum(histogram), sum(length * count for length, count in enumerate(histogram))
        if len(histogram) > drafts + 1 or min(histogram) < 0 or summed != (verified, accepted):
            raise ValueError(f"{verified} verifications with {accepted} drafts accepted are not {histogram}")
        return _in_an_order(histogram, tokens)
    except (KeyError, TypeError) as error:
        raise ServerError(f"SGLang's answer lacks counts of its drafts ({error}): {str(answer)[:500]}") from error
    except ValueError as error:
        raise ServerError(f"SGLang's counts contradict each other: {error}; it says {str(answer)[:500]}") from error


def _in_an_order(histogram: Sequence[int], tokens: int) -> tuple[int, ...]:
    """The verifications in an order that leads to the answer's end: only the last may have gone past it.

    By how many tokens it did is certain, and so is the sum of drafts accepted inside the answer. Which of several
    lengths the last one had is not: the most frequent is taken, and at the positions past its end one verification of
    the answer may be counted wrongly.
    """
    accepted = [length for length, count in enumerate(histogram) for _ in range(count)]
    past = 1 + sum(accepted) + len(accepted) - tokens
    possible = [length for length, count in enumerate(histogram) if count and length >= past]
    if past < 0 or not possible:
        raise ValueError(f"verifications that accepted {list(histogram)} drafts do not make {tokens} tokens")
    last = max(possible, key=lambda length: histogram[length])
    accepted.remove(last)
    return (*accepted, last)
