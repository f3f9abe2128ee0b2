"""POST /v1/responses: OpenAI's newer shape. Nothing is stored: requests bring all they need."""

import time
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from soloist.engine import Completion, Engine
from soloist.errors import SoloistError
from soloist.server import figures
from soloist.server.bodies import read
from soloist.server.chat import room
from soloist.server.fields import Harmless, SamplingFields, only
from soloist.server.generation import Asked, Generation, collect
from soloist.server.host import Ready
from soloist.server.names import served_name
from soloist.server.problems import Problem, invalid, problem_of, unsupported
from soloist.server.prompts import elsewhere
from soloist.server.replies import json_reply
from soloist.server.sse import Events, event

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_PARTS = ("input_text", "output_text", "text")
_MESSAGE_FIELDS = {"type", "role", "content", "id", "status", "phase"}


class ResponsesRequest(SamplingFields):
    """POST /v1/responses."""

    model: str | None = None
    input: str | list[dict[str, Any]] = Field(description="Text, or a list of messages.")
    instructions: str | None = Field(default=None, description="A system message before all.")
    max_output_tokens: int | None = Field(default=None, description="Default: all that fits.")
    stream: bool | None = None
    store: Harmless = None
    user: Harmless = None
    metadata: dict[str, str] | None = Field(default=None, description="Given back as it is.")
    service_tier: Harmless = None
    safety_identifier: Harmless = None
    prompt_cache_key: Harmless = None
    prompt_cache_retention: Harmless = None
    parallel_tool_calls: Harmless = None
    truncation: only("disabled") = None  # type: ignore[valid-type]
    text: only({"format": {"type": "text"}}) = None  # type: ignore[valid-type]
    tools: only([]) = None  # type: ignore[valid-type]
    tool_choice: only("none", "auto") = None  # type: ignore[valid-type]
    include: only([]) = None  # type: ignore[valid-type]
    background: only(False) = None  # type: ignore[valid-type]
    reasoning: only() = None  # type: ignore[valid-type]
    previous_response_id: only() = None  # type: ignore[valid-type]
    conversation: only() = None  # type: ignore[valid-type]
    prompt: only() = None  # type: ignore[valid-type]
    top_logprobs: only(0) = None  # type: ignore[valid-type]


async def responses(request: Request) -> Response:
    """Answer a conversation."""
    accepted, host = time.perf_counter(), request.app.state.host
    asked = await read(request, ResponsesRequest, host.config.most_body_bytes)
    ready = host.ready()
    model = served_name(host.config, asked.model)
    one = await elsewhere([asked.input, asked.instructions], lambda: _prepared(ready.engine, asked))
    request_id = f"resp_{uuid.uuid4().hex}"
    generation = Generation(host, ready, request_id, [one], accepted)
    reply = _Reply(ready, asked, one, request_id, model)
    if asked.stream:
        return Events(generation, _with_errors(reply.stream(generation)))
    (answer,) = await collect(request, generation)
    return json_reply(reply.whole(answer.end))


def _prepared(engine: Engine, asked: ResponsesRequest) -> Asked:
    wanted = asked.max_output_tokens
    params = asked.params(engine.resolved.context_tokens if wanted is None else wanted)
    params.check_vocabulary(engine.config.vocab_size)
    text = engine.chat_template.render(_conversation(asked), add_generation_prompt=True)
    prompt_ids = engine.tokenizer.encode(text, add_special_tokens=False)
    return Asked(prompt_ids, replace(params, max_tokens=room(engine, prompt_ids, wanted)))


def _conversation(asked: ResponsesRequest) -> list[dict[str, str]]:
    given: list[dict[str, Any]] = (
        [{"role": "user", "content": asked.input}] if isinstance(asked.input, str) else asked.input
    )
    chat = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
    for index, item in enumerate(given):
        chat.append(_plain(item, f"input[{index}]"))
    return chat


