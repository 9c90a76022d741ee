"""Each thing that vLLM could leave out, ignore or change in an answer is noticed."""

import json

import pytest

from extract.engines.base import Counters
from extract.engines.vllm_answers import Asked, read_completion, read_counters
from extract.launcher import ServerError

VOCAB = 100
METRICS = """
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="a b"} 758.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="a b"} 2.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="a b"} 1.79e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="a b"} 2.28e+03
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="a b"} 329.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a b",position="1"} 88.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a b",position="0"} 241.0
"""


def test_counters_are_summed_over_engines_and_ordered_by_position():
    assert read_counters(METRICS, drafts=2) == Counters(760, 2280, 329, (241, 88))
    with pytest.raises(ServerError, match=r"positions \[0, 1\] and not 0 \.\. 2"):
        read_counters(METRICS, drafts=3)


ASKED = Asked(prompt=(3, 4), max_new_tokens=4, stop_ids=frozenset({9}), vocab_size=VOCAB, drafts=3)
CHOICE = {"prompt_token_ids": [3, 4], "token_ids": [5, 6, 7, 8], "finish_reason": "length"}
STEPS = {"num_spec_steps": 2, "per_step_accepted": [1, 3], "per_step_drafted": [3, 3]}


def read(choice=CHOICE, steps=STEPS, asked=ASKED):
    return read_completion(json.dumps({"choices": [choice], "metrics": {"speculative_decoding": steps}}), asked, 0.5)


def test_a_whole_answer_is_taken_as_it_is():
    answer = read()
    assert (answer.ids, answer.accepted, answer.drafted, answer.seconds) == ((5, 6, 7, 8), (1, 3), (3, 3), 0.5)
    assert read(CHOICE | {"token_ids": [5, 9], "finish_reason": "stop"}).finish_reason == "stop"


@pytest.mark.parametrize(
    ("choice", "steps", "told"),
    [
        ({"token_ids": None}, {}, r"choices\.0\.token_ids"),
        ({"prompt_token_ids": None}, {}, r"choices\.0\.prompt_token_ids"),
        ({"prompt_token_ids": [1, 3, 4]}, {}, "the prompt that it read is not the one"),
        ({"token_ids": [5, 6, 7, VOCAB]}, {}, r"outside 0 \.\. 99"),
        ({"token_ids": []}, {}, "ids are missing"),
        ({"token_ids": [5, 6, 7]}, {}, "3 of at most 4 ids"),
        ({"token_ids": [5, 6, 7, 8, 5]}, {}, "5 of at most 4 ids"),
        ({"token_ids": [5, 9, 7, 8]}, {}, r"stop tokens at \[1\], finish_reason length"),
        ({"token_ids": [5, 6], "finish_reason": "stop"}, {}, r"stop tokens at \[\], finish_reason stop"),
        ({"finish_reason": "abort"}, {}, "finish_reason"),
        ({}, None, "figures of speculative decoding are None"),
        ({}, {"per_step_accepted": None}, "2 verifications, but 0 and 2 are told"),
        ({}, {"per_step_drafted": [3]}, "2 verifications, but 2 and 1 are told"),
        ({}, {"per_step_accepted": [1, 4]}, r"accepted \(1, 4\) of \(3, 3\)"),
    ],
)
def test_an_answer_that_is_not_what_was_asked_for_is_refused(choice, steps, told):
    with pytest.raises(ServerError, match=told):
        read(CHOICE | choice, steps if steps is None else STEPS | steps)


def test_one_without_a_drafter_that_speculates_is_refused():
    with pytest.raises(ServerError, match="with None drafts, its figures"):
        read(asked=Asked((3, 4), 4, frozenset({9}), VOCAB, None))
