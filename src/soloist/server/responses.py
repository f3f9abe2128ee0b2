"""POST /v1/responses: OpenAI's newer shape. Nothing is stored: requests bring all they need."""

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from soloist.engine import Completion, Engine
from soloist.errors import SoloistError
from soloist.sampling.logprobs import TokenLogprobs
from soloist.server import figures, likelihood
from soloist.server.bodies import read
from soloist.server.chat import room
from soloist.server.fields import (
    MOST_TOP_LOGPROBS,
    Harmless,
    SamplingFields,
    TextFields,
    only,
)
from soloist.server.generation import Asked, Generation, Whole, collect
from soloist.server.host import Ready
from soloist.server.items import Items, plain_conversation, plain_tools
from soloist.server.names import served_name
from soloist.server.parts import PROMPT_END, part_format, shown_ids
from soloist.server.problems import Problem, invalid, problem_of
from soloist.server.prompts import elsewhere, for_template
from soloist.server.replies import json_reply
from soloist.server.shapes import Shape, ToolUse, grammar_of, openai_choice, text_shape
from soloist.server.sse import Events, event
from soloist.server.tracing import CHAT, RequestTrace
from soloist.text.parts import PartReader

_SEALED, _LIKELY = "reasoning.encrypted_content", "message.output_text.logprobs"


class ResponsesRequest(SamplingFields):
    """POST /v1/responses."""

    model: str | None = None
    input: str | list[dict[str, Any]] = Field(description="Text, or a list of messages.")
    instructions: str | None = Field(default=None, description="A system message before all.")
    max_output_tokens: int | None = Field(default=None, description="Default: all that fits.")
    stream: bool | None = None
    store: Harmless = None
    user: Harmless = None
    client_metadata: Harmless = None
    metadata: dict[str, str] | None = Field(default=None, description="Given back as it is.")
    service_tier: Harmless = None
    safety_identifier: Harmless = None
    prompt_cache_key: Harmless = None
    prompt_cache_retention: Harmless = None
    parallel_tool_calls: bool | None = None
    truncation: only("disabled") = None  # type: ignore[valid-type]
    text: TextFields | None = None
    tools: list[dict[str, Any]] | None = Field(
        default=None, description="Functions, for models whose calls can be read."
    )
    tool_choice: str | dict[str, Any] | None = Field(
        default=None, description="auto, none, required, or the name of a function."
    )
    include: only(  # type: ignore[valid-type]
        [], [_SEALED], [_LIKELY], [_SEALED, _LIKELY], [_LIKELY, _SEALED]
    ) = None
    background: only(False) = None  # type: ignore[valid-type]
    stream_options: only({}, {"include_obfuscation": False}) = None  # type: ignore[valid-type]
    reasoning: only({}, {"summary": "auto"}) = None  # type: ignore[valid-type]
    previous_response_id: only() = None  # type: ignore[valid-type]
    conversation: only() = None  # type: ignore[valid-type]
    prompt: only() = None  # type: ignore[valid-type]
    top_logprobs: int | None = Field(
        default=None, ge=0, le=MOST_TOP_LOGPROBS, description=f"Beside include: {_LIKELY}."
    )

    @property
    def shown_logprobs(self) -> int | None:
        """Alternatives to name beside each token; None for no log probabilities."""
        if _LIKELY in (self.include or ()):
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise invalid("top_logprobs", f"only beside include: ['{_LIKELY}']")
        return None

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """Tools that the model is told of."""
        return [] if self.tool_choice == "none" else self.tools or []


async def responses(request: Request) -> Response:
    """Answer a conversation."""
    accepted, host = time.perf_counter(), request.app.state.host
    asked = await read(request, ResponsesRequest, host.config.most_body_bytes)
    ready = host.ready()
    model = served_name(host.config, asked.model)
    given, use = [asked.input, asked.instructions, asked.tools], _tool_use(asked)
    shape = text_shape(asked.text.format if asked.text else None)
    one, reader = await elsewhere(
        given,
        lambda: _prepared(ready.engine, asked, shape, use),
        is_slow=shape is not None or bool(use.field),
    )
    request_id = f"resp_{uuid.uuid4().hex}"
    trace = RequestTrace(request.headers, CHAT, model, accepted)
    generation = Generation(host, ready, request_id, [one], accepted, trace)
    items = Items(seals_reasoning=_SEALED in (asked.include or ()))
    reply = _Reply(ready, _head(asked, one, request_id, model), reader, items)
    if asked.stream:
        return Events(generation, _with_errors(reply.stream(generation)))
    (answer,) = await collect(request, generation)
    return json_reply(reply.whole(answer))


def _tool_use(asked: ResponsesRequest) -> ToolUse:
    tools, choice = plain_tools(asked.offered_tools), openai_choice(asked.tool_choice)
    strict = frozenset(n for n, tool in enumerate(asked.offered_tools) if tool.get("strict"))
    several = asked.parallel_tool_calls is not False
    return ToolUse(tools, strict, choice, several, "tools[{}].parameters")


def _prepared(
    engine: Engine, asked: ResponsesRequest, shape: Shape | None, use: ToolUse
) -> tuple[Asked, PartReader]:
    """What to ask of the engine, and what takes its answer apart."""
    wanted, tools = asked.max_output_tokens, use.tools
    params = asked.params(engine.resolved.context_tokens if wanted is None else wanted)
    params.check_vocabulary(engine.config.vocab_size)
    style, shown = part_format(engine, tools), asked.shown_logprobs
    if shown is not None and (style.thinks or style.calls is not None):
        told = "only for answers of one text; here there is reasoning, or tools. Chats have it"
        raise invalid("include", f"'{_LIKELY}' is {told}")
    chat = plain_conversation(asked.input, asked.instructions)
    text = engine.chat_template.render(
        for_template(engine, chat), tools=tools or None, add_generation_prompt=True
    )
    prompt_ids = engine.tokenizer.encode(text, add_special_tokens=False)
    params = replace(params, max_tokens=room(engine, prompt_ids, wanted))
    end = text[-PROMPT_END:]
    grammar = grammar_of(engine, shape, use, style, end)
    one = Asked(prompt_ids, params, shown, shown_ids(engine, style), grammar)
    return one, PartReader(style, end)


def _head(asked: ResponsesRequest, one: Asked, request_id: str, model: str) -> dict[str, object]:
    """Fields of every reply: the values that count, whether they were given or not."""
    return {
        "id": request_id,
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
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
                "input_tokens_details": {
                    "cached_tokens": t.cached_tokens,
                    "cache_write_tokens": 0,
                },
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
                written.append(self._event(status, {"response": self._body(end)}))
            if written:
                yield b"".join(written)

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        name, number = f"response.{kind}", self._num_events
        self._num_events += 1
        return event({"type": name, "sequence_number": number, **fields}, name)


def _status(end: Completion) -> str:
    return "incomplete" if end.finish_reason == "length" else "completed"


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
