"""A conversation and an answer as items of OpenAI's responses: messages, reasoning, calls."""

import base64
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from soloist.server.hosted import Tools
from soloist.server.problems import invalid, unsupported
from soloist.text.parts import Part

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_PARTS = ("input_text", "output_text", "reasoning_text", "summary_text")

# Fields of an item that tell the model something, and those that only name the item.
_FIELDS = {
    "message": {"role", "content"},
    "function_call": {"call_id", "name", "arguments"},
    "function_call_output": {"call_id", "output"},
    "reasoning": {"content", "summary", "encrypted_content"},
}
_NAMES = {"type", "id", "status", "phase"}

_SEAL = "soloist."


def plain_conversation(
    given: str | Sequence[Mapping[str, Any]], instructions: str | None
) -> list[dict[str, Any]]:
    """Items as chat templates read them: an answer, its reasoning and its calls are one message.

    Neighbouring messages of the system are one as well: many templates have room for one.

    Raises:
        Problem: another kind of item or part, a field that is not known.
    """
    chat: list[dict[str, Any]] = []
    if instructions:
        chat.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*chat, {"role": "user", "content": given}]
    for index, item in enumerate(given):
        place, kind = f"input[{index}]", item.get("type", "message")
        if kind not in _FIELDS:
            raise unsupported(f"{place}.type", ", ".join(map(repr, _FIELDS)))
        if extra := sorted(x for x in set(item) - _FIELDS[kind] - _NAMES if item[x] is not None):
            raise unsupported(f"{place}.{extra[0]}")
        _add(chat, kind, item, place)
    return chat


def plain_tools(tools: Tools) -> list[dict[str, Any]]:
    """Tools by their numbers in the request, as chat templates read functions.

    Raises:
        Problem: a tool of another kind.
    """
    plain = []
    for index, tool in tools.items():
        if tool.get("type") != "function":
            raise unsupported(f"tools[{index}].type", "'function'")
        if tool.get("strict") not in (None, True, False):
            raise invalid(f"tools[{index}].strict", "expected true or false")
        if not isinstance(tool.get("parameters", {}), dict | None):
            raise invalid(f"tools[{index}].parameters", "expected a JSON schema, an object")
        if not isinstance(tool.get("name"), str):
            raise invalid(f"tools[{index}].name", "expected the function's name")
        function = {k: tool[k] for k in ("name", "description", "parameters") if tool.get(k)}
        plain.append({"type": "function", "function": function})
    return plain


