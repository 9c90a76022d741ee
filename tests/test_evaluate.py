"""Evaluation: three counts that must agree, the faults that break their agreement, and what is told to the user."""

import json
import logging
from dataclasses import replace

import pytest
import torch
from tiny import tiny_verifier
from tiny_drafter import LAYERS, ORIGIN, PROMPTS, tiny_drafter, trained_drafter
from transformers import AutoModelForCausalLM

from eagle3 import evaluate as evaluation
from eagle3 import replayed, truth
from eagle3.bootstrap import pooled
from eagle3.decode import DraftCache, Round, Verifier
from eagle3.evaluate import Settings, evaluate
from eagle3.metrics import acceptance_length
from eagle3.questions import ChatQuestions, FixedQuestions, Prompt, refuse_trained
from eagle3.replayed import ReplayDiffers
from eagle3.report import PromptResult, make_report, read_texts, show_report, warn_of
from eagle3.truth import TIE, OutputDiffers, judge
from extract.chat import Chat
from extract.prompts import Conversation
from extract.store import StoredSample, create_or_resume, open_store
from extract.verifier import load_tokenizer, resolve_verifier

SETTINGS = Settings(
    drafts=3, max_new_tokens=24, end_of_turn_ids=frozenset({9999}), bootstrap=200, seed=0, baseline_prompts=1
)


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    torch.set_num_threads(1)
    path = tiny_verifier(tmp_path_factory.mktemp("verifier") / "v")
    options = {"cache_dir": path.parent, "chat_template": None, "trust_remote_code": False}
    return resolve_verifier(str(path), name="tiny", **options)


@pytest.fixture(scope="module")
def model(spec):
    return AutoModelForCausalLM.from_pretrained(spec.path, dtype=torch.float32).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def drafter(model):
    return trained_drafter(model)


def questions(prompts=PROMPTS):
    return FixedQuestions(Prompt(f"p{i}", 0, tuple(ids)) for i, ids in enumerate(prompts))


def result(id, verifications, accepted, *, tokens=10, plain_s=None, turn=0):
    counts = (verifications, tuple(accepted))
    return PromptResult(id, turn, (1, 2), tuple(range(tokens)), *counts, *counts, 0, 1.0, plain_s)


def test_counts_agree_and_are_reported(model, drafter, tmp_path):
    told = []
    report = evaluate(model, drafter, questions(), SETTINGS, advance=lambda n, **fields: told.append((n, fields)))
    summary = report.summary()
    assert summary["accept_len"] == summary["accept_len_replayed"] > 1.5
    assert summary["accept_len_low"] <= summary["accept_len"] <= summary["accept_len_high"]
    assert summary["accept_len"] == 1 + sum(summary["accepted"]) / summary["verifications"]
    assert [n for n, _ in told] == [1] * len(PROMPTS)
    assert told[-1][1] == {"accept_len": f"{summary['accept_len']:.3f}"}
    assert report.plain_tokens_s and report.speculative_tokens_s, "a baseline at the same concurrency is measured"
    json.dumps(summary)
    report.write_texts(tmp_path)
    assert tuple(read_texts(tmp_path)) == report.prompts


def test_an_end_of_turn_ends_the_counts_everywhere(model, drafter):
    whole = evaluate(model, drafter, questions(), SETTINGS)
    ends = frozenset(p.response_ids[i] for p, i in zip(whole.prompts, (0, 3, 6, 11), strict=True))
    report = evaluate(model, drafter, questions(), replace(SETTINGS, end_of_turn_ids=ends))
    assert any(p.verifications == 0 for p in report.prompts), "a response of one token is never verified"
    assert all(p.response_ids[-1] in ends for p in report.prompts)
    assert report.accept_len.value == report.accept_len_replayed


