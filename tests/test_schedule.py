"""Tests of eagle3.schedule: peak, floor and shape of the learning rate."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.schedule import lr_at, warmup_steps


def curve(total_steps: int, warmup_ratio: float, floor_ratio: float = 0.0, peak: float = 1e-3) -> list[float]:
    kwargs = {
        "peak": peak,
        "total_steps": total_steps,
        "warmup_ratio": warmup_ratio,
        "floor_ratio": floor_ratio,
    }
    return [lr_at(step, **kwargs) for step in range(total_steps)]


def test_peak_at_the_last_warmup_step_and_minimum_at_the_last():
    rates = curve(40, 0.25)
    assert warmup_steps(40, 0.25) == 10
    assert rates[9] == 1e-3 and max(rates) == 1e-3 and rates.count(1e-3) == 1
    assert rates[0] == pytest.approx(1e-4)
    assert rates[39] == 0.0
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_one_percent_of_240_steps_is_two_steps():
    rates = curve(240, 0.01)
    assert rates[:2] == [5e-4, 1e-3] and rates[2] < 1e-3


def test_floor_is_reached_and_held():
    rates = curve(20, 0.1, floor_ratio=0.1)
    assert rates[-1] == pytest.approx(1e-4, rel=1e-12)
    past = lr_at(25, peak=1e-3, total_steps=20, warmup_ratio=0.1, floor_ratio=0.1)
    assert past == pytest.approx(1e-4, rel=1e-12)


def test_halfway_is_the_mean_of_peak_and_floor():
    assert curve(21, 0.0, floor_ratio=0.2)[10] == pytest.approx(0.6e-3)


@settings(deadline=None)
@given(
    total_steps=st.integers(1, 300),
    warmup_ratio=st.floats(0.0, 0.99),
    floor_ratio=st.floats(0.0, 1.0),
)
def test_rises_to_the_peak_then_never_rises(total_steps: int, warmup_ratio: float, floor_ratio: float):
    rates = curve(total_steps, warmup_ratio, floor_ratio)
    top = warmup_steps(total_steps, warmup_ratio) - 1
    assert rates[top] == 1e-3
    assert all(a < b for a, b in pairwise(rates[: top + 1]))
    assert all(a >= b for a, b in pairwise(rates[top:]))
    if total_steps > 1:
        assert rates[-1] == pytest.approx(floor_ratio * 1e-3, abs=1e-18)
        assert min(rates[top:]) == rates[-1]


def test_longer_plan_never_jumps_above_the_peak():
    for step in range(20, 40):
        assert lr_at(step, peak=1e-3, total_steps=40, warmup_ratio=0.1, floor_ratio=0.0) <= 1e-3


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"step": -1}, "step -1"),
        ({"total_steps": 0}, "total_steps 0"),
        ({"peak": 0.0}, "optimizer.lr"),
        ({"peak": float("nan")}, "optimizer.lr"),
        ({"warmup_ratio": 1.0}, "warmup_ratio 1.0"),
        ({"floor_ratio": -0.1}, "floor_ratio -0.1"),
    ],
)
def test_values_out_of_range_are_refused(change: dict, named: str):
    good = {"step": 0, "peak": 1e-3, "total_steps": 10, "warmup_ratio": 0.1, "floor_ratio": 0.0}
    with pytest.raises(ValueError, match=named):
        lr_at(**(good | change))