class Items:
    """Items of one answer, as events while they grow.

    Attributes:
        output: those that have ended, and the one that grows.

    Args:
        seals_reasoning: give reasoning a second time, as clients store it for the next turn.
    """

    def __init__(self, *, seals_reasoning: bool = False) -> None:
        self.output: list[dict[str, Any]] = []
        self._seals_reasoning = seals_reasoning
        self._kind: str | None = None
        self._likely: list[dict[str, object]] = []  # of tokens whose text is still to come

    def events(
        self, parts: Sequence[Part], likely: Sequence[dict[str, object]] = ()
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Kind and fields of events for more of the answer, and log probabilities of its tokens."""
        self._likely += likely
        for part in parts:
            if part.kind == "call" or part.kind not in ("arguments", self._kind):
                yield from self._stop("completed")
                yield from self._start(part)
            if part.kind != "call":
                yield self._grow(part)

    def finish(self, status: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """The end of the last item, which is an empty message if there is no other."""
        if not self.output:
            yield from self._start(Part("content", ""))
        yield from self._stop(status)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1}

    def _start(self, part: Part) -> Iterator[tuple[str, dict[str, Any]]]:
        self._kind = "arguments" if part.kind == "call" else part.kind
        item = _begun(part)
        self.output.append(item)
        shown = {**item, "content": []} if part.kind == "content" else dict(item)
        yield "output_item.added", {"output_index": len(self.output) - 1, "item": shown}
        if part.kind == "content":
            yield "content_part.added", {**self._place, "content_index": 0, "part": _text("")}

    def _grow(self, part: Part) -> tuple[str, dict[str, Any]]:
        item, place = self.output[-1], {**self._place, "delta": part.text}
        if part.kind == "arguments":
            item["arguments"] += part.text
            return "function_call_arguments.delta", place
        item["content"][0]["text"] += part.text
        if part.kind == "reasoning":
            return "reasoning_text.delta", {**place, "content_index": 0}
        return "output_text.delta", {**place, "content_index": 0, "logprobs": self._told(item)}

    def _told(self, item: dict[str, Any]) -> list[dict[str, object]]:
        """Log probabilities that came and were not told yet; they become a part of the item."""
        told, self._likely = self._likely, []
        item["content"][0]["logprobs"] += told
        return told

    def _stop(self, status: str) -> Iterator[tuple[str, dict[str, Any]]]:
        if self._kind is None:
            return
        kind, self._kind = self._kind, None
        item, place = self.output[-1], self._place
        item["status"] = status
        if kind == "reasoning" and self._seals_reasoning:
            item["encrypted_content"] = _sealed(item["content"][0]["text"])
        if kind == "arguments":
            fields = {"name": item["name"], "arguments": item["arguments"]}
            yield "function_call_arguments.done", place | fields
        else:
            place["content_index"] = 0
            (content,) = item["content"]
            told = {**place, "text": content["text"]}
            if kind == "reasoning":
                yield "reasoning_text.done", told
            else:
                self._told(item)  # of a token that a stop string left without a text
                yield "output_text.done", {**told, "logprobs": content["logprobs"]}
                yield "content_part.done", {**place, "part": content}
        yield "output_item.done", {"output_index": place["output_index"], "item": item}


def _begun(part: Part) -> dict[str, Any]:
    number = uuid.uuid4().hex[:24]
    match part.kind:
        case "call":
            return {
                "id": f"fc_{number}", "type": "function_call", "call_id": f"call_{number}",
                "name": part.text, "arguments": "", "status": "in_progress",
            }  # fmt: skip
        case "reasoning":
            content = [{"type": "reasoning_text", "text": ""}]
            return {
                "id": f"rs_{number}", "type": "reasoning", "summary": [], "content": content,
                "status": "in_progress",
            }  # fmt: skip
        case _:
            return {
                "id": f"msg_{number}", "type": "message", "role": "assistant",
                "status": "in_progress", "content": [_text("")],
            }  # fmt: skip


def _text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _add(chat: list[dict[str, Any]], kind: str, item: Mapping[str, Any], place: str) -> None:
    match kind:
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            _answer(chat).setdefault("tool_calls", []).append(call)
        case "function_call_output":
            content = _joined(item.get("output"), f"{place}.output")
            call_id = item.get("call_id")
            chat.append({"role": "tool", "tool_call_id": call_id, "content": content})
        case "reasoning":
            told = item.get("content") or _unsealed(item.get("encrypted_content"), place)
            if text := _joined(told or item.get("summary") or "", f"{place}.content"):
                _answer(chat)["reasoning_content"] = text
        case _:
            role = item.get("role")
            if role not in _ROLES:
                raise invalid(f"{place}.role", f"expected one of {', '.join(_ROLES)}")
            content = _joined(item.get("content"), f"{place}.content")
            if role == "assistant":
                answer = _answer(chat)
                answer["content"] = "\n".join(filter(None, (answer["content"], content)))
            elif _ROLES[role] == "system" and chat and chat[-1]["role"] == "system":
                chat[-1]["content"] += f"\n{content}"
            else:
                chat.append({"role": _ROLES[role], "content": content})


def _sealed(text: str) -> str:
    """Reasoning in the field that clients send back unread; nothing is secret about it here."""
    return _SEAL + base64.b64encode(text.encode()).decode()


def _unsealed(given: object, place: str) -> str:
    if given is None:
        return ""
    try:
        if isinstance(given, str) and given.startswith(_SEAL):
            return base64.b64decode(given.removeprefix(_SEAL), validate=True).decode()
    except ValueError:
        pass
    raise invalid(f"{place}.encrypted_content", "expected what this server gave; leave it out")


def _answer(chat: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message at the end, begun if there is none."""
    if not chat or chat[-1]["role"] != "assistant":
        chat.append({"role": "assistant", "content": ""})
    return chat[-1]


def _joined(content: object, place: str) -> str:
    """A text, or parts of text, a line each."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(place, "expected a text or a list of parts")
    texts = []
    for number, part in enumerate(content):
        match part:
            case {"type": str(kind), "text": str(text)} if kind in _PARTS:
                texts.append(text)
            case {"type": str(kind)} if kind not in _PARTS:
                raise unsupported(f"{place}[{number}].type", "'input_text', 'output_text'")
            case _:
                raise invalid(f"{place}[{number}]", 'expected {"type": "input_text", "text": …}')
    return "\n".join(texts)
