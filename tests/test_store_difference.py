"""`extract.compare`: what two stores of one text are said to differ by is what they differ by."""

from dataclasses import replace

import pytest
import torch
from packed import HIDDEN, make_store, sample

from extract.compare import compare, main

SAMPLES = [sample(number, length) for number, length in enumerate((5, 9, 4), start=1)]


def test_a_store_does_not_differ_from_itself(tmp_path):
    store = make_store(tmp_path / "a", SAMPLES)
    found = compare(store, store)
    assert (found.samples, found.tokens, found.only_here, found.top1_agreement) == (3, 18, 0, 1.0)
    assert [d.state for d in found.differences] == ["layer 1", "layer 2", "layer 3", "last"]
    assert all(d.median == d.p99 == d.max == 0 for d in found.differences)


def test_each_state_is_compared_with_its_own_token_of_the_reference(tmp_path):
    """One column of one layer of one token is off by a tenth of the token's length, in the last sample."""
    off = SAMPLES[2].aux.clone()
    off[3, HIDDEN] *= 1 + 0.1 * HIDDEN**0.5
    reference = make_store(tmp_path / "reference", [SAMPLES[2], SAMPLES[0], SAMPLES[1]])
    found = compare(make_store(tmp_path / "a", [*SAMPLES[:2], replace(SAMPLES[2], aux=off)]), reference)
    by_state = {d.state: d for d in found.differences}
    assert by_state["layer 2"].max == pytest.approx(0.1, rel=1e-5)
    assert by_state["layer 2"].median == by_state["layer 1"].max == by_state["layer 3"].max == 0


def test_another_next_token_is_counted(tmp_path):
    """`last` turned around gives another top-1 wherever the head is not symmetric: everywhere here."""
    turned = [replace(one, last=-one.last) for one in SAMPLES]
    found = compare(make_store(tmp_path / "a", turned), make_store(tmp_path / "b", SAMPLES))
    assert found.top1_agreement == 0 and found.differences[3].median == pytest.approx(2)


def test_samples_of_other_text_are_left_out_and_told(tmp_path, capsys):
    other = replace(SAMPLES[0], input_ids=[3] * len(SAMPLES[0].input_ids))
    make_store(tmp_path / "a", [other, *SAMPLES[1:]])
    make_store(tmp_path / "b", SAMPLES[:2])
    assert main([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "2 samples are not in both" in capsys.readouterr().out


def test_stores_that_cannot_be_compared_are_refused(tmp_path, caplog):
    make_store(tmp_path / "a", SAMPLES[:1])
    make_store(tmp_path / "b", SAMPLES[1:])
    assert main([str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert "share no sample" in caplog.text
    make_store(tmp_path / "c", SAMPLES[:1], teacher=False)
    assert main([str(tmp_path / "a"), str(tmp_path / "c")]) == 1
    assert "teacher pass has not finished" in caplog.text


def test_states_of_other_layers_are_refused(tmp_path):
    stores = [make_store(tmp_path / name, SAMPLES) for name in "ab"]
    stores[1].manifest["capture_layers"] = [1, 2, 4]
    with pytest.raises(ValueError, match=r"capture_layers is \[1, 2, 3\] .* not of the same kind"):
        compare(*stores)


def test_rows_of_zeros_do_not_hide_a_difference(tmp_path):
    zero = replace(SAMPLES[0], aux=torch.zeros_like(SAMPLES[0].aux))
    found = compare(make_store(tmp_path / "a", SAMPLES[:1]), make_store(tmp_path / "b", [zero]))
    assert found.differences[0].max == float("inf")
    both = compare(*[make_store(tmp_path / name, [zero]) for name in "cd"])
    assert both.differences[0].max == 0
