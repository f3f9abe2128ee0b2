"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's clients speak."""

import time
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from soloist.engine import Completion, Engine
from soloist.errors import SoloistError
from soloist.server import figures
from soloist.server.bodies import read
from soloist.server.fields import Fields, Harmless, Number, SamplingFields, only
from soloist.server.generation import Asked, Generation, collect
from soloist.server.host import Ready
from soloist.server.names import served_name
from soloist.server.problems import Problem, invalid, problem_of, unsupported
from soloist.server.prompts import elsewhere
from soloist.server.replies import json_reply
from soloist.server.sse import Events, event

_STOP = {"eos": "end_turn", "stop": "stop_sequence", "length": "max_tokens"}

# One client writes a header that changes with every request into its system prompt. It is no part
# of what the model is asked, and would keep prompts from ever sharing a beginning.
_BILLING_HEADER = "x-anthropic-billing-header"


class ConversationFields(Fields):
    """What is asked of the model."""

    model: str | None = None
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: only([]) = None  # type: ignore[valid-type]
    tool_choice: only({"type": "none"}, {"type": "auto"}) = None  # type: ignore[valid-type]
    thinking: only({"type": "disabled"}) = None  # type: ignore[valid-type]


class CountRequest(ConversationFields):
    """POST /v1/messages/count_tokens."""


class MessagesRequest(ConversationFields):
    """POST /v1/messages."""

    max_tokens: int = Field(description="Most new tokens.")
    temperature: Number | None = Field(default=None, description="0 is greedy; default 1.")
    top_p: Number | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = Field(default=None, max_length=64)
    stream: bool | None = None
    metadata: Harmless = None
    service_tier: Harmless = None


async def messages(request: Request) -> Response:
    """Answer a conversation."""
    accepted, host = time.perf_counter(), request.app.state.host
    asked = await read(request, MessagesRequest, host.config.most_body_bytes)
    ready = host.ready()
    model = served_name(host.config, asked.model)
    one = await elsewhere([asked.messages, asked.system], lambda: _prepared(ready.engine, asked))
    request_id = f"msg_{uuid.uuid4().hex}"
    generation = Generation(host, ready, request_id, [one], accepted)
    reply = _Message(ready, request_id, model)
    if asked.stream:
        return Events(generation, _with_errors(reply.stream(generation)))
    (answer,) = await collect(request, generation)
    return json_reply(reply.whole(answer.end))


async def count_tokens(request: Request) -> Response:
    """How long a prompt would be."""
    host = request.app.state.host
    asked = await read(request, CountRequest, host.config.most_body_bytes)
    served_name(host.config, asked.model)
    engine = host.ready().engine
    ids = await elsewhere([asked.messages, asked.system], lambda: _prompt_ids(engine, asked))
    return json_reply({"input_tokens": len(ids)})


def problem_body(problem: Problem) -> dict[str, object]:
    """An error as Anthropic's clients read it."""
    kind = "api_error" if problem.status >= 500 else problem.kind
    return {"type": "error", "error": {"type": kind, "message": problem.message}}


def _prepared(engine: Engine, asked: MessagesRequest) -> Asked:
    fields = SamplingFields(
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        stop=asked.stop_sequences,
    )
    params = fields.params(asked.max_tokens)
    prompt_ids = _prompt_ids(engine, asked)
    engine.check_prompt(prompt_ids, asked.max_tokens)
    return Asked(prompt_ids, params)


def _prompt_ids(engine: Engine, asked: ConversationFields) -> list[int]:
    chat: list[dict[str, Any]] = []
    if system := _system(asked.system):
        chat.append({"role": "system", "content": system})
    for index, message in enumerate(asked.messages):
        chat.append(_plain(message, f"messages[{index}]"))
    # A message of the assistant at the end is the beginning of its answer.
    continues = bool(chat) and chat[-1]["role"] == "assistant"
    text = engine.chat_template.render(chat, continue_final_message=continues)
    return engine.tokenizer.encode(text, add_special_tokens=False)


def _system(given: str | list[dict[str, Any]] | None) -> str:
    if given is None or isinstance(given, str):
        return given or ""
    texts = [_text(block, f"system[{n}]") for n, block in enumerate(given)]
    return "\n".join(text for text in texts if not text.startswith(_BILLING_HEADER))


