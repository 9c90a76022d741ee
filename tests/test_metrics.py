"""Tests of eagle3.metrics: rates from sums, and the replay of greedy serving."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle3.loss import HeadOutput
from eagle3.metrics import (
    SUMS,
    accept_len_of,
    acceptance_length,
    rates,
    replay,
    response_starts,
    right_steps,
    step_sums,
)
from eagle3.supervision import supervise


def sums(**rows: list[float]) -> torch.Tensor:
    steps = len(next(iter(rows.values())))
    return torch.tensor([rows.get(name, [0.0] * steps) for name in SUMS], dtype=torch.float64)


def served(right: list[list[bool]], first: int, last: int) -> list[int]:
    """Greedy serving of the response x[first] … x[last]: drafts accepted at each verification.

    `right[k][r]` says whether step k of row r is right. The engine has committed x[first]; a verification of the
    draft made after x[p] commits the accepted tokens and one more, until the last one is committed.
    """
    accepted, p = [], first
    while p < last:
        a = 0
        while a < len(right) and right[a][p - 1]:
            a += 1
        accepted.append(a)
        p += a + 1
    return accepted


@st.composite
def documents(draw: st.DrawFn) -> tuple[list[str], list[list[bool]]]:
    """Texts of `.` and `a`, and for each step and token whether the draft there is right, true outside A_k too."""
    texts = draw(st.lists(st.text(".aaaaa", min_size=1, max_size=12).map(lambda t: "." + t), min_size=1, max_size=4))
    count, steps = sum(map(len, texts)), draw(st.integers(1, 5))
    flags = st.lists(st.sampled_from([True, True, False]), min_size=count, max_size=count)
    return texts, [draw(flags) for _ in range(steps)]


@given(documents())
def test_replay_equals_greedy_serving(case: tuple[list[str], list[list[bool]]]):
    texts, correct = case
    joined = "".join(texts)
    document = torch.tensor([[n for n, text in enumerate(texts) for _ in text]], dtype=torch.int32)
    ids = torch.arange(len(joined))[None]
    mask = torch.tensor([[token == "a" for token in joined]])
    plan = supervise(ids, mask, document, ids, torch.ones(len(joined), dtype=torch.bool), len(correct))
    drafted = torch.where(torch.tensor(correct)[:, plan.rows], plan.target, -1)
    right = right_steps(drafted, plan)
    want = []
    flat = document[0].tolist()
    for first, token in enumerate(joined):
        if token == "a" and joined[first - 1] == ".":  # every text begins with a prompt token
            last = first
            while last + 1 < len(joined) and joined[last + 1] == "a" and flat[last + 1] == flat[first]:
                last += 1
            # What counts as right beyond the response is not asked: its rows leave A_k there.
            inside = [[flag and r + 2 + k <= last for r, flag in enumerate(row)] for k, row in enumerate(correct)]
            if last > first:
                accepted = served(inside, first, last)
                want.append((len(accepted), [sum(a > k for a in accepted) for k in range(len(correct))]))
    assert replay(right, response_starts(plan.rows, document)) == want


def test_hand_made_trace_of_four_rounds():
    """Accepted 3, 0, 1, 2: (3 + 0 + 1 + 2) / 4 drafts and the verifier's own token a round."""
    right = torch.zeros(3, 10, dtype=torch.bool)
    for row, accepted in {0: 3, 4: 0, 5: 1, 7: 2}.items():
        right[:accepted, row] = True
    right[:, [1, 6, 9]] = True  # rows that serving jumps over
    right[1:, 4] = True  # right, but after a wrong draft
    starts = torch.zeros(10, dtype=torch.bool)
    starts[0] = True
    [(visited, by_position)] = replay(right, starts)
    assert (visited, by_position) == (4, [3, 2, 1])
    assert acceptance_length(visited, sum(by_position)) == 2.5
    assert accept_len_of(torch.tensor([float(visited), *by_position])) == 2.5


def test_replay_starts_anew_at_every_response():
    right = torch.ones(2, 5, dtype=torch.bool)
    assert replay(right, torch.tensor([True, False, True, False, False])) == [(1, [1, 1]), (1, [1, 1])]
    assert replay(right[:, :0], torch.zeros(0, dtype=torch.bool)) == []


def test_replay_differs_from_the_mean_over_rows():
    """Easy stretches are visited less often: the mean over all rows is another, higher number here."""
    right = torch.tensor([[True, True, True, True, False, False]] * 3)
    starts = torch.tensor([True, False, False, False, False, False])
    [(visited, by_position)] = replay(right, starts)
    assert acceptance_length(visited, sum(by_position)) == 2.0
    assert 1 + sum((4 / 6, 4 / 6, 4 / 6)) == pytest.approx(3.0)


