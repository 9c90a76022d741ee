"""The gate: does an engine decode with this drafter as training computes it? Three counts on the engine's own text.

    engine      what the engine counted itself, in code that nobody here wrote
    in process  our decoder, led along the engine's text, with key-value caches
    replayed    training's unroll over the finished text (see `eagle3.metrics.replay`)

They agree if the acceptance lengths lie within `LENGTH` and the rates at each position within
max(`POSITION`, 2 standard errors). A drafter that is hardly ever accepted would agree with everything: below
`INFORMATIVE` the gate says so and fails.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from eagle3.metrics import acceptance_length

LENGTH = 0.03
"""Of the replayed acceptance length."""
POSITION = 0.02
INFORMATIVE = 1.3
NOT_INFORMATIVE = "not informative"


@dataclass(frozen=True)
class Counts:
    """Verifications of greedy speculative decoding, and how many of them accepted the draft at each position."""

    verifications: int
    accepted: tuple[int, ...]

    @property
    def length(self) -> float:
        """Acceptance length; NaN if nothing was verified, which agrees with nothing."""
        length = acceptance_length(self.verifications, sum(self.accepted))
        return math.nan if length is None else length

    @property
    def rates(self) -> tuple[float, ...]:
        return tuple(a / self.verifications if self.verifications else math.nan for a in self.accepted)


def total(counts: Iterable[Counts]) -> Counts:
    """Pooled over prompts; all have the same positions."""
    listed = list(counts)
    by_position = zip(*(c.accepted for c in listed), strict=True)
    return Counts(sum(c.verifications for c in listed), tuple(sum(column) for column in by_position))


def counts_of(accepted: Sequence[int], drafts: int) -> Counts:
    """From the number of drafts that each verification accepted."""
    return Counts(len(accepted), tuple(sum(a > position for a in accepted) for position in range(drafts)))


def inside_response(accepted: Sequence[int], tokens: int) -> list[int]:
    """The same verifications, counting only drafts that became tokens of the response.

    An engine drafts past the end of a response and counts what it would have accepted there: behind an end-of-turn
    token, beyond the token limit, and in a verification that it had begun already. The replay does not see those.

    Args:
        accepted: drafts that the engine accepted in each verification, in order.
        tokens: length of the response; its first token comes from the prompt's forward.

    Raises:
        ValueError: the verifications do not reach the end of the response.
    """
    done, kept = 1, []
    for count in accepted:
        if done >= tokens:
            break
        kept.append(min(count, tokens - done))
        done += count + 1
    if done < tokens:
        raise ValueError(
            f"the engine's verifications account for {done} of {tokens} response tokens: its counts are incomplete"
        )
    return kept


@dataclass(frozen=True)
class Check:
    """One comparison of the gate, for people to read."""

    name: str
    passed: bool
    told: str


def gate(engine: Counts, decoded: Counts, replayed: Counts) -> list[Check]:
    """All comparisons of the three counts; `engine` normalised by `inside_response`."""
    checks = [_informative(replayed)]
    for name, counts in (("engine", engine), ("in process", decoded)):
        checks.append(_length(name, counts, replayed))
        pairs = zip(counts.rates, replayed.rates, strict=True)
        checks += [_position(name, k, rate, truth, counts.verifications) for k, (rate, truth) in enumerate(pairs)]
    return checks


def _informative(replayed: Counts) -> Check:
    told = f"acceptance length {replayed.length:.3f}, at least {INFORMATIVE} is needed"
    passed = replayed.length >= INFORMATIVE
    return Check("informative" if passed else NOT_INFORMATIVE, passed, told)


def _length(name: str, counts: Counts, replayed: Counts) -> Check:
    gap = abs(counts.length / replayed.length - 1)
    told = f"{counts.length:.3f} against {replayed.length:.3f} replayed: {gap:.1%} apart, {LENGTH:.0%} allowed"
    return Check(f"{name}: length", gap <= LENGTH, told)


def _position(name: str, position: int, rate: float, truth: float, verifications: int) -> Check:
    allowed = max(POSITION, 2 * _standard_error(truth, verifications))
    gap = abs(rate - truth)
    told = f"{rate:.3f} against {truth:.3f} replayed: {gap:.3f} apart, {allowed:.3f} allowed"
    return Check(f"{name}: position {position + 1}", gap <= allowed, told)


def _standard_error(rate: float, trials: int) -> float:
    return math.sqrt(rate * (1 - rate) / trials) if trials else math.nan
