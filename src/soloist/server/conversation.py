"""Anthropic's conversations as chat templates read them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from soloist.server.hosted import Tools
from soloist.server.problems import invalid, unsupported
from soloist.server.prompts import text_of, texts_of

# One client writes a header that changes with every request into its system prompt. It is no part
# of what the model is asked, and would keep prompts from ever sharing a beginning.
_BILLING_HEADER = "x-anthropic-billing-header"

# The first line of a result whose `is_error` is true.
_FAILED = "The call failed:"


def system_text(given: str | list[dict[str, Any]] | None) -> str:
    """The system prompt; blocks are a line each."""
    if given is None or isinstance(given, str):
        return given or ""
    texts = texts_of(given, "system")
    return "\n".join(text for text in texts if not text.startswith(_BILLING_HEADER))


def plain_conversation(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Messages in the order they came; results of tools are messages of their own.

    Args:
        messages: of the request.
        tools: that results may refer to, as `plain_tools` describes them.

    Raises:
        Problem: another role, another kind of block, a field or a tool that is not known.
    """
    known = {tool["function"]["name"]: tool["function"] for tool in tools}
    plain: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        if extra := sorted(set(message) - {"role", "content"}):
            raise unsupported(f"{place}.{extra[0]}")
        match message.get("role"), message.get("content"):
            case ("user" | "assistant") as role, str(text):
                plain.append({"role": role, "content": text})
            case "user", list(blocks):
                plain += _of_user(blocks, f"{place}.content", known)
            case "assistant", list(blocks):
                plain.append(_of_assistant(blocks, f"{place}.content"))
            case "system", (str() | list()) as content:
                plain.append({"role": "system", "content": system_text(content)})
            case (("user" | "assistant" | "system"), _):
                raise invalid(f"{place}.content", "expected a text or a list of blocks")
            case _:
                raise invalid(f"{place}.role", "expected 'user', 'assistant' or 'system'")
    return plain


def plain_tools(tools: Tools) -> list[dict[str, Any]]:
    """Tools by their numbers in the request, as OpenAI and chat templates describe them.

    Raises:
        Problem: a tool of another kind.
    """
    plain = []
    for index, tool in tools.items():
        match tool:
            case {"type": str(kind)} if kind != "custom":
                raise unsupported(f"tools[{index}].type", "'custom'")
            case {"strict": given} if given not in (None, True, False):
                raise invalid(f"tools[{index}].strict", "expected true or false")
            case {"defer_loading": given} if given not in (None, True, False):
                raise invalid(f"tools[{index}].defer_loading", "expected true or false")
            case {"name": str(name), "input_schema": dict(schema)} if name:
                function = {
                    "name": name, "description": tool.get("description", ""), "parameters": schema,
                }  # fmt: skip
                plain.append({"type": "function", "function": function})
            case _:
                raise invalid(f"tools[{index}]", 'expected {"name": …, "input_schema": {…}}')
    return plain


def loaded_tools(tools: Tools, messages: Sequence[Mapping[str, Any]]) -> tuple[Tools, Tools]:
    """Tools that the model is told of at the beginning; and these with those that a result named.

    A tool whose `defer_loading` is true is told of where a result refers to it: the prompt's
    beginning then stays as it was, and cached.
    """
    first = {number: tool for number, tool in tools.items() if not tool.get("defer_loading")}
    named = set(_references(messages))
    later = {n: tool for n, tool in tools.items() if n in first or tool.get("name") in named}
    return first, later


def _references(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Names of tools that results refer to; what is no result is somebody else's to refuse."""
    for message in messages:
        blocks = message.get("content")
        for block in blocks if isinstance(blocks, list) else ():
            match block:
                case {"type": "tool_result", "content": list(parts)}:
                    for part in parts:
                        match part:
                            case {"type": "tool_reference", "tool_name": str(name)}:
                                yield name


def _of_user(
    blocks: Sequence[Any], place: str, tools: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    plain: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        here = f"{place}[{number}]"
        match block:
            case {"type": "tool_result", "tool_use_id": str(call_id)}:
                result = _of_tool(block, here, tools)
                plain.append({"role": "tool", "tool_call_id": call_id, "content": result})
            case _:
                text = text_of(block, here)
                if plain and plain[-1]["role"] == "user":
                    plain[-1]["content"] += "\n" + text
                else:
                    plain.append({"role": "user", "content": text})
    return plain


def _of_tool(block: Mapping[str, Any], place: str, tools: Mapping[str, Mapping[str, Any]]) -> str:
    """A result as text. Templates know no failed calls, so that a call failed is said in words."""
    content = block.get("content") or ""
    if isinstance(content, list):
        parts = enumerate(content)
        content = "\n".join(_result_part(p, f"{place}.content[{n}]", tools) for n, p in parts)
    elif not isinstance(content, str):
        raise invalid(f"{place}.content", "expected a text or a list of blocks")
    match block.get("is_error"):
        case None | False:
            return content
        case True:
            return f"{_FAILED}\n{content}"
    raise invalid(f"{place}.is_error", "expected true or false")


def _result_part(part: object, place: str, tools: Mapping[str, Mapping[str, Any]]) -> str:
    """A block of a result as text: of a reference to a tool, what the tool is."""
    match part:
        case {"type": "tool_reference", "tool_name": str(name)}:
            if name not in tools:
                raise invalid(f"{place}.tool_name", f"tools has none of the name '{name}'")
            return f"<function>{orjson.dumps(tools[name]).decode()}</function>"
    return text_of(part, place)


def _of_assistant(blocks: Sequence[object], place: str) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        match block:
            case {"type": "thinking", "thinking": str(thought)}:
                thoughts.append(thought)
            case {"type": "tool_use", "id": str(call_id), "name": str(name), "input": dict(given)}:
                function = {"name": name, "arguments": given}
                calls.append({"id": call_id, "type": "function", "function": function})
            case _:
                texts.append(text_of(block, f"{place}[{number}]"))
    plain: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if any(thoughts):  # a client may have asked that they be omitted
        plain["reasoning_content"] = "\n".join(filter(None, thoughts))
    return plain | ({"tool_calls": calls} if calls else {})
