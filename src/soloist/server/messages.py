"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's clients speak."""

import time
import uuid
from collections.abc import AsyncIterator
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from soloist.engine import Completion, Engine
from soloist.errors import SoloistError
from soloist.server import figures
from soloist.server.blocks import Blocks, whole_blocks
from soloist.server.bodies import read
from soloist.server.conversation import plain_conversation, plain_tools, system_text
from soloist.server.fields import Fields, Harmless, Number, OutputFields, SamplingFields, only
from soloist.server.generation import Asked, Generation, collect
from soloist.server.host import Ready
from soloist.server.names import served_name
from soloist.server.parts import PROMPT_END, part_format, shown_ids
from soloist.server.problems import Problem, problem_of, unsupported
from soloist.server.prompts import elsewhere, for_template
from soloist.server.replies import json_reply
from soloist.server.shapes import Shape, ToolUse, anthropic_choice, grammar_of, output_shape
from soloist.server.sse import Events, event
from soloist.server.tracing import CHAT, RequestTrace
from soloist.text.parts import PartReader

_STOP = {"eos": "end_turn", "stop": "stop_sequence", "length": "max_tokens"}
_DISABLED, _ADAPTIVE = {"type": "disabled"}, {"type": "adaptive"}
# What Anthropic does where the field is left out, and what is done here: clients send it.
_KEEP_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}


class ConversationFields(Fields):
    """What is asked of the model."""

    model: str | None = None
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = Field(
        default=None, description="For models whose calls can be read."
    )
    tool_choice: dict[str, Any] | None = Field(
        default=None, description="Type auto, none, any, or tool with a name."
    )
    thinking: only(_DISABLED, _ADAPTIVE) = None  # type: ignore[valid-type]
    context_management: only({"edits": []}, _KEEP_ALL) = None  # type: ignore[valid-type]
    output_config: OutputFields | None = None
    cache_control: Harmless = None

    @property
    def offers_tools(self) -> bool:
        """Whether the model is told of tools."""
        return bool(self.tools) and anthropic_choice(self.tool_choice)[0].kind != "none"


class CountRequest(ConversationFields):
    """POST /v1/messages/count_tokens."""


class MessagesRequest(ConversationFields):
    """POST /v1/messages."""

    max_tokens: int = Field(description="Most new tokens.")
    temperature: Number | None = Field(default=None, description="0 is greedy; default 1.")
    top_p: Number | None = None
    top_k: int | None = None
    stop_sequences: list[Annotated[str, Field(min_length=1)]] | None = Field(
        default=None, max_length=64
    )
    stream: bool | None = None
    metadata: Harmless = None
    service_tier: Harmless = None


async def messages(request: Request) -> Response:
    """Answer a conversation."""
    accepted, host = time.perf_counter(), request.app.state.host
    asked = await read(request, MessagesRequest, host.config.most_body_bytes)
    ready = host.ready()
    model = served_name(host.config, asked.model)
    given = [asked.messages, asked.system, asked.tools]
    use = _tool_use(asked)
    shape = output_shape(asked.output_config.format if asked.output_config else None)
    one, reader = await elsewhere(
        given,
        lambda: _prepared(ready.engine, asked, shape, use),
        is_slow=shape is not None or bool(use.field),
    )
    request_id = f"msg_{uuid.uuid4().hex}"
    trace = RequestTrace(request.headers, CHAT, model, accepted)
    generation = Generation(host, ready, request_id, [one], accepted, trace)
    reply = _Message(ready, request_id, model, reader)
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

    def count() -> int:
        text = _prompt(engine, asked)
        return len(engine.tokenizer.encode(text, add_special_tokens=False))

    given = [asked.messages, asked.system, asked.tools]
    return json_reply({"input_tokens": await elsewhere(given, count)})


def _tool_use(asked: MessagesRequest) -> ToolUse:
    choice, several = anthropic_choice(asked.tool_choice)
    tools = _tools(asked)
    strict = frozenset(n for n, _ in enumerate(tools) if (asked.tools or ())[n].get("strict"))
    return ToolUse(
        tools, strict, choice, several, "tools[{}].input_schema",
        "tool_choice.disable_parallel_tool_use",
    )  # fmt: skip


def _prepared(
    engine: Engine, asked: MessagesRequest, shape: Shape | None, use: ToolUse
) -> tuple[Asked, PartReader]:
    """What to ask of the engine, and what takes its answer apart."""
    fields = SamplingFields(
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        stop=asked.stop_sequences,
    )
    params = fields.params(asked.max_tokens)
    text = _prompt(engine, asked)
    prompt_ids = engine.tokenizer.encode(text, add_special_tokens=False)
    engine.check_prompt(prompt_ids, asked.max_tokens)
    style, end = part_format(engine, use.tools), text[-PROMPT_END:]
    grammar = grammar_of(engine, shape, use, style, end)
    one = Asked(prompt_ids, params, shown_ids=shown_ids(engine, style), grammar=grammar)
    return one, PartReader(style, end)


def _prompt(engine: Engine, asked: ConversationFields) -> str:
    system, chat = system_text(asked.system), plain_conversation(asked.messages)
    if system:
        chat.insert(0, {"role": "system", "content": system})
    variables: dict[str, Any] = {}
    if asked.thinking == _DISABLED and part_format(engine, ()).thinks:
        if "enable_thinking" not in engine.chat_template.source:
            raise unsupported("thinking", "leave it out; this model always reasons")
        variables["enable_thinking"] = False
    return engine.chat_template.render(
        for_template(engine, chat),
        tools=_tools(asked) or None,
        # A message of the assistant at the end is the beginning of its answer.
        continue_final_message=bool(chat) and chat[-1]["role"] == "assistant",
        **variables,
    )


def _tools(asked: ConversationFields) -> list[dict[str, Any]]:
    return plain_tools(asked.tools or ()) if asked.offers_tools else []


class _Message:
    """The shape of the replies to one request."""

    def __init__(self, ready: Ready, request_id: str, model: str, reader: PartReader) -> None:
        self._ready, self._reader = ready, reader
        self._head = {"id": request_id, "type": "message", "role": "assistant", "model": model}

    def whole(self, end: Completion) -> dict[str, object]:
        """The reply at the end."""
        t = end.timings
        parts = self._reader.push(end.text) + self._reader.finish()
        return {
            **self._head,
            "content": whole_blocks(parts),
            **self._stop(end),
            "usage": _usage(t.prompt_tokens, t.cached_tokens, t.new_tokens),
            "timings": figures.timings(t, self._ready),
        }

    async def stream(self, generation: Generation) -> AsyncIterator[bytes]:
        """The reply as events; what comes before the first text comes with it."""
        (ticket,) = generation.tickets
        blocks, has_begun = Blocks(), False
        async for delta in generation.deltas():
            end = delta.end
            parts = self._reader.push(delta.text) + (self._reader.finish() if end else [])
            events = list(blocks.events(parts, is_last=end is not None))
            if events and not has_begun:
                has_begun = True
                usage = _usage(len(ticket.prompt_ids), ticket.num_cached, delta.num_made)
                events.insert(0, self._start(usage))
            if end is not None:
                events += self._end(end)
            if events:
                yield b"".join(event(one, one["type"]) for one in events)

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


async def _with_errors(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    try:
        async for part in body:
            yield part
    except Problem as problem:
        yield event(problem.anthropic_body(), "error")
    except SoloistError as error:
        yield event(problem_of(error).anthropic_body(), "error")