def test_nothing_verified_has_no_acceptance_length():
    assert acceptance_length(0, 0) is None
    assert accept_len_of(torch.zeros(4)) is None


@pytest.mark.parametrize("counts", [[4, 5, 0], [4, 3, 4], [4, 3, -1], [-1, 0, 0]])
def test_counts_that_no_replay_gives_raise(counts: list[int]):
    """More accepted than rounds, or a later position more often than the one before it."""
    with pytest.raises(AssertionError, match="accepted in"):
        accept_len_of(torch.tensor(counts, dtype=torch.float64))


@given(documents())
def test_acceptance_length_lies_between_one_and_k_plus_one(case: tuple[list[str], list[list[bool]]]):
    _, correct = case
    right = torch.tensor(correct)
    [(visited, by_position)] = replay(right, torch.arange(right.shape[1]) == 0)
    length = accept_len_of(torch.tensor([visited, *by_position], dtype=torch.float64))
    assert length is not None and 1.0 <= length <= 1 + len(correct)


def test_rates_are_sums_over_active_and_losses_over_supervised_rows():
    out = rates(
        sums(
            active=[8, 4], supervised=[6, 2], loss=[3.0, 5.0], right=[4, 1], chain=[4, 1], right_top1=[2, 2],
            alpha=[1.6, 0.4],
        ),
        decay=0.5,
    )  # fmt: skip
    assert out == pytest.approx(
        {
            "loss_0": 0.5, "loss_1": 2.5, "loss": 0.5 + 0.5 * 2.5, "acc_0": 0.5, "acc_1": 0.25, "chain_0": 0.5,
            "chain_1": 0.25, "acc_top1_0": 0.25, "acc_top1_1": 0.5, "alpha_0": 0.2, "alpha_1": 0.1, "coverage": 0.75,
            "accept_len_all_rows": 1.75,
        }
    )  # fmt: skip


def test_sums_of_a_micro_batch_count_an_undraftable_token_as_a_miss():
    ids = torch.tensor([[0, 1, 2, 3, 4]])
    mask = torch.tensor([[False, True, True, True, True]])
    top1 = torch.tensor([[0, 2, 3, 0, 0]])
    in_draft_vocab = torch.tensor([True, True, True, False, False])
    plan = supervise(ids, mask, torch.zeros(1, 5, dtype=torch.int32), top1, in_draft_vocab, 2)
    assert plan.active.tolist() == [[True, True, True], [True, True, False]]
    head = HeadOutput(torch.zeros(()), torch.full((2, 3), 0.5), plan.target, torch.full((2, 3), 0.25))
    drafted = torch.tensor([[2, 0, 4], [3, 4, 4]])  # x[2], wrong, x[4] | x[3], x[4], inactive
    found = dict(zip(SUMS, step_sums(head, drafted, plan).tolist(), strict=True))
    assert found == {
        "active": [3, 2], "supervised": [2, 1], "loss": [1.0, 0.5], "right": [2, 2], "chain": [2, 1],
        "right_top1": [1, 1], "alpha": [0.75, 0.5],
    }  # fmt: skip


def test_rate_of_an_empty_denominator_is_absent():
    out = rates(sums(active=[3, 0], supervised=[0, 0], right=[1, 0], chain=[1, 0]), decay=0.8)
    assert set(out) == {"loss", "acc_0", "chain_0", "acc_top1_0", "alpha_0", "coverage", "accept_len_all_rows"}
    assert out["loss"] == 0.0 and out["coverage"] == 0.0
    assert rates(sums(active=[0, 0]), decay=0.8) == {"loss": 0.0}


@pytest.mark.parametrize(
    ("name", "faulty"),
    [
        ("acc_0", {"right": [5]}),
        ("chain_0", {"chain": [5]}),
        ("acc_top1_0", {"right_top1": [-1]}),
        ("alpha_0", {"alpha": [4.1]}),
        ("alpha_0", {"alpha": [-0.1]}),
        ("loss_0", {"loss": [-0.1]}),
    ],
)
def test_rate_outside_its_range_raises(name: str, faulty: dict[str, list[float]]):
    with pytest.raises(AssertionError, match=f"{name} = "):
        rates(sums(**({"active": [4], "supervised": [1]} | faulty)), decay=0.8)


def test_more_supervised_than_active_rows_raise():
    with pytest.raises(AssertionError, match=r"step 1: 3\.0 supervised of 2\.0 active rows"):
        rates(sums(active=[4, 2], supervised=[1, 3]), decay=0.8)


def test_nan_is_reported_as_nan():
    out = rates(sums(active=[4], supervised=[2], loss=[math.nan], alpha=[math.nan]), decay=0.8)
    assert math.isnan(out["loss"]) and math.isnan(out["loss_0"]) and math.isnan(out["alpha_0"])
    assert out["acc_0"] == 0.0
