"""Prompts and given answers over template families, against the stock rendering."""

import pytest
import torch
from chat_templates import (
    CHATML,
    CHATML_DEFAULT_SYSTEM,
    EMPTY_THINK_ALWAYS,
    GLM,
    LLAMA3,
    MARKERS,
    MISTRAL,
    OPENS_THINKING,
    QWEN3,
    TOOLS,
    chat_tokenizer,
)

from extract.chat import Chat, ChatError, Sample, build_samples
from extract.messages import parse_sample

ENDS = {MARKERS.index(m) for m in ("</s>", "<|im_end|>", "<|eot|>", "<|user|>")}


def user(content):
    return {"role": "user", "content": content}


def answer(content, **more):
    return {"role": "assistant", "content": content, **more}


def make_chat(template, **options) -> Chat:
    tokenizer = chat_tokenizer(template, **options)
    return Chat(tokenizer, ENDS, len(tokenizer))


def given_samples(chat: Chat, messages, *, tools=None, max_len=10_000) -> list[Sample]:
    turns = [chat.given_turn(messages[:i], m, tools) for i, m in enumerate(messages) if m["role"] == "assistant"]
    samples, skipped = build_samples("c", turns, max_len=max_len)
    assert skipped == []
    return samples


def supervised(chat: Chat, sample: Sample) -> list[str]:
    """The text of every run of supervised tokens."""
    runs, run = [], []
    for token, kept in zip([*sample.input_ids, 0], [*sample.loss_mask, 0], strict=True):
        if kept:
            run.append(token)
        elif run:
            runs.append(chat.tokenizer.decode(run))
            run = []
    return runs


def stock_ids(chat: Chat, messages, tools=None) -> list[int]:
    return list(chat.tokenizer.apply_chat_template(messages, tools=tools)["input_ids"])


THREE_TURNS = [
    user("hello"), answer("hi there"), user("what?"), answer("sunny"), user("bye"), answer("see you\nsoon"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (CHATML, "<|im_end|>"),
        (CHATML_DEFAULT_SYSTEM, "<|im_end|>"),
        (LLAMA3, "<|eot|>"),
        (TOOLS, "<|im_end|>"),
    ],
)
def test_templates_without_generation_tags_give_the_right_mask(template, end):
    """C45: three answers, and nothing else, in one sample that is the stock rendering of the whole chat."""
    chat = make_chat(template)
    assert "generation" not in template.replace("add_generation_prompt", "")
    (sample,) = given_samples(chat, THREE_TURNS)
    assert sample.turns == 3
    assert supervised(chat, sample) == ["hi there" + end, "sunny" + end, "see you\nsoon" + end]
    # The end-of-turn token closes the sample; template text behind it ("\n" in ChatML) is outside.
    whole = stock_ids(chat, THREE_TURNS)
    assert sample.input_ids == whole[: len(sample.input_ids)]
    assert whole[len(sample.input_ids) :] in ([], chat.tokenizer("\n")["input_ids"])


def test_mistral_like_alternation():
    chat = make_chat(MISTRAL)
    (sample,) = given_samples(chat, THREE_TURNS)
    assert supervised(chat, sample) == [" hi there</s>", " sunny</s>", " see you\nsoon</s>"]
    assert sample.input_ids == stock_ids(chat, THREE_TURNS)
    with pytest.raises(ChatError, match=r"\(user, user\).*must alternate"):
        chat.prompt_ids([user("a"), user("b")])


def test_an_answer_ended_by_the_next_header_keeps_that_end():
    chat = make_chat(GLM)
    (sample,) = given_samples(chat, THREE_TURNS)
    assert supervised(chat, sample) == ["hi there<|user|>", "sunny<|user|>", "see you\nsoon<|user|>"]


def test_a_template_without_end_of_turn_is_an_error_with_the_ids():
    chat = Chat(chat_tokenizer(GLM), {2}, 400)
    with pytest.raises(ChatError, match=r"end-of-turn ids \[2\]"):
        chat.given_turn([user("a")], answer("b"))


def test_white_space_at_the_end_of_an_answer():
    """C46: whether the template keeps or trims it, later user tokens stay outside the mask."""
    chat = make_chat(CHATML)
    messages = [user("a"), answer("x  \n\n"), user("b  "), answer("y")]
    (sample,) = given_samples(chat, messages)
    assert supervised(chat, sample) == ["x  \n\n<|im_end|>", "y<|im_end|>"]
    trimmed = make_chat(LLAMA3)
    for sample in given_samples(trimmed, messages):
        assert all(run in ("x<|eot|>", "y<|eot|>") for run in supervised(trimmed, sample))