def _plain(item: Mapping[str, Any], place: str) -> dict[str, str]:
    """A message as templates read it: parts of text are one text, a line each."""
    if item.get("type", "message") != "message":
        raise unsupported(f"{place}.type", "'message'")
    if extra := sorted(set(item) - _MESSAGE_FIELDS):
        raise unsupported(f"{place}.{extra[0]}")
    role, content = item.get("role"), item.get("content")
    if role not in _ROLES:
        raise invalid(f"{place}.role", f"expected one of {', '.join(_ROLES)}")
    if isinstance(content, list):
        content = "\n".join(_text(part, f"{place}.content[{n}]") for n, part in enumerate(content))
    if not isinstance(content, str):
        raise invalid(f"{place}.content", "expected a text or a list of parts")
    return {"role": _ROLES[role], "content": content}


def _text(part: object, place: str) -> str:
    match part:
        case {"type": str(kind), "text": str(text)} if kind in _PARTS:
            return text
        case {"type": str(kind)} if kind not in _PARTS:
            raise unsupported(f"{place}.type", "'input_text', 'output_text'")
    raise invalid(place, 'expected {"type": "input_text", "text": …}')


class _Reply:
    """The shape of the replies to one request."""

    def __init__(
        self, ready: Ready, asked: ResponsesRequest, one: Asked, request_id: str, model: str
    ) -> None:
        self._ready = ready
        self._item_id = f"msg_{uuid.uuid4().hex}"
        self._num_events = 0
        # The values that count, whether they were given or not.
        self._head: dict[str, object] = {
            "id": request_id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "temperature": one.params.temperature,
            "top_p": one.params.top_p,
            "text": {"format": {"type": "text"}},
            "tools": [],
            "tool_choice": "none",
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "error": None,
        }

    def whole(self, end: Completion) -> dict[str, object]:
        """The reply at the end."""
        t = end.timings
        is_cut = end.finish_reason == "length"
        return {
            **self._head,
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [self._item(end)],
            "usage": {
                "input_tokens": t.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": t.cached_tokens,
                    "cache_write_tokens": 0,
                },
                "output_tokens": t.new_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": t.prompt_tokens + t.new_tokens,
            },
            "timings": figures.timings(t, self._ready),
        }

    def _item(self, end: Completion | None) -> dict[str, object]:
        """The message; without its end, while it grows."""
        status = "in_progress"
        if end is not None:
            status = "incomplete" if end.finish_reason == "length" else "completed"
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [] if end is None else [_part(end.text)],
        }

    async def stream(self, generation: Generation) -> AsyncIterator[bytes]:
        """The reply as events; all that comes before the first text comes with it."""
        has_begun = False
        async for delta in generation.deltas():
            parts = []
            if not has_begun and (delta.text or delta.end is not None):
                has_begun = True
                parts += self._start()
            if delta.text:
                parts.append(self._of_part("output_text.delta", delta=delta.text, logprobs=[]))
            if delta.end is not None:
                parts += self._finish(delta.end)
            if parts:
                yield b"".join(parts)

    def _start(self) -> list[bytes]:
        begun = {
            **self._head, "status": "in_progress", "incomplete_details": None, "output": [],
            "usage": None,
        }  # fmt: skip
        return [
            self._event("created", response=begun),
            self._event("in_progress", response=begun),
            self._event("output_item.added", output_index=0, item=self._item(None)),
            self._of_part("content_part.added", part=_part("")),
        ]

    def _finish(self, end: Completion) -> list[bytes]:
        body = self.whole(end)
        return [
            self._of_part("output_text.done", text=end.text, logprobs=[]),
            self._of_part("content_part.done", part=_part(end.text)),
            self._event("output_item.done", output_index=0, item=self._item(end)),
            self._event(str(body["status"]), response=body),
        ]

    def _of_part(self, kind: str, **fields: object) -> bytes:
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        return self._event(kind, **place, **fields)

    def _event(self, kind: str, **fields: object) -> bytes:
        name, number = f"response.{kind}", self._num_events
        self._num_events += 1
        return event({"type": name, "sequence_number": number, **fields}, name)


def _part(text: str) -> dict[str, object]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


async def _with_errors(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    count = 0
    try:
        async for part in body:
            count += part.count(b"\n\n")
            yield part
    except (Problem, SoloistError) as error:
        problem = error if isinstance(error, Problem) else problem_of(error)
        told = {"message": problem.message, "code": problem.code, "param": problem.param}
        yield event({"type": "error", "sequence_number": count, **told}, "error")
