"""An answer as Anthropic's blocks of content: text, thinking and the use of tools."""

import json
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from soloist.text.parts import Part

_KINDS = {"content": "text", "reasoning": "thinking", "call": "tool_use"}
_DELTAS = {
    "content": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "arguments": ("input_json_delta", "partial_json"),
}


class Blocks:
    """Blocks of one answer, as events while they grow."""

    def __init__(self) -> None:
        self._index = -1
        self._kind: str | None = None

    def events(self, parts: Sequence[Part], *, is_last: bool) -> Iterator[dict[str, Any]]:
        """Events for more of the answer."""
        for part in parts:
            if part.kind == "call" or part.kind not in ("arguments", self._kind):
                yield from self._stop()
                yield self._start(part)
            if part.kind in _DELTAS and part.text:
                kind, field = _DELTAS[part.kind]
                delta = {"type": kind, field: part.text}
                yield {"type": "content_block_delta", "index": self._index, "delta": delta}
        if is_last:
            if self._index < 0:  # an answer without a word is a block without a word
                yield self._start(Part("content", ""))
            yield from self._stop()

    def _start(self, part: Part) -> dict[str, Any]:
        self._index += 1
        self._kind = part.kind
        block = _empty(part)
        return {"type": "content_block_start", "index": self._index, "content_block": block}

    def _stop(self) -> Iterator[dict[str, Any]]:
        if self._kind is not None:
            self._kind = None
            yield {"type": "content_block_stop", "index": self._index}


def whole_blocks(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Blocks of a whole answer; arguments that are no JSON object are given as text."""
    blocks: list[dict[str, Any]] = []
    arguments = ""
    for part in parts:
        if part.kind == "arguments":
            arguments += part.text
            continue
        _close(blocks, arguments)
        arguments = ""
        kind = _KINDS[part.kind]
        if part.kind == "call" or not blocks or blocks[-1]["type"] != kind:
            blocks.append(_empty(part))
        if part.kind != "call":
            blocks[-1][kind] += part.text
    _close(blocks, arguments)
    return blocks or [_empty(Part("content", ""))]


def _close(blocks: list[dict[str, Any]], arguments: str) -> None:
    if not arguments:
        return
    try:
        given = json.loads(arguments)
    except json.JSONDecodeError:
        given = None
    if isinstance(given, dict):
        blocks[-1]["input"] = given
    else:
        blocks.append({"type": "text", "text": arguments})


def _empty(part: Part) -> dict[str, Any]:
    match part.kind:
        case "call":
            call_id = f"toolu_{uuid.uuid4().hex[:24]}"
            return {"type": "tool_use", "id": call_id, "name": part.text, "input": {}}
        case "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case _:
            return {"type": "text", "text": ""}
