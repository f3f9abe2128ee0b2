"""Ollama's conversations as chat templates read them."""

from collections.abc import Mapping, Sequence
from typing import Any

from soloist.server.problems import invalid, unsupported
from soloist.server.prompts import plain_messages

_FIELDS = frozenset(
    {"role", "content", "thinking", "images", "tool_calls", "tool_name", "tool_call_id"}
)


def plain_conversation(
    messages: Sequence[Mapping[str, Any]], template: str
) -> list[dict[str, Any]]:
    """Messages with an id for every call, which results name: some templates want that.

    Ollama's calls need no ids, since results come in the order of the calls.

    Args:
        messages: as Ollama's clients send them.
        template: the model's.

    Raises:
        Problem: an image, a field that is not known, a call that is none.
    """
    plain: list[dict[str, Any]] = []
    open_calls: list[tuple[str, str]] = []  # id and function of calls without a result
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        if extra := sorted(set(message) - _FIELDS):
            raise unsupported(f"{place}.{extra[0]}")
        if message.get("images"):
            raise unsupported(f"{place}.images", "leave it out")
        if not isinstance(message.get("content"), str | None):
            raise invalid(f"{place}.content", "expected a text")
        made: dict[str, Any] = {
            "role": message.get("role"),
            "content": message.get("content") or "",
        }
        if thought := message.get("thinking"):
            made["reasoning_content"] = thought
        if calls := message.get("tool_calls"):
            made["tool_calls"] = _plain_calls(calls, f"{place}.tool_calls", len(plain))
            open_calls = [(call["id"], call["function"]["name"]) for call in made["tool_calls"]]
        if made["role"] == "tool":
            made |= _answered(message, open_calls)
        plain.append(made)
    return plain_messages(plain, template)


def _plain_calls(calls: object, place: str, turn: int) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise invalid(place, "expected a list of calls")
    plain = []
    for number, call in enumerate(calls):
        match call:
            case {"function": {"name": str(name), "arguments": dict(arguments)}}:
                call_id = call.get("id") or f"call_{turn}_{number}"
                function = {"name": name, "arguments": arguments}
                plain.append({"id": call_id, "type": "function", "function": function})
            case _:
                expected = 'expected {"function": {"name": …, "arguments": {…}}}'
                raise invalid(f"{place}[{number}]", expected)
    return plain


def _answered(message: Mapping[str, Any], open_calls: list[tuple[str, str]]) -> dict[str, Any]:
    """Which call a result belongs to: the one that is named, or else the next one."""
    name, call_id = message.get("tool_name"), message.get("tool_call_id")
    found = next(
        (
            call
            for call in open_calls
            if (call_id or call[0]) == call[0] and (name or call[1]) == call[1]
        ),
        None,
    )
    if found is not None:
        open_calls.remove(found)
        call_id, name = found
    given = {"tool_call_id": call_id, "name": name}
    return {key: value for key, value in given.items() if value is not None}
