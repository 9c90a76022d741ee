"""From drafts to metrics: sums that add up over micro-batches and ranks, then rates, and the replay of greedy serving.

`right_k` is a row of A_k whose draft equals the true next token. Denominators are |A_k|: a token that cannot be
drafted is a miss. A rate whose denominator is empty is absent, never 0.
"""

import math
from itertools import pairwise

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eagle3.loss import HeadOutput
from eagle3.supervision import Supervision

SUMS = ("active", "supervised", "loss", "right", "chain", "right_top1", "alpha")
"""Rows of the sums tensor, each with one column a TTT step."""
ROUNDING = 1e-3
"""How far sums of D float32 numbers may leave their range."""


def right_steps(drafted: Int[Tensor, "K R"], plan: Supervision) -> Bool[Tensor, "K R"]:
    """Whether the draft of each step, mapped to the verifier's ids, is the true next token."""
    return plan.active & (drafted == plan.target)


def step_sums(head: HeadOutput, drafted: Int[Tensor, "K R"], plan: Supervision) -> Float[Tensor, "S K"]:
    """The sums of one micro-batch, float64, in the order of `SUMS`."""
    right = right_steps(drafted, plan)
    rows = (
        plan.active,
        plan.supervised,
        head.row_loss * plan.supervised,
        right,
        right.long().cumprod(0),
        plan.active & (drafted == plan.top1),
        head.alpha * plan.active,
    )
    return torch.stack([row.double().sum(-1) for row in rows])


def rates(sums: Float[Tensor, "S K"], decay: float) -> dict[str, float]:
    """Named metrics from summed sums: loss, loss_k, acc_k, chain_k, acc_top1_k, alpha_k, coverage, accept_len_all_rows.

    Raises:
        AssertionError: a rate outside its range, which only a fault in the sums can produce.
    """
    named = dict(zip(SUMS, sums.tolist(), strict=True))
    out: dict[str, float] = {}
    loss = 0.0
    for k, (active, supervised) in enumerate(zip(named["active"], named["supervised"], strict=True)):
        assert 0 <= supervised <= active, f"step {k}: {supervised} supervised of {active} active rows"
        if supervised > 0:
            out[f"loss_{k}"] = named["loss"][k] / supervised
            assert not out[f"loss_{k}"] < -ROUNDING, f"loss_{k} = {out[f'loss_{k}']} is negative"
            loss += decay**k * out[f"loss_{k}"]
        if active > 0:
            for name, key in (
                ("acc", "right"),
                ("chain", "chain"),
                ("acc_top1", "right_top1"),
                ("alpha", "alpha"),
            ):
                out[f"{name}_{k}"] = _in_unit(f"{name}_{k}", named[key][k] / active)
    out["loss"] = loss
    if named["active"][0] > 0:
        out["coverage"] = _in_unit("coverage", named["supervised"][0] / named["active"][0])
        chains = [c / a for c, a in zip(named["chain"], named["active"], strict=True) if a > 0]
        out["accept_len_all_rows"] = 1.0 + sum(chains)
    return out


def _in_unit(name: str, value: float) -> float:
    # alpha is a sum of D float32 products and may exceed 1 by rounding; the others are ratios of counts.
    slack = ROUNDING if name.startswith("alpha") else 0.0
    assert math.isnan(value) or -slack <= value <= 1 + slack, f"{name} = {value} is no rate"
    return value if math.isnan(value) else min(max(value, 0.0), 1.0)


def replay(right: Bool[Tensor, "K R"], starts: Bool[Tensor, "R"]) -> list[tuple[int, list[int]]]:
    """Replays greedy serving over each response: (rows visited, accepted at each position) per response.

    Start at the row whose input is the response's first token, let a = right steps in a row there, jump a+1 rows,
    until the row whose input is the last response token. That row is in no A_0, so a response is a run of
    consecutive active rows; `starts` marks where a new one begins.
    """
    steps = right.shape[0]
    accepted_here = right.long().cumprod(0).sum(0).tolist()
    bounds = [*starts.nonzero().squeeze(1).tolist(), right.shape[1]]
    out = []
    for begin, end in pairwise(bounds):
        visited, by_position, at = 0, [0] * steps, begin
        while at < end:
            accepted = accepted_here[at]
            visited += 1
            for position in range(accepted):
                by_position[position] += 1
            at += accepted + 1
        out.append((visited, by_position))
    return out


def response_starts(rows: Int[Tensor, "R"], document: Int[Tensor, "B T"]) -> Bool[Tensor, "R"]:
    """Marks the first active row of every response: its predecessor is not active, or belongs to another document."""
    starts = torch.ones_like(rows, dtype=torch.bool)
    flat = document.flatten()
    starts[1:] = (rows[1:] != rows[:-1] + 1) | (flat[rows[1:]] != flat[rows[:-1]])
    return starts


def acceptance_length(visited: int, accepted: int) -> float | None:
    """1 + accepted / verifications, pooled; None when nothing was verified."""
    return 1.0 + accepted / visited if visited else None


def accept_len_of(visits: Float[Tensor, "counts"]) -> float | None:
    """Acceptance length of counts as `replay` gives them: rows visited, then accepted at each position.

    Raises:
        AssertionError: counts that no replay gives: a position accepted more often than the one before it.
    """
    visited, *accepted = (int(count) for count in visits.tolist())
    assert all(a >= b >= 0 for a, b in pairwise([visited, *accepted])), f"{accepted} accepted in {visited} rounds"
    return acceptance_length(visited, sum(accepted))
