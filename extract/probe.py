"""Is what an engine hands over what its verifier computes? Measured on a few sequences, with figures to keep.

Three questions: are the rows there and the same when they are asked for twice; does the verifier's head make of `last`
the very log-probabilities that the engine reports (a missing or doubled norm, a shift by one, another head: all show);
and do stored states come out again when a sequence is extracted alone.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from extract.engines.base import Captured, EngineError
from extract.store_codec import FP8

MAX_ROWS = 256
"""Rows whose log-probabilities are rebuilt: over a large vocabulary that is the work of seconds on a CPU."""
STATE_TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2, FP8: 5e-2 + 2**-4}
"""Of a sequence's states taken twice, relative by norm: kernels sum in another order in another batch, and fp8 keeps a
number to 1/16 of it."""
LOGPROB_TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1, FP8: 2e-1}
"""Mean difference of a log-probability, in nats: an engine's logits are rounded to its dtype (2^-8 of up to 30), and
never to fp8."""


@dataclass(frozen=True)
class Told:
    """What an engine says of the token after each of the first T - 1: `top1` and its log-probability."""

    top1: Int64[Tensor, "T-1"]
    logprob: Float[Tensor, "T-1"]


@dataclass(frozen=True)
class Probe:
    """Figures of one probe; differences of states relative by norm, of log-probabilities in nats."""

    sequences: int
    rows: int
    states_max_difference: float
    logprob_rows: int
    logprob_mean_difference: float
    logprob_max_difference: float
    top1_agreement: float
    """Of rows where both name the same most likely token; the rest must be near ties."""

    def values(self) -> dict[str, float]:
        """For the manifest."""
        return asdict(self)


def probe(
    pairs: Sequence[tuple[Captured, Captured]], told: Sequence[Told], head: Float[Tensor, "V H"], dtype: torch.dtype
) -> Probe:
    """Compares.

    Args:
        pairs: states of one sequence each, taken twice.
        told: what the engine says of each.
        head: the verifier's.
        dtype: the coarsest one of those in which states were computed and are stored.

    Raises:
        EngineError: a difference is above its tolerance; all figures are in the message.
    """
    differences = [max(_distance(a.aux, b.aux), _distance(a.last, b.last)) for a, b in pairs]
    errors, agreed = [], []
    for (states, _), said in zip(pairs, told, strict=True):
        error, same = rebuilt(states.last, said, head)
        errors.append(error)
        agreed.append(same)
    error, same = torch.cat(errors), torch.cat(agreed)
    found = Probe(
        len(pairs), sum(len(a.last) for a, _ in pairs), max(differences), len(error),
        error.mean().item(), error.max().item(), same.float().mean().item(),
    )  # fmt: skip
    states_limit, logprob_limit = STATE_TOLERANCE[dtype], LOGPROB_TOLERANCE[dtype]
    # "not <=" and not ">": NaN must fail too.
    if not (found.states_max_difference <= states_limit and found.logprob_mean_difference <= logprob_limit):
        raise EngineError(
            f"the engine's states are not its verifier's: {found.values()}; allowed in {dtype} are "
            f"states_max_difference {states_limit:g} and logprob_mean_difference {logprob_limit:g}"
        )
    return found


def rebuilt(last: Float[Tensor, "T H"], told: Told, head: Float[Tensor, "V H"]) -> tuple[Float[Tensor, "R"], Tensor]:
    """Of up to `MAX_ROWS` rows: how far the engine's log-probability of its top-1 is from the one that `last` and
    `head` give, plus how much likelier these find another token; and whether both name the same one."""
    step = max(1, -(-len(told.top1) // MAX_ROWS))
    rows = torch.arange(0, len(told.top1), step)
    logprobs = torch.log_softmax(last[rows].float() @ head.float().T, dim=1)
    best, top1 = logprobs.max(dim=1)
    theirs = logprobs.gather(1, told.top1[rows, None])[:, 0]
    return (theirs - told.logprob[rows]).abs() + (best - theirs), top1 == told.top1[rows]


def _distance(a: Float[Tensor, "T W"], b: Float[Tensor, "T W"]) -> float:
    if a.shape != b.shape:
        raise EngineError(f"the same sequence gave states {list(a.shape)} and then {list(b.shape)}")
    return ((a.float() - b.float()).norm() / b.float().norm()).item()
