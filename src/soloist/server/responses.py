"""POST /v1/responses: OpenAI's newer shape. Nothing is stored: requests bring all they need."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from soloist.engine import Completion
from soloist.sampling.logprobs import TokenLogprobs
from soloist.server import figures, likelihood
from soloist.server.bodies import prepared, ready_of
from soloist.server.generation import Generation, Whole, collect
from soloist.server.host import Ready
from soloist.server.items import Items
from soloist.server.preparation.jobs import RESPONSES
from soloist.server.preparation.prepared import Prepared, with_warnings
from soloist.server.preparation.responses import SEALED, ResponsesRequest
from soloist.server.problems import Problem
from soloist.server.replies import long_json
from soloist.server.sse import Events, event
from soloist.server.tracing import CHAT, RequestTrace
from soloist.text.parts import PartReader


async def responses(request: Request) -> Response:
    """Answer a conversation."""
    accepted, host, ready = time.perf_counter(), request.app.state.host, ready_of(request)
    found, grammar = await prepared(request, ready, RESPONSES)
    (one,), asked = found.prompts, found.fields
    request_id = f"resp_{uuid.uuid4().hex}"
    trace = RequestTrace(request.headers, CHAT, found.model, accepted)
    generation = Generation(host, ready, request_id, [one], accepted, trace, grammar)
    items = Items(seals_reasoning=SEALED in (asked.include or ()))
    reader = PartReader(found.style, found.prompt_end)
    reply = _Reply(ready, _head(found, request_id), reader, items)
    if asked.stream:
        return Events(generation, reply.stream(generation), reply.last_words)
    (answer,) = await collect(request, generation)
    body = await asyncio.to_thread(lambda: long_json(reply.whole(answer)))
    return Response(body, media_type="application/json")


def _head(found: Prepared[ResponsesRequest], request_id: str) -> dict[str, object]:
    """Fields of every reply: the values that count, whether they were given or not."""
    asked, (one,) = found.fields, found.prompts
    head = {
        "id": request_id,
        "object": "response",
        "created_at": int(time.time()),
        "model": found.model,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "metadata": asked.metadata or {},
        "temperature": one.params.temperature,
        "top_p": one.params.top_p,
        "text": {"format": _format(asked)},
        "tools": asked.tools or [],
        "tool_choice": asked.tool_choice or "auto",
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": None,
        "store": False,
        "truncation": "disabled",
        "error": None,
    }
    return with_warnings(head, found.warnings)


def _format(asked: ResponsesRequest) -> dict[str, object]:
    """What the text was to look like, with the defaults that clients expect."""
    given = asked.text.format if asked.text else None
    if given is None or given.type != "json_schema":
        return {"type": "text" if given is None else given.type}
    shown = given.model_dump(by_alias=True, exclude_none=True)
    return {"name": "answer", **shown, "strict": True}


class _Reply:
    """The shape of the replies to one request."""

    def __init__(
        self, ready: Ready, head: dict[str, object], reader: PartReader, items: Items
    ) -> None:
        self._ready, self._head, self._reader = ready, head, reader
        self._items = items
        self._num_events = 0

    def whole(self, answer: Whole) -> dict[str, object]:
        """The reply at the end."""
        end = answer.end
        parts = self._reader.push(end.text) + self._reader.finish()
        list(self._items.events(parts, self._likely(end.token_ids, answer.logprobs)))
        list(self._items.finish(_status(end)))
        return self._body(end)

    def _likely(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> list[dict[str, object]]:
        return likelihood.entries(self._ready.engine.tokenizer, token_ids, logprobs)

    def _body(self, end: Completion) -> dict[str, object]:
        t, status = end.timings, _status(end)
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        body: dict[str, object] = {
            **self._head,
            "status": status,
            "incomplete_details": details,
            "output": self._items.output,
            "usage": {
                "input_tokens": t.prompt_tokens,
                "input_tokens_details": {"cached_tokens": t.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": t.new_tokens,
                "output_tokens_details": {"reasoning_tokens": self._count_reasoning()},
                "total_tokens": t.prompt_tokens + t.new_tokens,
            },
            "timings": figures.timings(t, self._ready),
        }
        return body | ({"warning": self._reader.warning} if self._reader.warning else {})

    def _count_reasoning(self) -> int:
        """Tokens of the reasoning's text, without its marks."""
        encode = self._ready.engine.tokenizer.encode
        thoughts = [item for item in self._items.output if item["type"] == "reasoning"]
        texts = [part["text"] for item in thoughts for part in item["content"]]
        return sum(len(encode(text, add_special_tokens=False)) for text in texts)

    async def stream(self, generation: Generation) -> AsyncIterator[bytes]:
        """The reply as events; what comes before the first text comes with it."""
        begun = {
            **self._head, "status": "in_progress", "incomplete_details": None, "output": [],
            "usage": None,
        }  # fmt: skip
        has_begun = False
        async for delta in generation.deltas():
            end = delta.end
            parts = self._reader.push(delta.text) + (self._reader.finish() if end else [])
            written: list[bytes] = []
            if not has_begun and (parts or end is not None):
                has_begun = True
                written += [self._event(x, {"response": begun}) for x in ("created", "in_progress")]
            likely = self._likely(delta.token_ids, delta.logprobs)
            written += [self._event(*one) for one in self._items.events(parts, likely)]
            if end is not None:
                status = _status(end)
                written += [self._event(*one) for one in self._items.finish(status)]
                # Counting its reasoning encodes it anew.
                body = await asyncio.to_thread(self._body, end)
                written.append(self._event(status, {"response": body}))
            if written:
                yield b"".join(written)

    def last_words(self, problem: Problem) -> bytes:
        """The event of an error, behind all others."""
        told = {"message": problem.message, "code": problem.code, "param": problem.param}
        return event({"type": "error", "sequence_number": self._num_events, **told}, "error")

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        name, number = f"response.{kind}", self._num_events
        self._num_events += 1
        return event({"type": name, "sequence_number": number, **fields}, name)


def _status(end: Completion) -> str:
    return "incomplete" if end.finish_reason == "length" else "completed"