@pytest.mark.parametrize("fault", ["position", "shift", "cache"])
def test_a_fault_in_decoding_is_named_with_prompt_and_row(model, drafter, monkeypatch, fault):
    real = DraftCache.draft

    def faulty(self, aux, tokens, steps):
        if fault == "position":  # every row one place too late
            self.drafter = Late(drafter)
        elif fault == "shift":  # the state of the row before
            aux = aux.roll(1, 0) if len(aux) > 1 else aux
        elif fault == "cache":  # old rows are forgotten
            self._keys[:, : self.rows // 2] = 0
        return real(self, aux, tokens, steps)

    class Late:
        def __init__(self, drafter):
            self._drafter = drafter

        def __getattr__(self, name):
            return getattr(self._drafter, name)

        def rotary(self, x, position):
            return self._drafter.rotary(x, position * 3)

    monkeypatch.setattr(DraftCache, "draft", faulty)
    with pytest.raises(ReplayDiffers, match=r"prompt p\d, row \d+, step \d: decoding drafted token"):
        evaluate(model, drafter, questions(), SETTINGS)


def test_a_fault_in_the_verifiers_cache_is_named(model, drafter, monkeypatch):
    monkeypatch.setattr(Verifier, "drop", lambda self, tokens: None)
    with pytest.raises(OutputDiffers, match=r"prompt p\d: speculative and plain greedy decoding part at response tok"):
        evaluate(model, drafter, questions(), SETTINGS)


def test_a_wrong_count_is_named(model, drafter, monkeypatch):
    monkeypatch.setattr(replayed, "count", lambda *_: (7, [1, 0, 0]))
    with pytest.raises(ReplayDiffers, match=r"prompt p0: decoding counted .* the replay 7 with \[1, 0, 0\]"):
        evaluate(model, drafter, questions(), SETTINGS)


def test_a_batch_that_rounds_otherwise_is_no_fault(model, drafter, monkeypatch):
    """Only the batched run differs: the prompt is decoded again alone, which settles it."""
    real = truth.plain_greedy

    def rounded(model, prompts, **limits):
        responses = real(model, prompts, **limits)
        if len(prompts) > 1:
            responses[2][5] += 1
        return responses

    monkeypatch.setattr(evaluation, "plain_greedy", rounded)
    report = evaluate(model, drafter, questions(), SETTINGS)
    assert report.summary()["batch_ties"] == 1 and report.summary()["output_ties"] == 0


def test_ties_are_told_apart_from_faults():
    logits = torch.full((3, 4), -1.0)
    logits[0, 0], logits[1, 1], logits[1, 2], logits[2, 3] = 2.0, 2.0, 2.0 - TIE, 2.0
    assert judge("p", [0, 1, 3], [0, 1, 3], logits) == 0
    assert judge("p", [0, 2, 3], [0, 1, 0], logits) == 1
    with pytest.raises(OutputDiffers, match=r"prompt p: .* part at response token 1 .* 1 at token 2 lies"):
        judge("p", [0, 2, 1], [0, 1, 0], logits)  # behind the tie a token that is not the verifier's choice
    with pytest.raises(OutputDiffers, match="gave 2 tokens, plain greedy decoding 3"):
        judge("p", [0, 1], [0, 1, 3], logits)
    logits[1, 2] = 1.9
    with pytest.raises(OutputDiffers, match="no float32 tie"):
        judge("p", [0, 2, 3], [0, 1, 0], logits)


def test_a_tie_among_drafts_keeps_the_decoders_choice(model, drafter):
    text = replayed.capture(model, PROMPTS[0], [5, 6, 7, 8, 9], LAYERS)
    plan = text.plan(drafter, 2)
    ours = replayed.Drafts(torch.full((2, 4), 1), torch.full((2, 4), TIE / 2))
    rounds = [Round(len(PROMPTS[0]) - 1, (6, 3), 1)]
    drafts, ties = replayed.agree("p", rounds, text, plan, ours)
    assert ties == 2 and drafts.tokens[:, 0].tolist() == [6, 3] and drafts.tokens[:, 1].tolist() == [1, 1]
    with pytest.raises(ReplayDiffers, match="prompt p, row 3, step 0"):
        replayed.agree("p", rounds, text, plan, replace(ours, lead=torch.full((2, 4), 2 * TIE)))


def test_acceptance_length_counts_the_verifiers_own_token():
    """Four rounds that accept 3, 0, 1 and 2 drafts give 2.5 tokens a round."""
    report = make_report([result("a", 4, (3, 2, 1))], 3, 100, 0)
    assert report.accept_len.value == acceptance_length(4, 6) == 2.5
    assert report.marginal == (0.75, 0.5, 0.25)
    assert report.conditional == pytest.approx((3 / 4, 2 / 3, 1 / 2))


def test_pooled_comes_first_and_the_mean_is_told_apart():
    report = make_report([result("a", 2, (0,)), result("b", 30, (60,))], 1, 100, 0)
    assert report.accept_len.value == pytest.approx(2.875) and report.mean_per_prompt == pytest.approx(2.0)
    names = [name for name, _ in report.rows()]
    assert names.index("acceptance length") < names.index("mean of the prompts' own")
    assert "pooled" in dict(report.rows())["acceptance length"]


def test_the_interval_holds_the_conversations_together():
    spread = torch.tensor([[10, 0], [10, 20]] * 10)
    one = pooled(spread, 2000, 0)
    assert one.low < one.value == 2.0 < one.high and one == pooled(spread, 2000, 0)
    assert pooled(torch.tensor([[10, 10]] * 20), 500, 0).low == 2.0
    assert pooled(torch.zeros(3, 2, dtype=torch.long), 10, 0) is None
    turns = [result("a", 10, (0,)), result("a", 10, (20,), turn=1)]
    assert make_report(turns, 1, 500, 0).accept_len.low == 2.0, "one conversation, nothing to resample"


def test_nothing_verified_is_an_error_not_a_length():
    with pytest.raises(ValueError, match=r"no draft was verified on 1 evaluation prompts.*evaluation\.prompts"):
        make_report([result("a", 0, (0,))], 1, 10, 0)


def test_every_turn_of_a_conversation_counts(spec, model, drafter):
    """The second turn is asked with the verifier's own first answer in its prompt, and both are in the figures."""
    tokenizer = load_tokenizer(spec)
    users = [{"role": "user", "content": text} for text in ("What is the capital of France?", "And of Spain?")]
    asked = [Conversation("two", tuple(users), None), Conversation("one", (users[0],), None)]
    chat = Chat(tokenizer, spec.end_of_turn_ids, spec.vocab_size)
    asker = ChatQuestions(asked, chat, max_prompt=400)
    seen = []
    settings = replace(SETTINGS, end_of_turn_ids=frozenset(spec.end_of_turn_ids))
    report = evaluate(model, drafter, asker, settings, check_prompts=seen.append)
    assert asker.total == 3 and [(p.id, p.turn) for p in report.prompts] == [("two", 0), ("one", 0), ("two", 1)]
    assert report.summary()["verifications"] == sum(p.verifications for p in report.prompts)
    first = tokenizer.decode(report.prompts[0].response_ids, skip_special_tokens=True)
    assert first in tokenizer.decode(report.prompts[2].prompt_ids)
    assert [len(prompts) for prompts in seen] == [2, 1]


def test_a_prompt_without_room_for_an_answer_is_named(spec):
    chat = Chat(load_tokenizer(spec), spec.end_of_turn_ids, spec.vocab_size)
    long = Conversation("long", ({"role": "user", "content": "word " * 100},), None)
    with pytest.raises(ValueError, match=r"evaluation prompt long, turn 0 has .* tokens, more than 50"):
        ChatQuestions([long], chat, max_prompt=50).next_round()


def test_prompts_that_were_trained_on_are_refused(tmp_path):
    manifest = {
        "last": "post_norm",
        "dtype": "float32",
        "codec": "none",
        "capture_layers": [1],
        "hidden_size": 2,
        "must_match": {},
    }
    ids, mask = [1, 5, 6, 7, 8, 9, 3, 4], [0, 0, 0, 1, 1, 0, 0, 1]
    states = torch.zeros(8, 2)
    with create_or_resume(tmp_path, manifest, shard_bytes=1 << 20) as writer:
        writer.add(StoredSample("s0", "c0", 0.0, ids, mask, states, states))
        writer.finish(["s0"])
    store = open_store(tmp_path)
    fresh = [Prompt("n", 0, (1, 5)), Prompt("o", 0, (1, 5, 6, 7)), Prompt("q", 0, (2, 5, 6))]
    refuse_trained(fresh, store)
    for prompt in (Prompt("x", 0, (1, 5, 6)), Prompt("y", 1, tuple(ids[:7]))):
        with pytest.raises(ValueError, match=rf"1 of 4 evaluation prompts .*{prompt.name} \(sample s0\).*evaluation\."):
            refuse_trained([*fresh, prompt], store)


def own_origin(spec):
    hashes = (spec.sha256, spec.tokenizer_sha256, spec.chat_template_sha256)
    names = ("verifier_sha256", "tokenizer_sha256", "chat_template_sha256")
    return replace(ORIGIN, max_len=4096, **dict(zip(names, hashes, strict=True)))


def test_another_chat_template_is_told_with_both_names(spec, caplog):
    good, origin = make_report([result("a", 4, (3, 2, 1))], 3, 10, 0), own_origin(spec)
    assert warn_of(good, origin, spec) == warn_of(good, None, spec) == []
    other = replace(origin, chat_template_sha256="d" * 64, verifier="zephyr")
    with caplog.at_level(logging.WARNING):
        [warning] = warn_of(good, other, spec)
    assert warning in caplog.text and "chat template" in warning
    assert "dddddddddddd of zephyr" in warning and f"{spec.chat_template_sha256[:12]} of tiny" in warning


def test_a_drafter_that_is_never_right_is_loud(spec, caplog):
    with caplog.at_level(logging.WARNING):
        [warning] = warn_of(make_report([result("a", 100, (4, 0, 0))], 3, 10, 0), own_origin(spec), spec)
    assert "ACCEPTANCE LENGTH 1.040" in warning and warning in caplog.text
    for cause in ("capture layers", "draft vocabulary", "generated by this very model", "chat template", "RoPE"):
        assert cause in warning


def test_an_untrained_drafter_gives_the_right_text_and_the_warning(spec, model):
    report = evaluate(model, tiny_drafter(model), questions(), SETTINGS)
    assert report.accept_len.value < 1.05 and warn_of(report, None, spec)[0].startswith("ACCEPTANCE LENGTH")


def test_slower_than_no_speculation_is_said_plainly(spec):
    report = make_report([result("a", 4, (3, 2, 1), plain_s=0.5)], 3, 10, 0)
    assert report.speed_up == 0.5
    assert any("x0.50 (slower than no speculation)" in value for _, value in report.rows())
    assert any("slower than plain decoding here: x0.50" in w for w in warn_of(report, own_origin(spec), spec))


def test_texts_longer_than_those_trained_on_are_told(spec):
    report = make_report([result("a", 4, (3, 2, 1), tokens=70)], 3, 10, 0)
    [warning] = warn_of(report, replace(own_origin(spec), max_len=64), spec)
    assert "up to 72 tokens" in warning and "rows of 64" in warning


def test_models_that_do_not_fit_are_refused(model, drafter):
    with pytest.raises(ValueError, match=r"needs float32; the verifier is torch\.float32, the drafter torch\.bfloat16"):
        evaluate(model, tiny_drafter(model).to(torch.bfloat16), questions(), SETTINGS)
    shape = replace(drafter.shape, vocab_size=321)
    other = tiny_drafter(model)
    other.shape = shape
    with pytest.raises(ValueError, match=r"made for a verifier with vocabulary and hidden size \(321, 48\)"):
        evaluate(model, other, questions(), SETTINGS)


def test_the_closing_table_is_made_of_summary_json(capsys):
    report = make_report([result("a", 4, (3, 2, 1), plain_s=0.5)], 3, 10, 0)
    stored = json.loads(json.dumps({"drafter_dir": "d", "table": report.rows(), "warnings": ["mind the gap"]}))
    show_report(stored, reused=True, next_command="python -m benchmarks.demo_check")
    shown = capsys.readouterr().out
    for words in (
        "Evaluated (reused)",
        "acceptance length",
        "2.500",
        "mind the gap",
        "python -m benchmarks.demo_check",
    ):
        assert words in shown
