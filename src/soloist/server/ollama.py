"""POST /api/chat and /api/generate, as Ollama's clients speak."""

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from soloist.engine import Completion
from soloist.server.bodies import prepared, ready_of
from soloist.server.generation import Generation, collect
from soloist.server.preparation.jobs import OLLAMA_CHATS, OLLAMA_TEXTS, Job
from soloist.server.preparation.prepared import Prepared
from soloist.server.problems import Problem
from soloist.server.replies import json_reply
from soloist.server.sse import Events
from soloist.server.tracing import CHAT, TEXT, RequestTrace
from soloist.text.parts import Part, PartReader

LINES = "application/x-ndjson"

_DONE = {"eos": "stop", "stop": "stop", "length": "length"}


async def chat(request: Request) -> Response:
    """Answer a conversation."""
    return await _answer(request, is_chat=True)


async def generate(request: Request) -> Response:
    """Answer or continue a text."""
    return await _answer(request, is_chat=False)


async def _answer(request: Request, *, is_chat: bool) -> Response:
    accepted, host, ready = time.perf_counter(), request.app.state.host, ready_of(request)
    job: Job[Any] = OLLAMA_CHATS if is_chat else OLLAMA_TEXTS
    found, grammar = await prepared(request, ready, job)
    shape = _Shape(found, is_chat=is_chat)
    streams = found.fields.stream is not False
    if not found.prompts:
        body = shape.loaded()
        return Response(_line(body), media_type=LINES) if streams else json_reply(body)
    request_id = f"ollama-{uuid.uuid4().hex}"
    trace = RequestTrace(request.headers, CHAT if is_chat else TEXT, found.model, accepted)
    generation = Generation(host, ready, request_id, found.prompts, accepted, trace, grammar)
    if streams:
        return Events(generation, shape.stream(generation), _last_words, LINES)
    (answer,) = await collect(request, generation)
    return json_reply(shape.whole(answer.end))


class _Shape:
    """The shape of the replies to one request."""

    def __init__(self, found: Prepared[Any], *, is_chat: bool) -> None:
        self._model, self._is_chat = found.model, is_chat
        self._reader = PartReader(found.style, found.prompt_end)
        self._calls = _Calls()

    def loaded(self) -> dict[str, object]:
        """The reply to a request without a prompt."""
        return {**self._said({"content": ""}), "done": True, "done_reason": "load"}

    def whole(self, end: Completion) -> dict[str, object]:
        """The reply at the end."""
        said: dict[str, Any] = {"content": ""}
        for piece in self._pieces(end.text, is_last=True):
            for key, value in piece.items():
                said[key] = said[key] + value if key in said else value
        return self._said(said) | self._ended(end)

    async def stream(self, generation: Generation) -> AsyncIterator[bytes]:
        """The reply as lines."""
        async for delta in generation.deltas():
            end = delta.end
            said = self._pieces(delta.text, is_last=end is not None)
            lines = [self._said({"content": ""} | piece) | {"done": False} for piece in said]
            if end is not None:
                lines.append(self._said({"content": ""}) | self._ended(end))
            if lines:
                yield b"".join(map(_line, lines))

    def _pieces(self, text: str, *, is_last: bool) -> list[dict[str, Any]]:
        parts = self._reader.push(text) + (self._reader.finish() if is_last else [])
        return self._calls.pieces(parts, is_last=is_last)

    def _said(self, said: dict[str, Any]) -> dict[str, object]:
        head = {"model": self._model, "created_at": timestamp(time.time())}
        if self._is_chat:
            return head | {"message": {"role": "assistant", **said}}
        return head | {"response": said.pop("content"), **said}

    def _ended(self, end: Completion) -> dict[str, object]:
        t = end.timings
        last: dict[str, object] = {
            "done": True,
            "done_reason": _DONE[end.finish_reason],
            "total_duration": _ns(t.total_s),
            "load_duration": 0,
            "prompt_eval_count": t.prompt_tokens,
            "prompt_eval_duration": _ns(t.ttft_s - t.queue_s),
            "eval_count": t.new_tokens,
            "eval_duration": _ns(t.decode_s),
        }
        return last | ({"warning": self._reader.warning} if self._reader.warning else {})


class _Calls:
    """Parts of an answer in Ollama's shape, where a call has all of its arguments, as an object."""

    def __init__(self) -> None:
        self._name: str | None = None
        self._arguments = ""
        self._count = 0

    def pieces(self, parts: Sequence[Part], *, is_last: bool) -> list[dict[str, Any]]:
        """Fields of a message for more of the answer."""
        made: list[dict[str, Any]] = []
        for part in parts:
            if part.kind == "arguments":
                self._arguments += part.text
                continue
            made += self._close()
            if part.kind == "call":
                self._name = part.text
            else:
                made.append({"content" if part.kind == "content" else "thinking": part.text})
        return made + (self._close() if is_last else [])

    def _close(self) -> list[dict[str, Any]]:
        """The call that is complete, if any; what is no object is given as text."""
        if self._name is None:
            return []
        name, text = self._name, self._arguments
        self._name, self._arguments = None, ""
        try:
            arguments = orjson.loads(text or "{}")
        except orjson.JSONDecodeError:
            arguments = None
        if not isinstance(arguments, dict):
            return [{"content": name + text}]
        function = {"index": self._count, "name": name, "arguments": arguments}
        self._count += 1
        return [{"tool_calls": [{"id": f"call_{uuid.uuid4().hex[:8]}", "function": function}]}]


def timestamp(seconds: float) -> str:
    """RFC 3339, as Go reads it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _line(body: dict[str, object]) -> bytes:
    return orjson.dumps(body) + b"\n"


def _last_words(problem: Problem) -> bytes:
    return _line(problem.ollama_body())
