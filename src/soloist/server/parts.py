"""Reasoning and tool calls in the shape of OpenAI's chat."""

import uuid
from collections.abc import Sequence
from typing import Any

from soloist.engine import Completion
from soloist.text.parts import Part, PartFormat, PartReader

FINISH = {"eos": "stop", "stop": "stop", "length": "length"}


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
        return FINISH[end.finish_reason]


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
