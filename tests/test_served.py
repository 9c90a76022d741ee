"""Evaluation in an engine: three counts of one text, and the gate that finds what an engine does wrong."""

import json
import math
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from played_engine import PlayedEngine, played
from tiny import tiny_verifier
from tiny_drafter import PROMPTS, trained_drafter
from transformers import AutoModelForCausalLM

from eagle3 import replayed, served
from eagle3.evaluate import Settings
from eagle3.gate import Counts
from eagle3.questions import FixedQuestions, Prompt
from eagle3.replayed import ReplayDiffers
from eagle3.report import read_texts
from eagle3.served_report import GateFailed, make_served_report
from eagle3.suspects import Suspect, altered, suspects
from eagle3.truth import Parting, parting, second_look, shortfall_ulps

SETTINGS = Settings(drafts=3, max_new_tokens=24, end_of_turn_ids=frozenset({9999}), bootstrap=100, seed=0)


@pytest.fixture(scope="module")
def drafter(model):
    return trained_drafter(model)


@contextmanager
def silent(title, total):
    yield lambda n, **fields: None


def ask(start, prompts=PROMPTS, settings=SETTINGS):
    questions = FixedQuestions(Prompt(f"p{i}", 0, tuple(ids)) for i, ids in enumerate(prompts))
    return served.answer(start, questions, settings, lambda prompts: None, silent)


def judge(model, engine_drafter, drafter, settings=SETTINGS):
    answers = ask(played(model, engine_drafter, settings.drafts), settings=settings)
    judged = served.judge(model, drafter, answers.prompts, settings)

    def capture(text, layers):
        return replayed.capture(model, *text, layers)

    texts = [(j.result.prompt_ids, j.result.response_ids) for j in judged]
    layers = model.config.get_text_config().num_hidden_layers
    return make_served_report(
        f"played {answers.version}", judged, answers.raw,
        find_suspects=lambda: suspects(drafter, texts, capture, settings.drafts, layers),
        drafts=settings.drafts, resamples=settings.bootstrap, seed=settings.seed,
    )  # fmt: skip


def test_three_counts_of_one_text_agree(model, drafter, tmp_path):
    report = judge(model, drafter, drafter)
    report.verdict()
    engine, decoded, replay = report.counts.values()
    assert engine == decoded == replay
    assert engine.length > 1.5, "otherwise the counts would agree by themselves"
    assert report.suspects == ()
    summary = report.summary()
    assert summary["accept_len"] == summary["accept_len_decoded"] == summary["accept_len_replayed"] == engine.length
    assert summary["text_equal"] == len(PROMPTS) and summary["speed_up"] == 2.0
    json.dumps(summary)
    report.write_texts(tmp_path)
    assert read_texts(tmp_path)[0].accepted == report.judged[0].engine.accepted


def test_drafts_past_the_end_are_in_the_raw_count_alone(model, drafter):
    report = judge(model, drafter, drafter, replace(SETTINGS, max_new_tokens=19))
    report.verdict()
    assert sum(report.raw.accepted) > sum(next(iter(report.counts.values())).accepted)
    assert report.summary()["accept_len_raw"] > report.summary()["accept_len"]


def test_an_end_of_turn_ends_all_counts(model, drafter):
    whole = judge(model, drafter, drafter)
    ends = frozenset(j.result.response_ids[i] for j, i in zip(whole.judged, (0, 3, 6, 11), strict=True))
    report = judge(model, drafter, drafter, replace(SETTINGS, end_of_turn_ids=ends))
    engine, decoded, replay = report.counts.values()
    assert engine == decoded == replay
    assert any(j.engine.verifications == 0 for j in report.judged), "a response of one token is never verified"


def faulty(drafter, fault):
    """The drafter as an engine with this fault would run it."""
    shape = drafter.shape
    if fault == "ids off by one":
        return altered(drafter, {}, replace(shape, capture_layers=tuple(k + 1 for k in shape.capture_layers)))
    if fault == "hidden_norm dropped":
        return altered(drafter, {"midlayer.hidden_norm.weight": torch.ones(shape.hidden_size)})
    if fault == "RoPE base wrong":
        return altered(drafter, {}, replace(shape, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}))
    if fault == "d2t absolute":
        ids = torch.arange(shape.draft_vocab_size)
        return altered(drafter, {"d2t": (drafter.d2t + ids).clamp(max=shape.vocab_size - 1 - ids)})
    if fault == "post-norm fed":
        return altered(drafter, {}, replace(shape, norm_output=True))
    assert fault == "embeddings swapped"
    other = altered(drafter, {})
    other.embedding = drafter.embedding.flip(0)
    return other


