"""Reasoning and tool calls in the shape of OpenAI's chat."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from soloist.engine import Completion, Engine
from soloist.server.problems import invalid, unsupported
from soloist.text.parts import Part, PartFormat, PartReader, format_of

# Characters of a prompt that tell whether its answer begins within reasoning.
PROMPT_END = 64

_FINISH = {"eos": "stop", "stop": "stop", "length": "length"}


def part_format(engine: Engine, tools: Sequence[Mapping[str, Any]]) -> PartFormat:
    """How this model's answers are taken apart.

    Args:
        engine: of the model.
        tools: that it is told of, as OpenAI describes them.

    Raises:
        Problem: tools, for a model whose calls cannot be read.
    """
    told = format_of(engine.chat_template.source)
    if not tools:
        return replace(told, calls=None)
    if told.calls is None:
        raise unsupported(
            "tools", "none; this model's chat template has no tool calls that Soloist can read"
        )
    return replace(told, json_parameters=_json_parameters(tools))


def shown_ids(engine: Engine, style: PartFormat) -> frozenset[int]:
    """Marks that are special tokens, which a text otherwise leaves out."""
    return frozenset(special_marks(engine, style).values())


def special_marks(engine: Engine, style: PartFormat) -> dict[str, int]:
    """Those marks that are special tokens, with their ids."""
    ids = {mark: engine.tokenizer.special_id(mark) for mark in style.marks}
    return {mark: token_id for mark, token_id in ids.items() if token_id is not None}


def _json_parameters(tools: Sequence[Mapping[str, Any]]) -> frozenset[tuple[str, str]]:
    """(function, parameter) of values that are no texts."""
    found = set()
    for tool in tools:
        match tool:
            case {"function": {"name": str(name), "parameters": {"properties": dict(properties)}}}:
                found |= {(name, key) for key, schema in properties.items() if not _is_text(schema)}
    return frozenset(found)


def _is_text(schema: object) -> bool:
    """Whether a schema is for texts, or does not say what it is for."""
    match schema:
        case {"type": str(kind)}:
            return kind == "string"
        case {"type": list(kinds)}:
            return "string" in kinds
        case {"enum": list(values)}:
            return all(isinstance(value, str) for value in values)
        case {"anyOf": list(kinds)} | {"oneOf": list(kinds)}:
            return any(_is_text(kind) for kind in kinds)
    return True


def checked_tools(tools: Sequence[dict[str, Any]]) -> None:
    """Refuse what is no function.

    Raises:
        Problem: a tool of another kind, or without a name.
    """
    for index, tool in enumerate(tools):
        match tool:
            case {"type": "function", "function": {"name": str(name), **rest}} if name:
                _check_parameters(rest, f"tools[{index}].function")
            case {"type": str(kind)} if kind != "function":
                raise unsupported(f"tools[{index}].type", "'function'")
            case _:
                raise invalid(
                    f"tools[{index}]", 'expected {"type": "function", "function": {"name": …}}'
                )


def _check_parameters(function: Mapping[Any, Any], place: str) -> None:
    if not isinstance(function.get("parameters", {}), dict | None):
        raise invalid(f"{place}.parameters", "expected a JSON schema, which is an object")
    if function.get("strict") not in (None, True, False):
        raise invalid(f"{place}.strict", "expected true or false")


class Teller:
    """One answer, taken apart as it grows.

    Attributes:
        reader: takes it apart.
    """

    def __init__(self, style: PartFormat, prompt_end: str) -> None:
        self.reader = PartReader(style, prompt_end)

    def deltas(self, text: str, *, is_last: bool) -> list[dict[str, Any]]:
        """OpenAI's deltas for more text."""
        parts = self.reader.push(text) + (self.reader.finish() if is_last else [])
        return [_delta(part) for part in parts]

    def finish_reason(self, end: Completion) -> str:
        """With calls it is they that ended the answer."""
        if self.reader.num_calls and end.finish_reason != "length":
            return "tool_calls"
        return _FINISH[end.finish_reason]


def message_of(deltas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A whole message from its deltas."""
    content, reasoning = "", ""
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        content += delta.get("content", "")
        reasoning += delta.get("reasoning", "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                calls.append({key: call[key] for key in ("id", "type", "function")})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    message: dict[str, Any] = {
        "role": "assistant", "content": content or (None if calls else ""), "refusal": None,
    }  # fmt: skip
    if reasoning:
        message |= {"reasoning": reasoning, "reasoning_content": reasoning}
    return message | ({"tool_calls": calls} if calls else {})


def _delta(part: Part) -> dict[str, Any]:
    match part.kind:
        case "content":
            return {"content": part.text}
        case "reasoning":
            # Half of the clients read the one name, half the other.
            return {"reasoning": part.text, "reasoning_content": part.text}
        case "call":
            call = {
                "index": part.call, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function",
                "function": {"name": part.text, "arguments": ""},
            }  # fmt: skip
        case "arguments":
            call = {"index": part.call, "function": {"arguments": part.text}}
    return {"tool_calls": [call]}
