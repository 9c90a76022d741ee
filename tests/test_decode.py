"""Speculative decoding: the text of plain greedy decoding, counts inside the response, hooks and caches left clean."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_verifier
from tiny_drafter import LAYERS, PROMPTS, tiny_drafter, trained_drafter

from eagle3 import replayed
from eagle3.decode import Verifier, _accept, decode
from eagle3.truth import plain_greedy
from extract.verifier import decoder_layers

TOKENS = 24


@pytest.fixture(scope="module")
def drafter(model):
    return trained_drafter(model, tokens=TOKENS)


def run(model, drafter, prompt, *, drafts=3, max_new_tokens=TOKENS, end=()):
    with Verifier(model, drafter.shape.capture_layers) as verifier:
        return decode(verifier, drafter, prompt, drafts=drafts, max_new_tokens=max_new_tokens, end_of_turn_ids=end)


@pytest.mark.parametrize("drafts", [1, 3, 6])
def test_text_is_that_of_plain_greedy_decoding(model, drafter, drafts):
    plain = plain_greedy(model, PROMPTS, max_new_tokens=TOKENS, end_of_turn_ids=())
    decoded = [run(model, drafter, prompt, drafts=drafts) for prompt in PROMPTS]
    assert [list(d.response_ids) for d in decoded] == plain
    accepted = [r.accepted for d in decoded for r in d.rounds]
    assert min(accepted) == 0 and max(accepted) >= min(drafts, 3), "the drafter must be right here and wrong there"


@pytest.mark.parametrize("flags", [{}, {"fc_norm": True}, {"norm_output": True}])
def test_every_draft_is_what_training_computes(model, flags):
    drafter = trained_drafter(model, tokens=TOKENS, **flags)
    for prompt in PROMPTS:
        decoded = run(model, drafter, prompt, drafts=4)
        text = replayed.capture(model, prompt, decoded.response_ids, LAYERS)
        plan = text.plan(drafter, 4)
        drafts = replayed.drafts_of(drafter, text, plan)
        for r in decoded.rounds:
            column = r.row - (len(prompt) - 1)
            same = [int(drafts.tokens[k, column]) for k in range(min(r.accepted + 1, len(r.drafts)))]
            assert list(r.drafts[: r.accepted + 1]) == same
        counted = (len(decoded.rounds), decoded.accepted_by_position(4))
        assert replayed.count(text, plan, drafts.tokens) == counted


def test_nothing_counts_behind_the_end_of_turn(model, drafter):
    plain = plain_greedy(model, PROMPTS, max_new_tokens=TOKENS, end_of_turn_ids=())
    for prompt, whole in zip(PROMPTS, plain, strict=True):
        for end in {whole[0], whole[5], whole[12]}:
            response = whole[: whole.index(end) + 1]
            decoded = run(model, drafter, prompt, end=(end,))
            assert list(decoded.response_ids) == response
            # One token from the prompt's forward, then each round gives its accepted drafts and one more, except
            # that the last round gives no more when the end of turn was itself an accepted draft.
            emitted = 1 + sum(r.accepted + 1 for r in decoded.rounds)
            assert len(response) in (emitted, emitted - 1)


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 7])
def test_nothing_counts_beyond_max_new_tokens(model, drafter, limit):
    plain = plain_greedy(model, PROMPTS, max_new_tokens=limit, end_of_turn_ids=())
    for prompt, response in zip(PROMPTS, plain, strict=True):
        decoded = run(model, drafter, prompt, drafts=6, max_new_tokens=limit)
        assert list(decoded.response_ids) == response
        assert sum(r.accepted for r in decoded.rounds) <= limit - 1
        assert all(len(r.drafts) <= limit - 1 for r in decoded.rounds)


def test_padding_does_not_change_plain_greedy_decoding(model):
    together = plain_greedy(model, PROMPTS, max_new_tokens=TOKENS, end_of_turn_ids=())
    alone = [plain_greedy(model, [p], max_new_tokens=TOKENS, end_of_turn_ids=())[0] for p in PROMPTS]
    limits = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": None}
    generated = [
        model.generate(torch.tensor([p]), attention_mask=torch.ones(1, len(p)), **limits)[0, len(p) :].tolist()
        for p in PROMPTS
    ]
    assert together == alone == generated


def test_hooks_are_removed_even_after_an_error(model, drafter):
    with pytest.raises(IndexError), Verifier(model, LAYERS) as verifier:
        verifier.forward([10_000])
    assert not any(layer._forward_pre_hooks for layer in decoder_layers(model))


@pytest.mark.parametrize("layers", [(1, 2, 7), (0, 2, 4)])
def test_layers_that_the_verifier_lacks_are_refused(model, layers):
    drafter = tiny_drafter(model, capture_layers=layers)
    with pytest.raises(ValueError, match="cannot be captured; is verifier"):
        run(model, drafter, PROMPTS[0])


def test_a_nested_verifier_decodes_alike(tmp_path):
    from transformers import AutoModelForImageTextToText

    path = tiny_verifier(tmp_path / "v", nested=True, family="qwen3", head_dim=16)
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval().requires_grad_(False)
    drafter = tiny_drafter(model)
    plain = plain_greedy(model, PROMPTS, max_new_tokens=8, end_of_turn_ids=())
    assert [list(run(model, drafter, p, max_new_tokens=8).response_ids) for p in PROMPTS] == plain


@given(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.data())
def test_accept_keeps_the_longest_right_prefix_and_one_more(drafts, data):
    chosen = data.draw(st.lists(st.integers(0, 3), min_size=len(drafts) + 1, max_size=len(drafts) + 1))
    end = data.draw(st.sets(st.integers(0, 3), max_size=2))
    new, accepted = _accept(drafts, chosen, end)
    assert new == chosen[: len(new)]
    assert drafts[:accepted] == chosen[:accepted] and accepted <= len(new) <= accepted + 1
    assert not any(token in end for token in new[:-1])
    if len(new) == accepted:
        assert new[-1] in end
    elif accepted < len(drafts):
        assert drafts[accepted] != chosen[accepted]
