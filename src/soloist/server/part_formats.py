"""How a model's answers are taken apart: which marks its template has for calls and reasoning."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from soloist.server.hosted import Tools
from soloist.server.problems import invalid, unsupported
from soloist.text.parts import PartFormat, format_of
from soloist.text.processor import Processor

# Characters of a prompt that tell whether its answer begins within reasoning.
PROMPT_END = 64


def part_format(processor: Processor, tools: Sequence[Mapping[str, Any]]) -> PartFormat:
    """How this model's answers are taken apart.

    Args:
        processor: of the model.
        tools: that it is told of, as OpenAI describes them.

    Raises:
        Problem: tools, for a model whose calls cannot be read.
    """
    told = format_of(processor.chat_template.source)
    if not tools:
        return replace(told, calls=None)
    if told.calls is None:
        raise unsupported(
            "tools", "none; this model's chat template has no tool calls that Soloist can read"
        )
    return replace(told, json_parameters=_json_parameters(tools))


def shown_ids(processor: Processor, style: PartFormat) -> frozenset[int]:
    """Marks that are special tokens, which a text otherwise leaves out."""
    return frozenset(special_marks(processor, style).values())


def special_marks(processor: Processor, style: PartFormat) -> dict[str, int]:
    """Those marks that are special tokens, with their ids."""
    ids = {mark: processor.tokenizer.special_id(mark) for mark in style.marks}
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


def check_tools(tools: Tools) -> None:
    """Refuse what is no function, of tools by their numbers in the request.

    Raises:
        Problem: a tool of another kind, or without a name.
    """
    for index, tool in tools.items():
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