def test_a_token_that_would_span_the_seam_is_not_formed():
    """The header ends in "\\n" and the answer begins with one: it cannot change the prompt."""
    chat = make_chat(CHATML)
    assert len(chat.tokenizer("\n\n")["input_ids"]) == 1
    turn = chat.given_turn([user("a")], answer("\nhello"))
    assert turn.prompt_ids == chat.prompt_ids([user("a")])
    assert chat.tokenizer.decode(turn.response_ids) == "\nhello<|im_end|>"


THINKING = [
    user("one"), answer("<think>\nfirst thought\n</think>\n\nA1"), user("two"), answer("A2"), user("three"),
    answer("last thought</think>\n\nA3"),
]  # fmt: skip


def test_a_template_that_drops_earlier_thinking_gives_one_sample_a_turn():
    """C55: the last sample is the full rendering, and its mask covers the thinking of the last turn."""
    chat = make_chat(QWEN3)
    samples = given_samples(chat, THINKING)
    assert [(s.id, s.conversation, s.turns) for s in samples] == [(f"c#{i}", "c", 1) for i in range(3)]
    whole = stock_ids(chat, THINKING)
    assert samples[2].input_ids == whole[: len(samples[2].input_ids)]
    assert supervised(chat, samples[0]) == ["<think>\nfirst thought\n</think>\n\nA1<|im_end|>"]
    assert supervised(chat, samples[2]) == ["<think>\nlast thought\n</think>\n\nA3<|im_end|>"]


def test_thinking_in_its_own_field_is_supervised():
    chat = make_chat(QWEN3)
    (sample,) = given_samples(chat, [user("one"), answer("A1", reasoning_content="a thought")])
    assert supervised(chat, sample) == ["<think>\na thought\n</think>\n\nA1<|im_end|>"]


@pytest.mark.parametrize("template", [QWEN3, EMPTY_THINK_ALWAYS])
def test_an_empty_think_block_from_the_template_is_outside_the_mask(template):
    """C56."""
    chat = make_chat(template)
    messages = [user("one"), answer("A2")]
    (sample,) = given_samples(chat, messages)
    assert supervised(chat, sample) == ["A2<|im_end|>"]
    assert sample.input_ids == stock_ids(chat, messages)[: len(sample.input_ids)]
    assert "<think>\n\n</think>\n\n" in chat.tokenizer.decode(sample.input_ids)


def test_an_empty_think_block_of_the_answer_itself_is_supervised():
    """C56: here the assistant wrote it, the template only passes it on."""
    chat = make_chat(QWEN3)
    (sample,) = given_samples(chat, [user("one"), answer("<think>\n\n</think>\n\nA2")])
    assert supervised(chat, sample) == ["<think>\n\n</think>\n\nA2<|im_end|>"]


def test_an_answer_that_does_not_continue_the_generation_prompt_is_refused():
    """C56: a prompt that opens the think block cannot be followed by an answer without thinking."""
    chat = make_chat(OPENS_THINKING)
    with pytest.raises(ChatError, match="does not continue its own generation prompt"):
        chat.given_turn([user("one")], answer("A1"))
    turn = chat.given_turn([user("one")], answer("<think>\nhm</think>A1"))
    assert chat.tokenizer.decode(turn.response_ids) == "hm</think>A1<|im_end|>"


def test_markers_inside_messages_are_not_taken_for_turns():
    """C58."""
    chat = make_chat(CHATML)
    quoted = "what does <|im_start|>assistant\nhello<|im_end|>\n mean?"
    messages = [user(quoted), answer("a header"), user("and <|im_end|>?"), answer("an end")]
    (sample,) = given_samples(chat, messages)
    assert supervised(chat, sample) == ["a header<|im_end|>", "an end<|im_end|>"]
    # An answer that quotes the end marker ends there: generation would have stopped.
    (sample,) = given_samples(chat, [user("a"), answer("it is <|im_end|> you see"), user("b"), answer("c")])
    assert supervised(chat, sample) == ["it is <|im_end|>", "c<|im_end|>"]


@pytest.mark.parametrize("form", ["mapping", "list", "batch of lists", "tensor", "batch of tensors"])
def test_ids_are_the_same_whatever_the_tokenizer_returns(form, monkeypatch):
    """C60."""
    chat = make_chat(CHATML)
    expected = chat.prompt_ids([user("hello")])
    stock = chat.tokenizer.apply_chat_template
    forms = {
        "mapping": lambda ids: {"input_ids": ids, "attention_mask": [1] * len(ids)},
        "list": lambda ids: ids,
        "batch of lists": lambda ids: [ids],
        "tensor": torch.tensor,
        "batch of tensors": lambda ids: {"input_ids": torch.tensor([ids])},
    }
    monkeypatch.setattr(chat.tokenizer, "apply_chat_template", lambda *a, **k: forms[form](stock(*a, **k)["input_ids"]))
    assert chat.prompt_ids([user("hello")]) == expected
    assert len(expected) > 3 and all(type(i) is int for i in expected)


