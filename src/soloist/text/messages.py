"""Checks the messages and tools of a conversation and makes plain data of them.

Chat templates are programs that come with a model: they see JSON values and nothing else. Knows the
shape of messages, not what a template makes of them.
"""

import math
from collections.abc import Mapping, Sequence

from soloist.errors import RequestError

Message = Mapping[str, object]
Tool = Mapping[str, object]

# The names under which clients send a message's reasoning, the one that templates read first.
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_MESSAGE_HINT = 'a message looks like {"role": "user", "content": "Hello"}'
_TOOL_HINT = 'a tool looks like {"type": "function", "function": {"name": …, "parameters": …}}'


def plain_messages(messages: Sequence[Message]) -> list[dict[str, object]]:
    """A checked copy of `messages`, as templates see them.

    Fields that are null are left out: many templates would print them. Reasoning is given under
    both names that templates know.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(
            f"messages is a {type(messages).__name__}, expected a list of messages", _MESSAGE_HINT
        )
    if not messages:
        raise RequestError(
            "the conversation is empty: it needs at least one message", _MESSAGE_HINT
        )
    return [_plain_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def plain_tools(tools: Sequence[Tool] | None) -> list[object] | None:
    """A checked copy of tool descriptions, which are JSON objects."""
    if tools is None:
        return None
    if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Sequence):
        raise RequestError(f"tools is a {type(tools).__name__}, expected a list", _TOOL_HINT)
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise RequestError(
                f"tools[{index}] is a {type(tool).__name__}, expected an object", _TOOL_HINT
            )
    return [plain(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def plain(value: object, place: str) -> object:
    """`value` rebuilt of plain JSON types; refuses everything else, naming its `place`."""
    match value:
        case None | bool():
            return value
        case str():
            return str.__str__(value)
        case int():
            return int.__int__(value)
        case float() if math.isfinite(value):
            return float.__float__(value)
        case Mapping():
            return {_key(key, place): plain(item, f"{place}.{key}") for key, item in value.items()}
        case list() | tuple():
            return [plain(item, f"{place}[{index}]") for index, item in enumerate(value)]
    raise RequestError(
        f"{place} is {value!r}, which is no JSON value",
        "use strings, numbers, true, false, null, lists and objects",
    )


def _key(key: object, place: str) -> str:
    if not isinstance(key, str):
        raise RequestError(f"{place} has the key {key!r}, expected a string", _MESSAGE_HINT)
    return str.__str__(key)


def _plain_message(message: object, place: str) -> dict[str, object]:
    if not isinstance(message, Mapping):
        raise RequestError(
            f"{place} is a {type(message).__name__}, expected an object", _MESSAGE_HINT
        )
    fields = {
        _key(key, place): plain(value, f"{place}.{key}")
        for key, value in message.items()
        if value is not None
    }
    _check_fields(fields, place)
    reasoning = next((fields[name] for name in _REASONING_FIELDS if name in fields), None)
    if reasoning is not None:
        fields = {"thinking": reasoning, **fields, "reasoning_content": reasoning}
    return fields


def _check_fields(fields: Mapping[str, object], place: str) -> None:
    role = fields.get("role")
    if not isinstance(role, str) or not role:
        seen = "has no role" if role is None else f"has the role {role!r}"
        raise RequestError(f"{place} {seen}, expected a word such as 'user'", _MESSAGE_HINT)
    calls = fields.get("tool_calls")
    if calls is not None and not _are_objects(calls):
        raise RequestError(
            f"{place}.tool_calls is {calls!r}, expected a list of objects",
            'a call looks like {"type": "function", "function": {"name": …, "arguments": …}}',
        )
    content = fields.get("content")
    if content is None and calls:
        return
    if content is None:
        raise RequestError(
            f"{place} has no content; only a message with tool_calls may lack it", _MESSAGE_HINT
        )
    if not isinstance(content, str) and not _are_objects(content):
        raise RequestError(
            f"{place}.content is {content!r}, expected a string or a list of parts",
            'a part looks like {"type": "text", "text": "Hello"}',
        )


def _are_objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)
