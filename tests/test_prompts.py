"""Reading prompts: every accepted form, every bad sample skipped with its reason, every bad file named."""

import json
import logging
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pyarrow
import pyarrow.parquet
import pytest
from chat_templates import CHATML, chat_tokenizer

from extract.chat import Chat, build_samples, require_supervision
from extract.prompts import Conversation, Exchange, Skipped, read_conversations, source_sha256


def user(content):
    return {"role": "user", "content": content}


def answer(content, **more):
    return {"role": "assistant", "content": content, **more}


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read(path, **options) -> tuple[list[Conversation], list[Skipped]]:
    return read_conversations(str(path), **({"split": None, "limit": None, "system_prompt": None} | options))


def good(count):
    return [{"id": f"good-{i}", "prompt": f"question {i}"} for i in range(count)]


CALL = {"type": "function", "function": {"name": "when", "arguments": {"time": "2025-01-01"}}}


def test_every_form_gives_the_same_messages(tmp_path):
    rows = [
        {"messages": [user("a")]},
        {"prompt": "a"},
        {"prompt": [user("a")]},
        {"turns": ["a"]},
        {"conversations": [{"from": "human", "value": "a"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
    ]
    path = write_lines(tmp_path / "p.jsonl", [{"id": i} | row for i, row in enumerate(rows)])
    conversations, skipped = read(path)
    assert conversations == [Conversation(str(i), (user("a"),), None) for i in range(len(rows))]
    assert skipped == []
    array = tmp_path / "p.json"
    array.write_text(json.dumps([json.loads(line) for line in path.read_text().splitlines()], indent=1))
    assert read(array)[0] == conversations
    path.rename(tmp_path / "lines.json")
    assert read(tmp_path / "lines.json")[0] == conversations


def test_exchanges_say_where_the_verifier_answers():
    result = {"role": "tool", "content": "8"}
    calling = answer(None, tool_calls=[CALL])
    system = {"role": "system", "content": "s"}
    messages = (
        system,
        user("a"),
        calling,
        result,
        result,
        answer("b"),
        user("c"),
        user("d"),
        answer("e"),
        user("f"),
    )
    exchanges = Conversation("x", messages, None).exchanges()
    assert exchanges == (
        Exchange((system, user("a")), calling),
        Exchange((result, result), answer("b")),
        Exchange((user("c"),), None),
        Exchange((user("d"),), answer("e")),
        Exchange((user("f"),), None),
    )
    assert [e.replaceable for e in exchanges] == [False, True, True, True, True]


def test_a_thousand_samples_without_tools_all_come_out(tmp_path, caplog):
    """C51, with the counts in the log."""
    path = write_lines(tmp_path / "p.jsonl", [{"messages": [user(f"q {i}"), answer("yes")]} for i in range(1000)])
    with caplog.at_level(logging.INFO):
        conversations, skipped = read(path)
        tokenizer = chat_tokenizer(CHATML)
        chat = Chat(tokenizer, {4}, len(tokenizer))
        samples = []
        for c in conversations:
            turn = chat.given_turn(c.messages[:1], c.messages[1], c.tools)
            samples += build_samples(c.id, [turn], max_len=64)[0]
        require_supervision(len(samples), skipped)
    assert len(samples) == 1000 and len({s.id for s in samples}) == 1000
    assert all(sum(s.loss_mask) > 1 for s in samples)
    assert "1000 samples read, 1000 kept, 0 skipped" in caplog.text
    assert "1000 with supervised tokens, 0 skipped" in caplog.text


BAD = [
    ({"messages": [{"role": "system", "content": "s"}]}, "only a system message"),
    ({"messages": [answer("a"), user("b")]}, "the first turn is assistant, it must be user"),
    ({"messages": [user("a"), user("b")]}, "user message directly after user message"),
    ({"messages": [user("a"), answer("b"), answer("c")]}, "assistant message directly after assistant"),
    ({"messages": [user("a"), {"role": "tool", "content": "b"}]}, "tool message directly after user"),
    ({"messages": [user("a"), {"role": "system", "content": "b"}]}, "system message that is not the first"),
    ({"messages": []}, "messages is an empty list"),
    ({"messages": [user(None)]}, "user content is null"),
    ({"messages": [user("")]}, "user content is empty"),
    ({"messages": [user("a"), answer(None)]}, "assistant content is null"),
    ({"messages": [user(7)]}, "must be text, it is int"),
    ({"messages": [user([{"type": "image"}])]}, "part of type 'image'"),
    ({"messages": "a"}, "messages must be a list, it is str"),
    ({"messages": ["a"]}, "a message must be an object, this is str"),
    ({"messages": [{"role": "bot", "content": "a"}]}, "unknown role 'bot'"),
    ({"conversations": [{"from": "alien", "value": "a"}]}, "unknown speaker 'alien'"),
    ({"turns": ["a", " "]}, "user content is empty"),
    ({"messages": [user("a")], "tools": "{"}, "tools: not valid JSON"),
    ({"messages": [user("a"), answer(None, tool_calls=5)]}, "tool_calls must be a list"),
    (
        {"messages": [user("a"), answer(None, tool_calls=[{"name": "f", "arguments": "{x"}])]},
        "tool call f: not valid",
    ),
    ({"messages": [user("\ud800")]}, "half a surrogate pair"),
    ({"text": "<|user|>hi"}, "no key of messages, conversations, turns, prompt (keys found: id, text)"),
    ([1, 2], "a sample must be a JSON object, this is list"),
]


def test_bad_samples_are_skipped_with_a_reason_and_the_rest_is_kept(tmp_path, caplog):
    """C52."""
    bad = [row | {"id": f"bad-{i}"} if isinstance(row, dict) else row for i, (row, _) in enumerate(BAD)]
    mixed = [row for pair in zip(bad, good(len(bad)), strict=True) for row in pair]
    conversations, skipped = read(write_lines(tmp_path / "p.jsonl", mixed))
    assert [c.id for c in conversations] == [f"good-{i}" for i in range(len(bad))]
    assert len(skipped) == len(BAD)
    for number, (got, (_, reason)) in enumerate(zip(skipped, BAD, strict=True)):
        assert reason in got.reason and got.reason.startswith(f"line {2 * number + 1}: ")
    assert skipped[0].id == "bad-0" and skipped[-1].id == f"line {2 * len(bad) - 1}"
    assert f"skipped {len(bad)} of {2 * len(bad)}" in caplog.text


def test_mostly_bad_samples_are_an_error(tmp_path):
    """C50: text in another form than the one expected never passes as an empty or tiny set."""
    path = write_lines(tmp_path / "p.jsonl", [*good(2), *({"text": f"USER: {i}"} for i in range(3))])
    with pytest.raises(ValueError, match=r"p\.jsonl: 3 of 5 samples .*3 x no key of .*first is line 3"):
        read(path)
    assert len(read(write_lines(path, [*good(2), {"text": "a"}, {"text": "b"}]))[0]) == 2


def test_tool_arguments_of_different_types_load(tmp_path):
    """C53."""

    def calling(arguments):
        call = {"type": "function", "function": {"name": "when", "arguments": arguments}}
        result = {"role": "tool", "content": "noon"}
        return {"messages": [user("a"), answer(None, tool_calls=[call]), result], "tools": [{"name": "when"}]}

    text, number = {"time": "2025-01-01"}, {"time": 1690876800, "zone": None}
    rows = [
        calling(text),
        calling(number),
        calling(json.dumps(number)) | {"id": "as text"},
        {"prompt": "no tools"},
    ]
    conversations, _ = read(write_lines(tmp_path / "p.jsonl", rows))
    arguments = [c.messages[1]["tool_calls"][0]["function"]["arguments"] for c in conversations[:3]]
    assert arguments == [text, number, number]
    assert [len(c.messages) for c in conversations] == [3, 3, 3, 1]
    assert conversations[0].tools == [{"name": "when"}] and conversations[3].tools is None
    assert conversations[0].messages[1]["content"] is None


def test_a_column_that_is_null_for_long_loads(tmp_path):
    """C54."""
    rows = [{"messages": [user(f"q{i}"), answer("a", reasoning_content=None)]} for i in range(3000)]
    rows.append({"messages": [user("last"), answer("a", reasoning_content="hm")]})
    conversations, skipped = read(write_lines(tmp_path / "p.jsonl", rows))
    assert len(conversations) == 3001 and skipped == []
    assert conversations[-1].messages[1] == answer("a", reasoning_content="hm")
    assert conversations[0].messages[1] == answer("a")


def test_sharegpt_with_system_and_function_calls(tmp_path):
    turns = [
        {"from": "human", "value": "when?"},
        {"from": "function_call", "value": '{"name": "when", "arguments": {"x": 1}}'},
        {"from": "observation", "value": "noon"},
        {"from": "gpt", "value": "at noon"},
    ]
    (only,), _ = read(write_lines(tmp_path / "p.jsonl", [{"conversations": turns, "system": "s", "tools": "[]"}]))
    assert [m["role"] for m in only.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert only.messages[2]["tool_calls"] == [{"name": "when", "arguments": {"x": 1}}]
    assert only.tools is None


def test_unicode_line_ends_do_not_split_records(tmp_path):
    """C63, with a byte order mark, CRLF and blank lines too."""
    text = "one\u2028two\u2029three\u0085four\x0bfive\x0csix\r\nseven"
    lines = [json.dumps({"id": i, "prompt": f"{i} {text}"}, ensure_ascii=False) for i in range(3)]
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n\r\n".join(lines).encode())
    conversations, skipped = read(path)
    assert [c.messages[0]["content"] for c in conversations] == [f"{i} {text}" for i in range(3)]
    assert skipped == []


def test_damaged_lines_are_named(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": \n{"prompt": "b"}\n\xff\xfe\n{"prompt": "c"}\n' + b"[" * 100_000)
    conversations, skipped = read(path)
    assert len(conversations) == 3
    assert [s.id for s in skipped] == ["line 2", "line 4", "line 6"]
    assert "not valid JSON" in skipped[0].reason and "not UTF-8 (byte 0" in skipped[1].reason


def test_ids_are_stable_and_unique(tmp_path):
    path = write_lines(tmp_path / "p.jsonl", [{"prompt": "a"}, {"prompt": "b"}, {"turns": ["a"]}])
    conversations, skipped = read(path)
    assert skipped == [Skipped("line 3", "line 3: the same conversation as line 1")]
    assert read(write_lines(path, [{"prompt": "b"}]))[0][0].id == conversations[1].id != conversations[0].id
    assert read(path, system_prompt="s")[0][0].id != conversations[1].id
    write_lines(path, [{"id": "x", "prompt": "a"}, {"id": "y", "prompt": "a"}, {"id": "x", "prompt": "b"}])
    with pytest.raises(ValueError, match="id 'x' stands at line 1 and at line 3"):
        read(path)
    kept, skipped = read(write_lines(path, [{"id": 7, "prompt": "a"}, {"id": 1.5, "prompt": "b"}]))
    assert kept[0].id == "7" and "id 1.5 is neither" in skipped[0].reason
    kept, skipped = read(write_lines(path, [{"id": 7, "prompt": "a"}, {"id": "\ud800", "prompt": "b"}]))
    assert len(kept) == 1 and skipped == [Skipped("?", "line 2: its id holds half a surrogate pair")]


def test_limit_and_system_prompt(tmp_path):
    own = {"messages": [{"role": "system", "content": "own"}, user("q")]}
    path = write_lines(tmp_path / "p.jsonl", [own, *good(5), {"text": "never read"}])
    conversations, _ = read(path, limit=3, system_prompt="ours")
    assert [c.messages[0]["content"] for c in conversations] == ["own", "ours", "ours"]
    for options, message in [({"limit": 0}, "limit=0"), ({"system_prompt": " "}, "system_prompt is empty")]:
        with pytest.raises(ValueError, match=message):
            read(path, **options)


def test_parquet(tmp_path):
    path = tmp_path / "p.parquet"
    rows = [{"messages": [user("a"), answer(None, tool_calls=[CALL])]}, {"messages": [user("b")]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert [c.messages for c in read(path)[0]] == [tuple(row["messages"]) for row in rows]
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"p\.parquet, after row 0: not readable"):
        read(path)


def test_files_that_cannot_be_read_are_named_with_a_remedy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.txt").write_text("a")
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "bad.json").write_text('[{"prompt": "a"},\n oops]')
    (tmp_path / "dict.json").write_text('{"data": []}')
    for source, message in {
        "no.jsonl": rf"not found: 'no.jsonl' \(looked for {tmp_path}/no.jsonl\)",
        ".": "is a directory; name a file",
        "p.txt": "unknown ending '.txt'; supported are JSON lines",
        "empty.jsonl": "empty.jsonl: it holds no samples",
        "bad.json": "bad.json, line 2: not valid JSON",
        "dict.json": "the top level is a dict, expected an array",
        "hf:org/name": "say which split",
    }.items():
        with pytest.raises(ValueError, match=message):
            read(source)
    with pytest.raises(ValueError, match=r"split='train' is for hf: datasets"):
        read(write_lines(tmp_path / "p.jsonl", good(1)), split="train")


def test_hugging_face_datasets(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="pip install datasets"):
        read("hf:org/name", split="train")
    rows = {"train": [{"messages": [user("a") | {"name": None}]}], "test": good(1)}
    fake = SimpleNamespace(load_dataset=lambda name, split: {"org/name": rows}[name][split])
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert read("hf:org/name", split="train")[0][0].messages == (user("a"),)
    train, test = (source_sha256("hf:org/name", split=split) for split in ("train", "test"))
    assert train != test and train == source_sha256("hf:org/name", split="train")
    fake.load_dataset = Mock(side_effect=FileNotFoundError("no such dataset"))
    with pytest.raises(ValueError, match=r"hf:org/name: cannot be had .no such dataset"):
        read("hf:org/name", split="train")


def test_the_source_hash_follows_the_file(tmp_path):
    """C64: the manifest holds this hash, so a changed prompt file is noticed."""
    path = write_lines(tmp_path / "p.jsonl", good(3))
    before = source_sha256(str(path))
    assert before == source_sha256(str(path)) and len(before) == 64
    assert source_sha256(str(write_lines(path, good(4)))) != before
