"""Bootstrap intervals over prompts (Efron 1979, percentile method): prompts are resampled whole, counts are pooled."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Interval:
    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


def pooled(counts: Int[Tensor, "P 2"], resamples: int, seed: int, level: float = 0.95) -> Interval | None:
    """Acceptance length 1 + accepted / verifications with its interval; None where nothing was verified.

    `counts`: verifications and accepted drafts of each prompt.
    """
    if not int(counts[:, 0].sum()):
        return None
    return _interval(_length(counts[None])[0], _length(counts[_draws(len(counts), resamples, seed)]), level)


def paired_difference(
    ours: Int[Tensor, "P 2"], other: Int[Tensor, "P 2"], resamples: int, seed: int, level: float = 0.95
) -> Interval:
    """Acceptance length of `ours` minus that of `other` on the same prompts: both are resampled alike."""
    assert ours.shape == other.shape, "paired: one row a prompt on both sides"
    if not int(ours[:, 0].sum()) or not int(other[:, 0].sum()):
        raise ValueError("no draft was verified on these prompts; ask for longer responses")
    draws = _draws(len(ours), resamples, seed)
    value = _length(ours[None]) - _length(other[None])
    return _interval(value[0], _length(ours[draws]) - _length(other[draws]), level)


def _draws(prompts: int, resamples: int, seed: int) -> Int[Tensor, "S P"]:
    return torch.randint(prompts, (resamples, prompts), generator=torch.Generator().manual_seed(seed))


def _length(counts: Int[Tensor, "S P 2"]) -> Float[Tensor, "S"]:
    verified, accepted = counts.sum(1).double().unbind(-1)
    return 1.0 + accepted / verified  # NaN for a draw of prompts without any verification


def _interval(value: Tensor, draws: Tensor, level: float) -> Interval:
    tail = (1.0 - level) / 2
    # Draws without a single verification say nothing; they can only occur with a handful of prompts.
    low, high = torch.nanquantile(draws, torch.tensor([tail, 1.0 - tail], dtype=draws.dtype)).tolist()
    return Interval(float(value), low, high)
