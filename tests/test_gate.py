"""The gate: what counts as agreement, and that every way to break a drafter is caught and named."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.gate import Counts, counts_of, gate, inside_response, total

GOOD = Counts(1000, (300, 100, 50))


def failed(engine, decoded=GOOD, replayed=GOOD):
    return [check.name for check in gate(engine, decoded, replayed) if not check.passed]


def test_equal_counts_pass_and_every_comparison_is_told():
    checks = gate(GOOD, GOOD, GOOD)
    assert all(check.passed for check in checks)
    assert [check.name for check in checks] == [
        "informative",
        *(f"{who}: {what}" for who in ("engine", "in process")
          for what in ("length", "position 1", "position 2", "position 3")),
    ]  # fmt: skip


def test_a_length_three_percent_off_fails_and_less_does_not():
    assert failed(Counts(1000, (305, 105, 55))) == [], "1.465 against 1.450"
    assert failed(Counts(1000, (320, 119, 69))) == ["engine: length"], "1.508 against 1.450, no position by 0.02"


def test_a_position_is_held_to_two_standard_errors_where_there_are_few_verifications():
    few = Counts(50, (15, 5, 2))  # two standard errors at position 1: 0.130
    assert failed(Counts(50, (16, 4, 2)), few, few) == []
    assert "engine: position 1" in failed(Counts(50, (22, 5, 2)), few, few)
    many = Counts(10_000, (3000, 1000, 500))
    assert failed(Counts(10_000, (2790, 1160, 550)), many, many) == ["engine: position 1"], "0.021 with 10,000"
    assert failed(Counts(10_000, (2810, 1160, 530)), many, many) == [], "0.019: two standard errors are 0.009"


def test_our_own_decoder_is_held_to_the_same():
    assert failed(GOOD, decoded=Counts(1000, (340, 100, 50))) == ["in process: position 1"]


def test_a_drafter_that_is_hardly_ever_accepted_says_nothing():
    weak = Counts(1000, (200, 60, 30))
    assert failed(weak, weak, weak) == ["not informative"]


def test_nothing_verified_agrees_with_nothing():
    nothing = Counts(0, (0, 0, 0))
    assert math.isnan(nothing.length)
    assert {"engine: length", "engine: position 1"} <= set(failed(nothing))


def test_drafts_past_the_end_do_not_count():
    # 1 + (2+1) + (0+1) + (3+1) = 9 tokens; the response was cut at 7, two of the last three drafts lie outside.
    assert inside_response([2, 0, 3], 9) == [2, 0, 3]
    assert inside_response([2, 0, 3], 8) == [2, 0, 3], "only the engine's own next token lies outside"
    assert inside_response([2, 0, 3], 7) == [2, 0, 2]
    assert inside_response([2, 0, 3], 5) == [2, 0], "a verification that began past the end"
    assert inside_response([], 1) == [], "the first token comes from the prompt's forward"


def test_counts_that_do_not_reach_the_end_are_refused():
    with pytest.raises(ValueError, match="account for 5 of 7 response tokens"):
        inside_response([2, 0], 7)


@given(st.lists(st.integers(0, 4), max_size=20), st.integers(0, 4))
def test_what_is_counted_inside_makes_up_the_whole_response(accepted, cut):
    whole = 1 + sum(a + 1 for a in accepted)
    tokens = max(1, whole - cut)
    kept = inside_response(accepted, tokens)
    reached = 1 + sum(a + 1 for a in kept)
    assert tokens <= reached <= tokens + 1, "the engine's own token of the last verification may lie outside"
    assert all(k <= a for k, a in zip(kept, accepted, strict=False))


def test_counts_by_position():
    assert counts_of([3, 0, 1, 2], 3) == Counts(4, (3, 2, 1))
    assert counts_of([3, 0, 1, 2], 3).length == 2.5
    assert total([Counts(4, (3, 2, 1)), Counts(1, (0, 0, 0))]) == Counts(5, (3, 2, 1))
