"""The parts of a benchmark: how figures come from answers, what counts, and how each engine is started and asked."""

import json
from pathlib import Path

import pytest
from composed import changed, composed, config
from hypothesis import given
from hypothesis import strategies as st

from eagle3.config import ConfigError, typed
from eagle3.serving.benchmark import Benchmark, read_load, read_prefill, read_single, rounds_of
from eagle3.serving.dialects import Heard, Sglang, Vllm
from eagle3.serving.figures import Repeated, Rows, Spread, declared
from eagle3.serving.lines import sglang_line
from eagle3.serving.load import Answer, Round
from eagle3.serving.prompts import Prompts
from extract.config import Speculation, on_hardware
from extract.launcher import ServerError
from tests.test_vllm_server import SPEC

WANTED = config(
    "serving.concurrencies=[1,2]", "serving.warmup=1", "serving.repeats=2", "serving.single_requests=1",
    "serving.prefill_requests=1", "serving.prefill_tokens=10", "serving.requests_per_client=1", "serving.new_tokens=5",
    script="serve",
).serving  # fmt: skip


def answer(tokens=5, first_tokens=1, first_s=1.0, last_s=3.0, **heard):
    return Answer(Heard(tokens, **heard), first_tokens, first_s, last_s)


def test_decoding_starts_at_the_first_piece_whatever_is_in_it():
    done = Round((answer(), answer(tokens=6, first_tokens=3, first_s=2.0, last_s=4.0)), (), 9.0)
    told = read_single(done)
    assert told["decode_tok_s"] == pytest.approx((4 + 3) / (2 + 2)) and told["ttft_ms"] == 1500
    with pytest.raises(ServerError, match="does not stream"):
        read_single(Round((answer(first_tokens=5, last_s=1.0),), (), 9.0))


def test_lost_requests_cost_the_time_that_they_took():
    done = Round((answer(), answer()), ("lost",), 20.0)
    assert read_load(done) == {"tok_s": 10 / 20, "latency_s": 3.0}
    assert read_prefill(done, 30) == {"prefill_tok_s": 60 / 6.0}


class Kept:
    """Stands in for a run log."""

    def __init__(self):
        self.rows, self.expected = [], {}

    def expect(self, split, count):
        self.expected[split] = count

    def emit(self, split, step, values):
        self.rows.append((split, step, values))


class Played:
    """Stands in for the connections to a server: every request fails whose number is in `lost`."""

    def __init__(self, lost=(), **heard):
        self.lost, self.heard, self.asked, self.rounds = set(lost), heard, [], []

    def round(self, prompts, *, at_once, new_tokens, stream):
        numbers = range(len(self.asked), len(self.asked) + len(prompts))
        self.asked += prompts
        self.rounds.append((len(prompts), at_once, new_tokens, stream))
        kept = [
            answer(tokens=new_tokens, last_s=2.0 + number, **self.heard)
            for number in numbers
            if number not in self.lost
        ]
        return Round(tuple(kept), tuple(f"request {n}" for n in numbers if n in self.lost), 10.0)


def measured(load, *, drafts=False, kept=None):
    steps, kept = [], kept or Kept()
    rows = Rows(kept, repeats=WANTED.repeats, concurrencies=len(WANTED.concurrencies))
    bench = Benchmark(load, Prompts([(1, 2), (3,), (4, 5, 6)]), WANTED, rows, drafts=drafts, advance=steps.append)
    found = bench.measure(7.0)
    assert len(steps) == rounds_of(WANTED)
    return found


def test_each_phase_warms_up_and_repeats_and_only_the_repeats_are_figures():
    load = Played()
    found = measured(load)
    assert (
        load.rounds == [(1, 1, 5, True)] * 3 + [(1, 1, 1, False)] * 3 + [(1, 1, 5, False)] * 3 + [(2, 2, 5, False)] * 3
    )
    # Request 0 was the warm-up: 1 + 4 tokens, four of them in 1 + n seconds.
    assert [row["decode_tok_s"] for row in found.single.rows] == [4 / 2, 4 / 3]
    assert found.single.requests == 3 and found.result()["requests"] == 15 and found.result()["failed"] == 0
    assert found.result()["start_s"] == 7.0 and found.accept_len is None


