"""Tests of two processes, DDP and FSDP2: for any spread of supervised tokens they train as one process on one batch."""

import math
from collections import Counter

import pytest
import torch

from tests.ranks import Job, Outcome, in_two_processes, train

SPREADS = {
    "uneven": ([(9, 5), (2,), (14,), (4, 4, 3)], 4),
    "one rank without a supervised token": ([(12,), (2,), (9, 4), (2,)], 4),
    "one row has them all": ([(2,), (1,), (16,), (2,)], 4),
    "an empty row and a short last step": ([(8,), (3, 7), (10,), (6,), (13,)], 3),
    "a whole step without any": ([(12,), (9,), (2,), (2, 2)], 2),
    "one row a step, one rank always empty": ([(8,), (5,)], 1),
}
STRATEGIES = ("ddp", "fsdp")
JOBS = {
    (name, strategy): Job(tuple(rows), n, strategy) for name, (rows, n) in SPREADS.items() for strategy in STRATEGIES
}
JOBS |= {
    ("shuffled, partly written", strategy): Job(((9, 5), (11,), (3, 8), (6, 6), (4,)), 2, strategy, 0.7, seed=3)
    for strategy in STRATEGIES
}
POISONED = {
    ("one rank meets NaN", strategy): Job(((8,), (3, 7), (10,), (6,)), 2, strategy, poisoned=1)
    for strategy in STRATEGIES
}


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple[str, str], list[Outcome]]:
    """Of every job, both ranks': one pair of processes runs them all."""
    jobs = JOBS | POISONED
    return dict(zip(jobs, in_two_processes(list(jobs.values())), strict=True))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", JOBS, ids=lambda name: f"{name[1]}: {name[0]}")
def test_two_processes_train_as_one(outcomes: dict[tuple[str, str], list[Outcome]], name: tuple[str, str]):
    one, two = train(JOBS[name]), outcomes[name]
    before = dict(JOBS[name].case().drafter.named_parameters())
    assert any(not torch.equal(one.weights[n], before[n]) for n in before)
    for rank in two:
        for weight, want in one.weights.items():
            torch.testing.assert_close(rank.weights[weight], want, rtol=1e-4, atol=1e-6, msg=weight)
        assert len(rank.sums) == len(one.sums)
        for ours, theirs in zip((*rank.sums, rank.val_sums), (*one.sums, one.val_sums), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-8)
        assert rank.norms == pytest.approx(one.norms, rel=1e-5)  # of all weights, whoever holds them
        assert max(one.norms) > 0.5, "no gradient was clipped"
        assert rank.accept_len == one.accept_len
    assert one.accept_len is not None


@pytest.mark.parametrize("name", JOBS, ids=lambda name: f"{name[1]}: {name[0]}")
def test_the_union_of_the_ranks_rows_is_the_data_and_none_comes_twice(
    outcomes: dict[tuple[str, str], list[Outcome]], name: tuple[str, str]
):
    job, seen = JOBS[name], Counter(row for rank in outcomes[name] for row in rank.rows)
    assert set(seen.values()) == {1}
    assert Counter(row for _, row in seen) == Counter(2 * list(range(len(job.lengths))))  # two epochs
    steps = -(-len(job.lengths) // job.rows_per_step)
    assert {step for step, _ in seen} == set(range(2 * steps))


@pytest.mark.parametrize("name", POISONED, ids=lambda name: name[1])
def test_a_gradient_that_is_nan_on_one_rank_changes_no_weight_on_any(
    outcomes: dict[tuple[str, str], list[Outcome]], name: tuple[str, str]
):
    one, two = train(POISONED[name]), outcomes[name]
    for rank in (one, *two):
        assert [math.isfinite(norm) for norm in rank.norms] == [False, True, False, True], "rows 0 and 1, two epochs"
        for weight, want in one.weights.items():
            assert want.isfinite().all()
            torch.testing.assert_close(rank.weights[weight], want, rtol=1e-4, atol=1e-6, msg=weight)
    assert not torch.equal(one.weights["fc.weight"], POISONED[name].case().drafter.fc.weight), "other steps count"
