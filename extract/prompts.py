"""First step of extraction: prompts from a file or a dataset become conversations to be answered.

A bad sample is skipped with its reason and never stops the rest; a file of mostly bad samples is an error.
"""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from extract.messages import BadSample, Message, parse_sample
from extract.prompt_files import Row, read_rows, source_sha256

__all__ = ["Conversation", "Exchange", "Skipped", "read_conversations", "source_sha256"]

log = logging.getLogger(__name__)

MAX_SKIPPED_SHARE = 0.5


@dataclass(frozen=True)
class Skipped:
    """A sample that was left out, and why."""

    id: str
    reason: str


@dataclass(frozen=True)
class Exchange:
    """What the assistant is told at one point (system, user, tool messages), and the answer, if given."""

    asked: tuple[Message, ...]
    given: Message | None

    @property
    def replaceable(self) -> bool:
        """Whether the verifier may answer here: a given tool call stays, its results belong to it."""
        return self.given is None or "tool_calls" not in self.given


@dataclass(frozen=True)
class Conversation:
    """Messages in order. The verifier answers after every user or tool turn that no given answer follows."""

    id: str
    messages: tuple[Message, ...]
    tools: list[Any] | None

    def exchanges(self) -> tuple[Exchange, ...]:
        """The conversation, cut at the points where the assistant speaks."""
        found: list[Exchange] = []
        asked: list[Message] = []
        for message, after in zip(self.messages, [*self.messages[1:], None], strict=True):
            if message["role"] == "assistant":
                found.append(Exchange(tuple(asked), message))
                asked = []
                continue
            asked.append(message)
            # A user turn before the end or before the next user turn is waiting for an answer.
            if message["role"] != "system" and (after is None or after["role"] == "user"):
                found.append(Exchange(tuple(asked), None))
                asked = []
        return tuple(found)


def read_conversations(
    source: str, *, split: str | None, limit: int | None, system_prompt: str | None
) -> tuple[list[Conversation], list[Skipped]]:
    """Read at most `limit` good conversations, and the samples skipped on the way.

    `system_prompt` goes before every conversation without a system message. A sample without an id gets a
    hash of its messages and tools; if it repeats an earlier one, it is skipped. Raises ValueError if the
    source cannot be read, holds no sample, gives one id twice, or if more than half of its samples are bad.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit}: the number of prompts must be at least 1 (null for all)")
    if system_prompt is not None and not system_prompt.strip():
        raise ValueError("system_prompt is empty; use null for none")
    conversations: list[Conversation] = []
    skipped: list[Skipped] = []
    place_of: dict[str, str] = {}
    for row in read_rows(source, split=split):
        if len(conversations) == limit:
            break
        try:
            conversation = _conversation(row, system_prompt, place_of, source)
        except BadSample as error:
            skipped.append(Skipped(_name(row), f"{row.place}: {error}"))
            continue
        place_of[conversation.id] = row.place
        conversations.append(conversation)
    _report(source, len(conversations), skipped)
    return conversations, skipped


def _conversation(row: Row, system_prompt: str | None, place_of: dict[str, str], source: str) -> Conversation:
    if row.fault is not None:
        raise BadSample(row.fault)
    messages, tools = parse_sample(row.value)
    if system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system_prompt}, *messages]
    given_id = _given_id(row.value.get("id"))
    if given_id is None:
        content_id = _content_id(messages, tools)
        if content_id in place_of:
            raise BadSample(f"the same conversation as {place_of[content_id]}")
        return Conversation(content_id, tuple(messages), tools)
    if given_id in place_of:
        raise ValueError(
            f"prompts {source}: id {given_id!r} stands at {place_of[given_id]} and at {row.place}; "
            "make the ids unique, or leave them out"
        )
    return Conversation(given_id, tuple(messages), tools)


def _given_id(value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise BadSample(f"id {value!r} is neither a text nor a whole number")
    if str(value) != _encodable(str(value)):
        raise BadSample("its id holds half a surrogate pair")
    return str(value)


def _encodable(text: str) -> str:
    return text.encode(errors="replace").decode()


def _content_id(messages: Sequence[Message], tools: list[Any] | None) -> str:
    text = json.dumps([list(messages), tools], sort_keys=True, ensure_ascii=False, default=str)
    return "sha-" + hashlib.sha256(text.encode()).hexdigest()[:16]


def _name(row: Row) -> str:
    """What to call a bad sample: its id if it has a usable one, else its place."""
    if isinstance(row.value, dict) and isinstance(row.value.get("id"), str | int):
        return _encodable(str(row.value["id"])) or row.place
    return row.place


def _report(source: str, num_kept: int, skipped: Sequence[Skipped]) -> None:
    total = num_kept + len(skipped)
    if total == 0:
        raise ValueError(f"prompts {source}: it holds no samples")
    log.info("prompts %s: %d samples read, %d kept, %d skipped", source, total, num_kept, len(skipped))
    if not skipped:
        return
    reasons = Counter(s.reason.partition(": ")[2] for s in skipped)
    summary = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common(5))
    first = skipped[0]
    if len(skipped) > MAX_SKIPPED_SHARE * total:
        raise ValueError(
            f"prompts {source}: {len(skipped)} of {total} samples cannot be used ({summary}); "
            f"the first is {first.id} ({first.reason}). Repair the file or its form"
        )
    log.warning("prompts %s: skipped %d of %d: %s", source, len(skipped), total, summary)