FAULTS = {
    "ids off by one": "layer ids: one layer too late",
    "hidden_norm dropped": "norms: midlayer.hidden_norm not read",
    "RoPE base wrong": "RoPE: base 10,000 and no scaling",
    "d2t absolute": "vocabulary map: ids taken for offsets",
    "post-norm fed": "norms: next step fed post-norm for pre-norm",
}


@pytest.fixture(scope="module")
def sensitive(model):
    """A drafter whose every part matters: its norms are no ones, its RoPE is far from the usual base."""
    shape = {"rope_parameters": {"rope_type": "default", "rope_theta": 30.0}}
    return trained_drafter(model, steps=40, tokens=24, norm_scale=3.0, **shape)


@pytest.mark.parametrize("fault", [*FAULTS, "embeddings swapped"])
def test_the_gate_bites_and_names_the_cause(model, sensitive, fault):
    report = judge(model, faulty(sensitive, fault), sensitive)
    with pytest.raises(GateFailed, match=r"engine: (length|position)") as error:
        report.verdict()
    if fault in FAULTS:
        assert FAULTS[fault] in str(error.value).split("nearest to the engine's counts: ")[1]


def test_a_gap_that_no_fault_explains_is_blamed_on_none(model, drafter):
    class Boasting(PlayedEngine):
        def complete(self, ids, **limits):
            answer = super().complete(ids, **limits)
            if self.drafter is not None:
                whole = tuple(min(a + 1, 3) for a in answer.accepted)
                self.seen[len(self.seen) - len(whole) :] = whole
                answer = replace(answer, accepted=whole)
            return answer

    @contextmanager
    def start(with_drafter):
        yield Boasting(model, drafter if with_drafter else None, 3)

    answers = ask(start)
    judged = served.judge(model, drafter, answers.prompts, SETTINGS)
    as_it_is = Suspect("a fault that changes nothing", "nowhere", Counts(35, (28, 18, 15)))
    report = make_served_report(
        "e", judged, answers.raw, drafts=3, resamples=9, seed=0, find_suspects=lambda: [as_it_is]
    )
    with pytest.raises(GateFailed, match="none of the faults that were tried comes nearer"):
        report.verdict()


def test_a_text_that_is_not_plain_greedy_fails(model, drafter):
    class Sampling(PlayedEngine):
        def complete(self, ids, **limits):
            answer = super().complete(ids, **limits)
            return replace(answer, ids=(*answer.ids[:5], 7, *answer.ids[6:])) if self.drafter is None else answer

    @contextmanager
    def start(with_drafter):
        yield Sampling(model, drafter if with_drafter else None, 3)

    judged = served.judge(model, drafter, ask(start).prompts, SETTINGS)
    assert all(j.parting.at == 5 and not j.parting.tie for j in judged)
    report = make_served_report("e", judged, judged[0].engine, drafts=3, resamples=9, seed=0, find_suspects=list)
    with pytest.raises(GateFailed, match=r"text: as without the drafter: p0: token 5, \d+ against 7"):
        report.verdict()


def test_another_verifier_in_the_engine_is_found(model, drafter, tmp_path):
    path = tiny_verifier(tmp_path / "other", seed=1)
    other = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    judged = served.judge(model, drafter, ask(played(other, drafter, 3)).prompts, SETTINGS)
    report = make_served_report("e", judged, judged[0].engine, drafts=3, resamples=9, seed=0, find_suspects=list)
    assert "text: the verifier's own" in [check.name for check in report.failed]


