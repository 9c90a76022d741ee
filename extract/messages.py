"""One raw sample, in any of the accepted spellings, becomes a checked list of chat messages.

Accepted (the first key that a sample has decides):

    {"messages": [{"role", "content", ...}]}          OpenAI style, answered or waiting for an answer
    {"conversations": [{"from", "value"}]}            ShareGPT style
    {"turns": ["...", "..."]}                         user turns, to be answered one after another
    {"prompt": "..."} or {"prompt": [messages]}       one user turn, or messages

plus optional "tools" (a list or its JSON text) and "system" (a system prompt). Other keys are left alone.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]

ROLES = ("system", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
# Who may speak after whom; None stands for the start of the conversation (after a system message, if any).
MAY_FOLLOW: dict[str, tuple[str | None, ...]] = {
    "user": (None, "assistant", "tool"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}


class BadSample(ValueError):
    """A sample that cannot be used; the text is the reason, without the sample's place."""


def parse_sample(row: object) -> tuple[list[Message], list[Any] | None]:
    """The messages and tools of one raw sample; raises BadSample with the reason."""
    if not isinstance(row, Mapping):
        raise BadSample(f"a sample must be a JSON object, this is {type(row).__name__}")
    tools = _parse_tools(row.get("tools"))
    messages, repeated_users = _parse_messages(row)
    messages = _with_system(messages, row.get("system"))
    _check_order(messages, repeated_users=repeated_users)
    _check_encodable([messages, tools])
    return messages, tools


def _parse_messages(row: Mapping[str, Any]) -> tuple[list[Message], bool]:
    """The messages of the first known key, and whether user turns may stand one after another."""
    if row.get("messages") is not None:
        return [_parse_message(m) for m in _list(row["messages"], "messages")], False
    if row.get("conversations") is not None:
        return [_parse_sharegpt(m) for m in _list(row["conversations"], "conversations")], False
    if row.get("turns") is not None:
        return [_parse_message({"role": "user", "content": t}) for t in _list(row["turns"], "turns")], True
    if isinstance(row.get("prompt"), str):
        return [_parse_message({"role": "user", "content": row["prompt"]})], False
    if row.get("prompt") is not None:
        return [_parse_message(m) for m in _list(row["prompt"], "prompt")], False
    found = ", ".join(sorted(map(str, row))) or "none"
    raise BadSample(f"no key of messages, conversations, turns, prompt (keys found: {found})")


def _list(value: object, key: str) -> Sequence[Any]:
    if not isinstance(value, list):
        raise BadSample(f"{key} must be a list, it is {type(value).__name__}")
    if not value:
        raise BadSample(f"{key} is an empty list")
    return value


def _parse_message(raw: object) -> Message:
    if not isinstance(raw, Mapping):
        raise BadSample(f"a message must be an object, this is {type(raw).__name__}")
    # Null means absent for every key but content, which templates expect to find.
    message = {key: value for key, value in raw.items() if value is not None or key == "content"}
    role = message.get("role")
    if role not in ROLES:
        raise BadSample(f"unknown role {role!r} (known: {', '.join(ROLES)})")
    if "tool_calls" in message:
        calls = message.pop("tool_calls")
        if not isinstance(calls, list):
            raise BadSample(f"tool_calls must be a list, it is {type(calls).__name__}")
        calls = [_parse_tool_call(call) for call in calls]
        if calls:  # an empty list is no call, but some templates only ask whether the key is there
            message["tool_calls"] = calls
    message["content"] = _parse_content(message)
    return message


def _parse_content(message: Message) -> str | None:
    content, role = message.get("content"), message["role"]
    if isinstance(content, list):
        content = _join_parts(content, role)
    if content is not None and not isinstance(content, str):
        raise BadSample(f"{role} content must be text, it is {type(content).__name__}")
    may_be_empty = role == "tool" or "tool_calls" in message
    if not may_be_empty and (content is None or not content.strip()):
        raise BadSample(f"{role} content is {'null' if content is None else 'empty'}")
    return content


def _join_parts(parts: list[Any], role: str) -> str:
    """The text of OpenAI content parts, joined by newlines; anything but text is refused."""
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise BadSample(f"{role} content has a part of type {kind!r}; only text is supported")
    return "\n".join(part["text"] for part in parts)


def _parse_tool_call(raw: object) -> dict[str, Any]:
    """One call, its arguments as an object: servers decode JSON text before they render, so this does too."""
    if not isinstance(raw, Mapping):
        raise BadSample(f"a tool call must be an object, this is {type(raw).__name__}")
    call = dict(raw)
    if isinstance(call.get("function"), Mapping):
        call["function"] = _decoded_arguments(call["function"])
        return call
    return _decoded_arguments(call)


def _decoded_arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(function)
    if not isinstance(function.get("name"), str):
        raise BadSample("a tool call has no name")
    if isinstance(function.get("arguments"), str):
        function["arguments"] = _json(function["arguments"], f"arguments of the tool call {function['name']}")
    return function


def _parse_sharegpt(raw: object) -> Message:
    """One ShareGPT entry; entries with role and content, which some files mix in, pass as messages."""
    if not isinstance(raw, Mapping) or "from" not in raw:
        return _parse_message(raw)
    speaker, value = raw["from"], raw.get("value")
    if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
        raise BadSample(f"unknown speaker {speaker!r} in 'from' (known: {', '.join(SHAREGPT_ROLES)})")
    message: Message = {"role": SHAREGPT_ROLES[speaker], "content": value}
    if speaker == "function_call":
        calls = _json(value, "value of a function_call")
        message |= {"content": None, "tool_calls": calls if isinstance(calls, list) else [calls]}
    return _parse_message(message)


def _parse_tools(tools: object) -> list[Any] | None:
    if isinstance(tools, str):
        tools = _json(tools, "tools") if tools.strip() else None
    if tools is None or tools == [] or tools == {}:
        return None
    if not isinstance(tools, list):
        raise BadSample(f"tools must be a list, it is {type(tools).__name__}")
    return tools


def _json(text: object, what: str) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except ValueError as error:
        raise BadSample(f"{what}: not valid JSON ({error})") from error


def _with_system(messages: list[Message], system: object) -> list[Message]:
    if system is None or system == "" or messages[0]["role"] == "system":
        return messages
    if not isinstance(system, str):
        raise BadSample(f"system must be text, it is {type(system).__name__}")
    return [{"role": "system", "content": system}, *messages]


def _check_order(messages: Sequence[Message], *, repeated_users: bool) -> None:
    """Refuse what templates refuse, or render as something that no server would ever see."""
    roles = [message["role"] for message in messages]
    if roles[0] == "system":
        roles = roles[1:]
    if not roles:
        raise BadSample("only a system message, nothing to answer")
    if roles[0] != "user":
        raise BadSample(f"the first turn is {roles[0]}, it must be user")
    previous: str | None = None
    for role in roles:
        if role == "system":
            raise BadSample("a system message that is not the first message")
        if previous not in MAY_FOLLOW[role] and not (repeated_users and previous == role):
            raise BadSample(f"{role} message directly after {previous} message")
        previous = role


def _check_encodable(value: object) -> None:
    """Half of a surrogate pair can be written in JSON, but is no text: no tokenizer or file takes it."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadSample(f"text with half a surrogate pair ({error.reason})") from error
