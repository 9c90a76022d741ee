"""The two prompt sets that come with the project."""

from pathlib import Path

from extract.prompts import read_conversations

PROMPTS = Path(__file__).parents[1] / "prompts"


def read(name):
    conversations, skipped = read_conversations(str(PROMPTS / name), split=None, limit=None, system_prompt=None)
    assert skipped == []
    return conversations


def user_turns(conversations):
    return [m["content"] for c in conversations for m in c.messages if m["role"] == "user"]


def test_the_quickstart_sets():
    train, held_out = read("quickstart.jsonl"), read("quickstart_eval.jsonl")
    assert [c.id for c in train] == [f"qs-{i:03d}" for i in range(1, 161)]
    assert [c.id for c in held_out] == [f"qe-{i:02d}" for i in range(1, 25)]
    several = [len(c.exchanges()) for c in train if len(c.exchanges()) > 1]
    assert len(several) == 10 and max(several) == 3
    assert sum(c.messages[0]["role"] == "system" for c in train) == 4
    turns = user_turns(train) + user_turns(held_out)
    assert len({t.casefold() for t in turns}) == len(turns), "a question stands twice, or in both sets"
    assert all(3 <= len(t.split()) <= 30 for t in turns)
