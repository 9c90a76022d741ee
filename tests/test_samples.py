"""Turns to samples: merging, cutting, masks, and the stop when nothing is supervised."""

import logging

import pytest
from chat_templates import CHATML, chat_tokenizer

from extract.chat import Sample, Turn, build_samples, mask_preview, require_supervision
from extract.prompts import Skipped


def test_an_answer_of_one_token_at_the_start():
    """C46: a supervised span that starts and ends at token 0 does not run into later user tokens."""
    samples, _ = build_samples("c", [Turn([], [9], "stop", 0.0), Turn([9, 5, 6], [7], "stop", 0.0)], max_len=99)
    assert [(s.input_ids, s.loss_mask) for s in samples] == [([9, 5, 6, 7], [1, 0, 0, 1])]


@pytest.mark.parametrize("max_len", range(6, 12))
def test_a_cut_answer_keeps_the_mask_of_its_kept_part(max_len):
    """C47."""
    turn = Turn([1, 2, 3, 4, 5], [6, 7, 8, 9, 2], "stop", 0.0)
    samples, skipped = build_samples("c", [turn], max_len=max_len)
    kept = min(max_len, 10)
    assert samples[0].input_ids == [1, 2, 3, 4, 5, 6, 7, 8, 9, 2][:kept]
    assert samples[0].loss_mask == [0] * 5 + [1] * (kept - 5)
    assert skipped == []


def test_a_sample_without_supervised_token_is_skipped_and_counted():
    """C48."""
    turns = [Turn(list(range(500)), [1] * 5, "stop", 0.0)]
    samples, skipped = build_samples("long", turns, max_len=256)
    assert samples == []
    assert skipped == [Skipped("long#0", "no assistant token among the first 256 tokens (the prompt has 500)")]
    assert build_samples("long", turns, max_len=501)[0][0].loss_mask == [0] * 500 + [1]


def test_an_abort_when_nearly_no_sample_is_supervised(caplog):
    """C45, C50."""
    skipped = [Skipped(f"s{i}", "template ends with none of the end-of-turn ids") for i in range(100)]
    with pytest.raises(ValueError, match=r"only 0 of 100 samples.*s0: template ends"):
        require_supervision(0, skipped)
    with pytest.raises(ValueError, match="only 4 of 104"):
        require_supervision(4, skipped)
    with pytest.raises(ValueError, match="only 0 of 0"):
        require_supervision(0, [])
    with caplog.at_level(logging.INFO):
        require_supervision(100, skipped)
    assert "100 with supervised tokens, 100 skipped" in caplog.text


@pytest.mark.parametrize(
    ("turns", "mask"),
    [
        ([([5, 6], [7])], [0, 0, 1]),
        ([([5, 6], [7, 8])], [0, 0, 1, 1]),
        ([([], [7])], [1]),
        ([([], [7, 8]), ([7, 8, 5], [6])], [1, 1, 0, 1]),
        ([([5], [7]), ([5, 7, 6], [8, 9])], [0, 1, 0, 1, 1]),
    ],
)
def test_the_mask_stands_exactly_on_the_answers_tokens(turns, mask):
    """C59: no shift by one, at the start, in the middle and at the end."""
    samples, _ = build_samples("c", [Turn(p, r, "stop", 0.0) for p, r in turns], max_len=99)
    assert [s.loss_mask for s in samples] == [mask]


def test_generated_turns_with_a_changed_history_start_a_new_sample():
    """Turns join while their ids continue each other; one sampled turn makes the sample not greedy."""
    turns = [Turn([1], [2], "stop", 0.0), Turn([1, 2, 3], [4], "stop", 1.0), Turn([1, 3], [5], "length", 0.0)]
    samples, skipped = build_samples("c", turns, max_len=99)
    assert [(s.id, s.input_ids, s.loss_mask, s.temperature, s.turns) for s in samples] == [
        ("c#0", [1, 2, 3, 4], [0, 1, 0, 1], 1.0, 2),
        ("c#2", [1, 3, 5], [0, 0, 1], 0.0, 1),
    ]
    assert skipped == [] and build_samples("c", [], max_len=9) == ([], [])


def test_mask_preview_shows_all_text_with_the_answer_in_green():
    tokenizer = chat_tokenizer(CHATML)
    ids = [tokenizer(text)["input_ids"] for text in ("hello", " weather 🙂\n", "bye", "x")]
    mask = [bit for bit, piece in zip([0, 1, 0, 1], ids, strict=True) for _ in piece]
    sample = Sample("c#0", "c", [i for piece in ids for i in piece], mask, 0.0, 2)
    preview = mask_preview(sample, tokenizer)
    assert preview.plain == "hello weather 🙂\nbyex"
    green = [preview.plain[s.start : s.end] for s in preview.spans if "green" in str(s.style)]
    assert green == [" weather 🙂\n", "x"]
    short = mask_preview(sample, tokenizer, max_tokens=10)
    assert f"and {len(sample.input_ids) - 10} more tokens" in short.plain