def test_every_failure_is_counted_in_warm_up_and_repeats():
    found = measured(Played(lost={9, 11, 14}))
    assert [kind.failed for kind in found.kinds] == [0, 0, 0, 3] and found.reasons == ["request 9"]
    assert [row["tok_s"] for row in found.load[2].rows] == [0.5, 0.5]


def test_a_phase_without_any_answer_is_no_figure():
    with pytest.raises(ServerError, match="prefill: none of 1 requests was answered; the first: request 4"):
        measured(Played(lost={4}))


def test_acceptance_is_pooled_over_all_that_counts_and_must_be_told():
    assert measured(Played(verifications=4, accepted=3), drafts=True).accept_len == 1.75
    with pytest.raises(ServerError, match="it does not draft"):
        measured(Played(), drafts=True)


@given(st.lists(st.floats(0.1, 1e4), min_size=1, max_size=7))
def test_a_spread_holds_its_median_and_all_values(values):
    spread = Spread.of(values)
    assert spread.low <= spread.median <= spread.high
    assert all(spread.low <= value <= spread.high for value in values) and str(spread)


@pytest.mark.parametrize("drafts", [False, True])
def test_every_row_is_as_declared_and_counted(drafts):
    kept = Kept()
    found = measured(Played(verifications=1, accepted=1), drafts=drafts, kept=kept)
    expected = declared(drafts)
    for split, _, values in kept.rows:
        assert set(values) == expected[split].names, split
    assert {split: sum(row[0] == split for row in kept.rows) for split in expected} == kept.expected
    assert kept.rows[-1] == ("result", 1, found.result())


def test_the_spread_of_a_concurrency_is_over_its_repeats():
    kept = Kept()
    at = Repeated(({"tok_s": 4.0, "latency_s": 1.0}, {"tok_s": 8.0, "latency_s": 3.0}), 6, 1, "why")
    Rows(kept, repeats=2, concurrencies=1).load(64, at)
    told = {"tok_s": 6.0, "tok_s_low": 4.0, "tok_s_high": 8.0, "latency_s": 2.0, "requests": 6, "failed": 1}
    assert kept.rows == [("load", 64, told)]


def test_what_was_measured_before_a_phase_failed_is_in_the_ledger():
    kept = Kept()
    with pytest.raises(ServerError, match="load at 2"):
        measured(Played(lost=range(9, 99)), kept=kept)
    assert [split for split, *_ in kept.rows] == ["single"] * 2 + ["prefill"] * 2 + ["load"]


def test_sglang_counts_from_the_beginning_and_vllm_what_is_new():
    meta = {"completion_tokens": 3, "spec_verify_ct": 2, "spec_num_correct_drafts": 1}
    assert Sglang().heard({"meta_info": meta}, Heard(2)) == Heard(3, 2, 1)
    assert Vllm("m").heard({"choices": [{"token_ids": [5, 6]}]}, Heard(2)) == Heard(4)
    told = {"num_spec_steps": 2, "per_step_accepted": [1, 2]}
    said = {"choices": [{"token_ids": [5]}], "metrics": {"speculative_decoding": told}}
    assert Vllm("m").heard(said, Heard(4)) == Heard(5, 2, 3)
    assert Vllm("m").heard({"choices": []}, Heard(5, 2, 3)) == Heard(5, 2, 3)


def test_each_request_is_greedy_of_fixed_length_and_shares_no_cache():
    body = Sglang().body((1, 2), 7, own="a-1", stream=True)
    assert body["sampling_params"] == {"max_new_tokens": 7, "temperature": 0, "ignore_eos": True}
    assert (body["input_ids"], body["extra_key"], body["stream"]) == ([1, 2], "a-1", True)
    body = Vllm("m").body((1, 2), 7, own="a-1", stream=False)
    assert (body["max_tokens"], body["ignore_eos"], body["temperature"], body["cache_salt"]) == (7, True, 0, "a-1")