def _plain(message: Mapping[str, Any], place: str) -> dict[str, Any]:
    """A message as templates read it: blocks of text are one text, a line each."""
    if message.get("role") not in ("user", "assistant"):
        raise invalid(f"{place}.role", "expected 'user' or 'assistant'")
    if extra := sorted(set(message) - {"role", "content"}):
        raise unsupported(f"{place}.{extra[0]}")
    plain: dict[str, Any] = {"role": message["role"]}
    content = message.get("content")
    if isinstance(content, list):
        blocks = list(enumerate(content))
        thoughts = [block for _, block in blocks if _kind(block) == "thinking"]
        if thoughts and plain["role"] == "assistant":
            plain["reasoning_content"] = "\n".join(str(x.get("thinking", "")) for x in thoughts)
            blocks = [(n, block) for n, block in blocks if _kind(block) != "thinking"]
        content = "\n".join(_text(block, f"{place}.content[{n}]") for n, block in blocks)
    if not isinstance(content, str):
        raise invalid(f"{place}.content", "expected a text or a list of blocks")
    plain["content"] = content
    return plain


def _kind(block: object) -> object:
    return block.get("type") if isinstance(block, dict) else None


def _text(block: object, place: str) -> str:
    match block:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": str(kind)} if kind != "text":
            raise unsupported(f"{place}.type", "'text'")
    raise invalid(place, 'expected {"type": "text", "text": …}')


class _Message:
    """The shape of the replies to one request."""

    def __init__(self, ready: Ready, request_id: str, model: str) -> None:
        self._ready = ready
        self._head = {"id": request_id, "type": "message", "role": "assistant", "model": model}

    def whole(self, end: Completion) -> dict[str, object]:
        """The reply at the end."""
        t = end.timings
        return {
            **self._head,
            "content": [{"type": "text", "text": end.text}],
            **_stop(end),
            "usage": _usage(t.prompt_tokens, t.cached_tokens, t.new_tokens),
            "timings": figures.timings(t, self._ready),
        }

    async def stream(self, generation: Generation) -> AsyncIterator[bytes]:
        """The reply as events; all that comes before the first text comes with it."""
        (ticket,) = generation.tickets
        num_prompt, has_begun = len(ticket.prompt_ids), False
        async for delta in generation.deltas():
            parts = []
            if not has_begun and (delta.text or delta.end is not None):
                has_begun = True
                parts += self._start(num_prompt, ticket.num_cached, delta.num_made)
            if delta.text:
                text = {"type": "text_delta", "text": delta.text}
                parts.append(_event("content_block_delta", index=0, delta=text))
            if (end := delta.end) is not None:
                t = end.timings
                parts += [
                    _event("content_block_stop", index=0),
                    _event(
                        "message_delta",
                        delta=_stop(end),
                        usage=_usage(t.prompt_tokens, t.cached_tokens, t.new_tokens),
                        timings=figures.timings(t, self._ready),
                    ),
                    _event("message_stop"),
                ]
            if parts:
                yield b"".join(parts)

    def _start(self, num_prompt: int, num_cached: int, num_made: int) -> list[bytes]:
        message: dict[str, object] = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(num_prompt, num_cached, num_made),
        }
        block = {"type": "text", "text": ""}
        return [
            _event("message_start", message=message),
            _event("content_block_start", index=0, content_block=block),
        ]


def _event(kind: str, **fields: object) -> bytes:
    return event({"type": kind, **fields}, kind)


def _stop(end: Completion) -> dict[str, object]:
    reason = "end_turn" if end.finish_reason == "stop" and end.stop is None else None
    return {"stop_reason": reason or _STOP[end.finish_reason], "stop_sequence": end.stop}


def _usage(prompt_tokens: int, cached_tokens: int, new_tokens: int) -> dict[str, object]:
    """Here cached tokens are no part of the input."""
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": new_tokens,
    }


async def _with_errors(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    try:
        async for part in body:
            yield part
    except Problem as problem:
        yield event(problem_body(problem), "error")
    except SoloistError as error:
        yield event(problem_body(problem_of(error)), "error")