def test_somebody_else_on_the_server_is_found(model, drafter):
    class Shared(PlayedEngine):
        def counters(self):
            counted = super().counters()
            return replace(counted, drafts=counted.drafts + len(self.seen) // 2)

    @contextmanager
    def start(with_drafter):
        yield Shared(model, drafter if with_drafter else None, 3)

    with pytest.raises(ValueError, match="somebody else is using this server"):
        ask(start)


def test_a_fault_of_this_program_is_not_blamed_on_the_engine(model, drafter, monkeypatch):
    answers = ask(played(model, drafter, 3))
    monkeypatch.setattr(replayed, "count", lambda *_: (7, [1, 0, 0]))
    with pytest.raises(ReplayDiffers):
        served.judge(model, drafter, answers.prompts, SETTINGS)


def test_a_tie_is_measured_in_bf16_steps_of_the_best_logit():
    logits = torch.tensor([[20.0, 19.8, 19.6, 1.0], [-3.0, -3.1, -9.0, -9.0]])
    assert shortfall_ulps(logits, [0, 0]).tolist() == [0.0, 0.0]
    # Between 16 and 32 a bf16 step is 1/8, between 2 and 4 it is 1/64.
    assert shortfall_ulps(logits, [1, 1]).tolist() == pytest.approx([1.6, 6.4], abs=1e-4)
    assert parting([0, 0], [1, 0], logits).tie
    assert not parting([0, 0], [2, 0], logits).tie
    assert not parting([0, 0], [0, 1], logits).tie, "what would be a tie at 20 is none at -3"
    assert parting([0, 0], [0, 0], logits) is None


def test_what_bf16_rounds_together_is_a_tie_in_the_engines_precision(model):
    prompt, response = PROMPTS[1], (5, 9, 31)
    served = AutoModelForCausalLM.from_pretrained(model.name_or_path, dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        logits = served(torch.tensor([[*prompt, *response[:2]]])).logits[0, -1].float()
    best, second = logits.topk(2).indices.tolist()
    parted = Parting(2, (best, second), ulps=50.0)
    looked = second_look(parted, served, prompt, response)
    assert looked.ulps == pytest.approx(float(shortfall_ulps(logits[None], [second])), abs=1.0), "by one row or by many"
    assert second_look(Parting(2, (best, second), ulps=0.5), served, prompt, response).ulps <= 0.5
    assert second_look(Parting(3, (7, None), math.inf), served, prompt, response).ulps == math.inf
    far = Parting(2, (best, int(logits.argmin())), ulps=90.0)
    assert not second_look(far, served, prompt, response).tie, "no precision makes a tie of these"


def test_a_text_that_ends_early_is_no_tie():
    ended = parting([0, 0], [0], torch.zeros(2, 4))
    assert ended.at == 1 and ended.tokens == (0, None) and math.isinf(ended.ulps) and not ended.tie


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"max_new_tokens": 20}, "answered with 24 tokens, beyond evaluation.max_new_tokens=20"),
        ({"end_of_turn_ids": None}, "answered with 24 tokens, beyond the end of turn, 5"),
    ],
)
def test_an_engine_that_says_more_than_it_was_asked_in_both_its_lives_is_refused(model, drafter, settings, told):
    class Talkative(PlayedEngine):
        def complete(self, ids, *, max_new_tokens, stop_ids):
            return super().complete(ids, max_new_tokens=SETTINGS.max_new_tokens, stop_ids=SETTINGS.end_of_turn_ids)

    @contextmanager
    def start(with_drafter):
        yield Talkative(model, drafter if with_drafter else None, SETTINGS.drafts)

    if "end_of_turn_ids" in settings:
        first = Talkative(model, None, 3).complete(PROMPTS[0], max_new_tokens=24, stop_ids=()).ids
        assert first[4] not in first[:4]
        settings = {"end_of_turn_ids": frozenset({first[4]})}
    with pytest.raises(ValueError, match=f"prompt p0: the engine {told}"):
        ask(start, settings=replace(SETTINGS, **settings))


def test_an_answer_that_ends_where_it_should_is_taken(model, drafter):
    [first, *_] = ask(played(model, drafter, 3)).prompts
    end = first.plain.ids[6]
    settings = replace(SETTINGS, end_of_turn_ids=frozenset({end}))
    [again, *_] = ask(played(model, drafter, 3), settings=settings).prompts
    assert again.plain.ids == again.speculative.ids == first.plain.ids[: first.plain.ids.index(end) + 1]


def test_a_clock_that_stands_still_is_no_speed(model, drafter):
    report = judge(model, drafter, drafter)
    still = tuple(replace(j, result=replace(j.result, plain_s=0.0, speculative_s=0.0)) for j in report.judged)
    again = make_served_report(
        "played", still, report.raw, find_suspects=tuple, drafts=3, resamples=10, seed=0,
    )  # fmt: skip
    assert dict(again.rows())["tokens/s, one at a time"] == "alone not timed, with drafter not timed"
