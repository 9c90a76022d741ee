"""Tests of eagle3.sampler: the same optimizer steps for any ranks, micro-batches and resumes."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.sampler import EMPTY_ROW, MicroBatch, StepSampler


def counts(num_packs: int, ttt_steps: int = 3) -> torch.Tensor:
    return torch.arange(num_packs * ttt_steps).reshape(num_packs, ttt_steps)


def ranks(num_packs: int, world_size: int, **sizes: int | None) -> list[StepSampler]:
    sizes = {"rows_per_step": 8, "micro_rows": 2, "epochs": 2, "seed": 0} | sizes
    return [StepSampler(counts(num_packs), **sizes, world_size=world_size, rank=r) for r in range(world_size)]


def rows_by_step(samplers: list[StepSampler]) -> dict[int, Counter]:
    steps: dict[int, Counter] = {}
    for sampler in samplers:
        for micro in sampler:
            steps.setdefault(micro.step, Counter()).update(row for row in micro.rows if row != EMPTY_ROW)
    return steps


SIZES = {
    "num_packs": st.integers(1, 40),
    "rows_per_step": st.integers(1, 12),
    "micro_rows": st.integers(1, 4),
    "world_size": st.integers(1, 5),
    "epochs": st.integers(1, 3),
    "seed": st.integers(0, 3),
}


@settings(deadline=None)
@given(**SIZES)
def test_same_packs_in_every_step_for_any_world_size_and_micro_batches(
    num_packs: int, rows_per_step: int, micro_rows: int, world_size: int, epochs: int, seed: int
):
    sizes = {"rows_per_step": rows_per_step, "epochs": epochs, "seed": seed}
    alone = rows_by_step(ranks(num_packs, 1, **sizes, micro_rows=rows_per_step))
    spread = rows_by_step(ranks(num_packs, world_size, **sizes, micro_rows=micro_rows))
    assert spread == alone
    steps_per_epoch = -(-num_packs // rows_per_step)
    for epoch in range(epochs):
        taken = sum((alone[epoch * steps_per_epoch + s] for s in range(steps_per_epoch)), Counter())
        assert taken == Counter(range(num_packs))


@settings(deadline=None)
@given(**SIZES)
def test_all_ranks_run_equally_often_and_know_the_totals_of_the_step(
    num_packs: int, rows_per_step: int, micro_rows: int, world_size: int, epochs: int, seed: int
):
    sizes = {"rows_per_step": rows_per_step, "epochs": epochs, "seed": seed, "micro_rows": micro_rows}
    samplers = ranks(num_packs, world_size, **sizes)
    runs = [list(sampler) for sampler in samplers]
    assert all(len(run) == len(sampler) for run, sampler in zip(runs, samplers, strict=True))
    for together in zip(*runs, strict=True):
        assert len({micro.step for micro in together}) == 1
        assert len({micro.supervised_total for micro in together}) == 1
        assert all(len(micro.rows) == micro_rows for micro in together)
    table = counts(num_packs)
    for step, rows in rows_by_step(samplers).items():
        total = tuple(table[list(rows.elements())].sum(0).tolist())
        assert all(micro.supervised_total == total for run in runs for micro in run if micro.step == step)


@settings(deadline=None)
@given(**SIZES, data=st.data())
def test_resume_at_any_step_continues_the_unbroken_run(
    num_packs: int,
    rows_per_step: int,
    micro_rows: int,
    world_size: int,
    epochs: int,
    seed: int,
    data: st.DataObject,
):
    sizes = {"rows_per_step": rows_per_step, "epochs": epochs, "seed": seed, "micro_rows": micro_rows}
    [unbroken, *_] = ranks(num_packs, world_size, **sizes)
    step = data.draw(st.integers(0, unbroken.total_steps))
    [resumed, *_] = ranks(num_packs, world_size, **sizes)
    resumed.set_start(step)
    assert list(resumed) == list(unbroken)[step * unbroken.micro_batches :]
    assert len(resumed) == len(unbroken) == unbroken.total_steps * unbroken.micro_batches


def test_changed_world_size_on_resume_takes_the_same_packs():
    before = rows_by_step(ranks(21, 1))
    samplers = ranks(21, 2)
    for sampler in samplers:
        sampler.set_start(4)
    after = rows_by_step(samplers)
    assert after == {step: rows for step, rows in before.items() if step >= 4}


def test_order_depends_on_seed_and_epoch_only():
    [one], [same], [other] = ranks(30, 1), ranks(30, 1), ranks(30, 1, seed=1)
    orders = [[sum((m.rows for m in s if m.step // 4 == epoch), ()) for epoch in (0, 1)] for s in (one, same, other)]
    assert orders[0] == orders[1]
    assert orders[0][0] != orders[0][1] and orders[0] != orders[2]
    torch.manual_seed(5)
    assert list(one) == list(same)


def test_seed_and_epoch_are_not_simply_added():
    [a], [b] = ranks(30, 1, seed=0), ranks(30, 1, seed=1)
    second_epoch = sum((a.step_rows(step) for step in range(4, 8)), ())
    first_epoch = sum((b.step_rows(step) for step in range(4)), ())
    assert second_epoch != first_epoch


def test_five_packs_on_two_ranks_end_together():
    first, second = ranks(5, 2, rows_per_step=4, micro_rows=1, epochs=1, seed=None)
    assert [m.rows for m in first] == [(0,), (2,), (4,), (EMPTY_ROW,)]
    assert [m.rows for m in second] == [(1,), (3,), (EMPTY_ROW,), (EMPTY_ROW,)]


def test_whole_visits_every_pack_once_in_order_in_one_step():
    samplers = [StepSampler.whole(counts(5), micro_rows=2, world_size=2, rank=r) for r in (0, 1)]
    assert [m.rows for m in samplers[0]] == [(0, 2), (4, EMPTY_ROW)]
    assert [m.rows for m in samplers[1]] == [(1, 3), (EMPTY_ROW, EMPTY_ROW)]
    assert next(iter(samplers[0])) == MicroBatch(0, (0, 2), tuple(counts(5).sum(0).tolist()))
    assert [list(s) for s in samplers] == [list(s) for s in samplers]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rows_per_step": 0}, "rows_per_step is 0"),
        ({"micro_rows": 0}, "micro_rows is 0"),
        ({"epochs": 0}, "epochs is 0"),
        ({"rank": 2}, "rank 2 is outside 0..0"),
    ],
)
def test_sizes_out_of_range_are_refused(change: dict, named: str):
    sizes = {"rows_per_step": 4, "micro_rows": 1, "epochs": 1, "seed": 0} | change
    with pytest.raises(ValueError, match=named):
        StepSampler(counts(5), **sizes)


def test_nothing_to_train_on_is_refused():
    with pytest.raises(ValueError, match="no row to train on"):
        StepSampler(counts(0), rows_per_step=4, micro_rows=1, epochs=1, seed=0)


def test_start_beyond_the_run_is_refused():
    [sampler] = ranks(5, 1)
    with pytest.raises(ValueError, match="cannot start at step 3: the run has 2 optimizer steps"):
        sampler.set_start(3)