def test_long_prompts_go_on_where_the_last_one_ended():
    prompts = Prompts([(1, 2), (3,)])
    assert prompts.take(3) == [(1, 2), (3,), (1, 2)]
    assert prompts.long(2, 4) == [(1, 2, 3, 1), (2, 3, 1, 2)]


@pytest.mark.parametrize(
    ("steps", "topk", "draft_tokens", "verified"),
    [(3, 1, None, 4), (3, 1, 4, 4), (5, 4, 8, 8), (2, 2, 3, 3), (2, 2, 7, 7)],
)
def test_a_consistent_triple_is_one_line_of_flags(steps, topk, draft_tokens, verified):
    how = Speculation(steps=steps, topk=topk, draft_tokens=draft_tokens)
    line = sglang_line(Path("/py"), SPEC, {}, Path("/d"), how, name="n", host="h", port=1, dtype="bfloat16")
    assert line == [
        "/py", "-m", "sglang.launch_server", "--model-path", "/models/tiny", "--served-model-name", "n", "--host", "h",
        "--port", "1", "--dtype", "bfloat16", "--speculative-algorithm", "EAGLE3",
        "--speculative-draft-model-path", "/d", "--speculative-num-steps", str(steps),
        "--speculative-eagle-topk", str(topk),
        "--speculative-num-draft-tokens", str(verified),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("steps", "topk", "draft_tokens", "told"),
    [
        (3, 1, 8, "leave draft_tokens null"),
        (None, 4, 32, r"server\.speculation\.steps"),
        (3, 4, None, "choose between these"),
        (3, 4, 3, "choose between these"),
        (2, 2, 8, "such a tree has 7 tokens"),
    ],
)
def test_an_inconsistent_triple_is_refused(steps, topk, draft_tokens, told):
    triple = {"steps": steps, "topk": topk, "draft_tokens": draft_tokens}
    raw = composed(
        "server=sglang", *(f"server.speculation.{k}={'null' if v is None else v}" for k, v in triple.items())
    )
    with pytest.raises(ConfigError, match=told):
        typed(raw)


def test_vllm_drafts_one_chain_and_in_process_nothing_does():
    with pytest.raises(ConfigError, match="vLLM drafts one chain"):
        config("server=vllm", "server.speculation.topk=2", "server.speculation.draft_tokens=4", script="serve")
    with pytest.raises(ConfigError, match=r"takes no server\.speculation"):
        typed(changed(server__speculation={"steps": 1, "topk": 1, "draft_tokens": None}))


def test_flags_of_the_hardware_come_first_and_those_of_the_server_count_more():
    asked = config("server=sglang", "hardware=rtx_pro_6000_x8", "server.flags.tp-size=4", script="serve")
    assert on_hardware(asked.server, asked.hardware).flags == {"attention_backend": "triton", "tp-size": 4}
    vllm = config("server=vllm", "hardware=rtx_pro_6000_x8", script="serve")
    assert on_hardware(vllm.server, vllm.hardware).flags == {"tensor_parallel_size": 8, **vllm.server.flags}
    plain = config("server=sglang", script="serve")
    assert on_hardware(plain.server, plain.hardware) == plain.server


@pytest.mark.parametrize(
    "flag", ["model_path", "port", "speculative_algorithm", "speculative_eagle_topk", "speculative-draft-model-path"]
)
def test_flags_that_are_set_here_cannot_be_chosen(flag):
    with pytest.raises(ValueError, match="is set by this program"):
        sglang_line(Path("/py"), SPEC, {flag: 1}, None, None, name="n", host="h", port=1, dtype="bfloat16")


def test_bodies_are_plain_json():
    for dialect in (Sglang(), Vllm("m")):
        assert json.loads(json.dumps(dialect.body((1,), 2, own="x", stream=True)))
