"""POST /v1/messages, as Anthropic's clients speak."""

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from soloist.engine import Completion
from soloist.server import figures
from soloist.server.blocks import Blocks, whole_blocks
from soloist.server.bodies import prepared, ready_of
from soloist.server.generation import Generation, collect
from soloist.server.host import Ready
from soloist.server.preparation.jobs import MESSAGES
from soloist.server.preparation.messages import MessagesRequest
from soloist.server.preparation.prepared import Prepared, with_warnings
from soloist.server.problems import Problem
from soloist.server.replies import json_reply
from soloist.server.sse import Events, event
from soloist.server.tracing import CHAT, RequestTrace
from soloist.text.parts import Part, PartReader

_STOP = {"eos": "end_turn", "stop": "stop_sequence", "length": "max_tokens"}


async def messages(request: Request) -> Response:
    """Answer a conversation."""
    accepted, host, ready = time.perf_counter(), request.app.state.host, ready_of(request)
    found, grammar = await prepared(request, ready, MESSAGES)
    request_id = f"msg_{uuid.uuid4().hex}"
    trace = RequestTrace(request.headers, CHAT, found.model, accepted)
    generation = Generation(host, ready, request_id, found.prompts, accepted, trace, grammar)
    reader = PartReader(found.style, found.prompt_end)
    reply = _Message(ready, request_id, found, reader)
    if found.fields.stream:
        return Events(generation, reply.stream(generation), _last_words)
    (answer,) = await collect(request, generation)
    return json_reply(reply.whole(answer.end))


class _Message:
    """The shape of the replies to one request."""

    def __init__(
        self, ready: Ready, request_id: str, found: Prepared[MessagesRequest], reader: PartReader
    ) -> None:
        self._ready, self._reader = ready, reader
        head = {"id": request_id, "type": "message", "role": "assistant", "model": found.model}
        self._head = with_warnings(head, found.warnings)
        thinking = found.fields.thinking
        self._omits_thoughts = thinking is not None and thinking.display == "omitted"

    def whole(self, end: Completion) -> dict[str, object]:
        """The reply at the end."""
        t = end.timings
        parts = self._parts(end.text, is_last=True)
        return {
            **self._head,
            "content": whole_blocks(parts),
            **self._stop(end),
            "usage": _usage(t.prompt_tokens, t.cached_tokens, t.new_tokens),
            "timings": figures.timings(t, self._ready),
        }

    async def stream(self, generation: Generation) -> AsyncIterator[bytes]:
        """The reply as events; what comes before the first text comes with it."""
        (request,) = generation.requests
        blocks, has_begun = Blocks(), False
        async for delta in generation.deltas():
            end = delta.end
            parts = self._parts(delta.text, is_last=end is not None)
            events = list(blocks.events(parts, is_last=end is not None))
            if events and not has_begun:
                has_begun = True
                usage = _usage(len(request.prompt_ids), request.num_cached, delta.num_made)
                events.insert(0, self._start(usage))
            if end is not None:
                events += self._end(end)
            if events:
                yield b"".join(event(one, one["type"]) for one in events)

    def _parts(self, text: str, *, is_last: bool) -> list[Part]:
        """More of the answer; where thoughts are omitted, they are parts without text."""
        parts = self._reader.push(text) + (self._reader.finish() if is_last else [])
        if not self._omits_thoughts:
            return parts
        return [Part(p.kind, "") if p.kind == "reasoning" else p for p in parts]

    def _start(self, usage: dict[str, object]) -> dict[str, Any]:
        message: dict[str, Any] = {
            **self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage,
        }  # fmt: skip
        return {"type": "message_start", "message": message}

    def _end(self, end: Completion) -> list[dict[str, Any]]:
        t = end.timings
        last = {
            "type": "message_delta",
            "delta": self._stop(end),
            "usage": _usage(t.prompt_tokens, t.cached_tokens, t.new_tokens),
            "timings": figures.timings(t, self._ready),
        }
        return [last, {"type": "message_stop"}]

    def _stop(self, end: Completion) -> dict[str, object]:
        reason = _STOP[end.finish_reason]
        if end.finish_reason != "length" and self._reader.num_calls:
            reason = "tool_use"
        elif end.finish_reason == "stop" and end.stop is None:
            reason = "end_turn"
        stop: dict[str, object] = {"stop_reason": reason, "stop_sequence": end.stop}
        return stop | ({"warning": self._reader.warning} if self._reader.warning else {})


def _usage(prompt_tokens: int, cached_tokens: int, new_tokens: int) -> dict[str, object]:
    """Here cached tokens are no part of the input."""
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": new_tokens,
    }


def _last_words(problem: Problem) -> bytes:
    return event(problem.anthropic_body(), "error")