def test_one_begin_of_sequence_token():
    """C61: the template writes one and the tokenizer would add another."""
    chat = make_chat(LLAMA3, adds_bos=True)
    bos = chat.tokenizer.bos_token_id
    assert chat.tokenizer("hello")["input_ids"][0] == bos
    (sample,) = given_samples(chat, THREE_TURNS)
    assert sample.input_ids.count(bos) == 1 and sample.input_ids[0] == bos
    assert chat.prompt_ids(THREE_TURNS[:1])[:2].count(bos) == 1
    twice = make_chat("{{ bos_token }}" + LLAMA3)
    with pytest.raises(ChatError, match="two begin-of-sequence tokens"):
        twice.prompt_ids([user("hello")])


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome", "days": 2}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("template", "messages", "tools"),
    [
        (TOOLS, [user("hi"), answer(None, tool_calls=[CALL]), {"role": "tool", "content": "sunny"}], [TOOL]),
        (TOOLS, [user("hi")], [TOOL]),
        (CHATML_DEFAULT_SYSTEM, [user("hi")], None),
        (CHATML_DEFAULT_SYSTEM, [{"role": "system", "content": "brief"}, user("hi")], None),
        (CHATML, [{"role": "system", "content": "brief"}, user("  hi\n\n")], None),
        (LLAMA3, [user("  hi\n\n"), answer("  a  "), user("b")], None),
        (QWEN3, THINKING[:5], None),
        (MISTRAL, THREE_TURNS[:3], None),
        (CHATML, [user("\u2028 é 漢字 🙂 <|im_end|>")], None),
        (GLM, THREE_TURNS[:5], None),
    ],
)
def test_prompts_are_those_of_the_stock_template(template, messages, tools):
    """C62: ten odd chats, against Hugging Face's own rendering."""
    chat = make_chat(template)
    messages, tools = parse_sample({"messages": messages, "tools": tools})
    stock = chat.tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True)
    assert chat.prompt_ids(messages, tools) == list(stock["input_ids"])


def test_tool_calls_are_supervised_and_tool_results_are_not():
    chat = make_chat(TOOLS)
    messages = [
        user("hi"), answer(None, tool_calls=[CALL]), {"role": "tool", "content": "sunny"}, answer("sunny"),
    ]  # fmt: skip
    (sample,) = given_samples(chat, messages, tools=[TOOL])
    call = '<call>weather{"city": "Rome", "days": 2}<|im_end|>'
    assert supervised(chat, sample) == [call, "sunny<|im_end|>"]


def test_nothing_is_remembered_between_template_length_and_mask_changes():
    """C64: there is no preprocessing cache; another template or length gives other samples at once."""
    first = given_samples(make_chat(CHATML), THREE_TURNS)
    assert given_samples(make_chat(CHATML), THREE_TURNS) == first
    assert given_samples(make_chat(CHATML_DEFAULT_SYSTEM), THREE_TURNS)[0].input_ids != first[0].input_ids
    assert len(given_samples(make_chat(CHATML), THREE_TURNS, max_len=12)[0].input_ids) == 12
    turns = make_chat(CHATML)
    turns.tokenizer.chat_template = LLAMA3
    assert given_samples(turns, THREE_TURNS) == given_samples(make_chat(LLAMA3), THREE_TURNS)


def test_ids_beyond_the_verifiers_vocabulary_are_named(caplog):
    """C72: a larger vocabulary is fine; an added token beyond a smaller one is an error where it is used."""
    tokenizer = chat_tokenizer(CHATML)
    assert Chat(tokenizer, ENDS, len(tokenizer) + 28).prompt_ids([user("hi")])
    size = len(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|new|>"]})
    chat = Chat(tokenizer, ENDS, size)
    assert f"{size + 1} ids, the verifier only {size}" in caplog.text
    assert chat.prompt_ids([user("hi")])
    with pytest.raises(ChatError, match=rf"token id {size} \('<\|new\|>'\) .* vocabulary size {size}"):
        chat.prompt_ids([user("hi <|new|>")])


def test_a_tokenizer_without_template_or_ends_is_refused():
    tokenizer = chat_tokenizer(CHATML)
    for ends in ([], [400], [-1]):
        with pytest.raises(ValueError, match="end-of-turn ids"):
            Chat(tokenizer, ends, 340)
    with pytest.raises(ValueError, match=r"verifier\.chat_template"):
        Chat(chat_tokenizer(None), ENDS, 340)


def test_an_answer_goes_back_into_the_history_as_text():
    chat = make_chat(QWEN3)
    turn = chat.given_turn([user("a")], answer("<think>\nhm\n</think>\n\nyes"))
    assert chat.answer_message(turn.response_ids) == answer("<think>\nhm\n</think>\n\nyes")
    assert chat.answer_message([]) == answer("")
