"""POST /v1/chat/completions."""

import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace

import orjson
from starlette.requests import Request
from starlette.responses import Response

from soloist.engine import Completion, Engine
from soloist.sampling import SamplingParams
from soloist.server import figures, likelihood
from soloist.server.bodies import read
from soloist.server.fields import ChatRequest
from soloist.server.generation import Asked, Delta, Generation, Whole, collect
from soloist.server.host import Ready
from soloist.server.names import served_name
from soloist.server.problems import invalid
from soloist.server.prompts import chat_ids, elsewhere
from soloist.server.replies import json_reply
from soloist.server.sse import DONE, Events, event, with_errors

# A chunk: its start, index, role, text and end.
_TEXT = b'%b%d,"delta":{%b"content":%b},"logprobs":null,"finish_reason":null}]%b}\n\n'

FINISH = {"eos": "stop", "stop": "stop", "length": "length", "cancelled": "stop"}


async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    accepted, host = time.perf_counter(), request.app.state.host
    asked = await read(request, ChatRequest, host.config.most_body_bytes)
    ready = host.ready()
    model = served_name(host.config, asked.model)
    asked.check_stream_options()
    if asked.top_logprobs is not None and not asked.logprobs:
        raise invalid("top_logprobs", "only beside logprobs: true")
    one = await elsewhere(asked.messages, lambda: _prepared(ready.engine, asked))
    answers = [replace(one, params=params) for params in choices(one.params, asked.n or 1)]
    request_id = f"chatcmpl-{uuid.uuid4().hex}"
    generation = Generation(host, ready, request_id, answers, accepted)
    chat = _Chat(ready, asked, request_id, model, one)
    if asked.stream:
        return Events(generation, with_errors(chat.stream(generation)))
    return json_reply(chat.whole(await collect(request, generation)))


def choices(params: SamplingParams, count: int) -> list[SamplingParams]:
    """Parameters of several answers to one prompt; a seed counts on, or all were the same."""
    if params.seed is None:
        return [params] * count
    return [replace(params, seed=(params.seed + i) % 2**64) for i in range(count)]


def room(engine: Engine, prompt_ids: list[int], wanted: int | None) -> int:
    """Tokens that may be made: what was asked for, or all that the context holds.

    Raises:
        RequestError: the prompt is empty or too long.
    """
    if wanted is None:
        engine.check_prompt(prompt_ids, 1)
        return engine.resolved.context_tokens - len(prompt_ids)
    engine.check_prompt(prompt_ids, wanted)
    return wanted


def _prepared(engine: Engine, asked: ChatRequest) -> Asked:
    wanted = asked.max_completion_tokens
    if wanted is None:
        wanted = asked.max_tokens
    elif asked.max_tokens not in (None, wanted):
        raise invalid("max_tokens", f"contradicts max_completion_tokens, which is {wanted}")
    # Checked before the prompt: a bad value is a bad value, however long the prompt is.
    params = asked.params(max(1, engine.resolved.context_tokens) if wanted is None else wanted)
    params.check_vocabulary(engine.config.vocab_size)
    prompt_ids = chat_ids(engine, asked)
    params = replace(params, max_tokens=room(engine, prompt_ids, wanted))
    return Asked(prompt_ids, params, (asked.top_logprobs or 0) if asked.logprobs else None)


class _Chat:
    """The shape of the replies to one request."""

    def __init__(
        self, ready: Ready, asked: ChatRequest, request_id: str, model: str, one: Asked
    ) -> None:
        self._ready, self._asked, self._one = ready, asked, one
        self._shows_more = bool(asked.logprobs or asked.return_token_ids)
        self._head = {
            "id": request_id,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, answers: list[Whole]) -> dict[str, object]:
        """The reply at the end."""
        ends = [answer.end for answer in answers]
        body = {
            **self._head,
            "choices": [self._choice(i, answer) for i, answer in enumerate(answers)],
            "usage": figures.usage(ends),
            "timings": figures.timings(ends[0].timings, self._ready),
        }
        if self._asked.return_token_ids:
            body["prompt_token_ids"] = list(self._one.prompt_ids)
        return body

    def _choice(self, index: int, answer: Whole) -> dict[str, object]:
        end = answer.end
        choice: dict[str, object] = {
            "index": index,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": None,
            "finish_reason": FINISH[end.finish_reason],
            "stop_reason": end.stop,
        }
        if self._asked.logprobs:
            tokenizer = self._ready.engine.tokenizer
            choice["logprobs"] = likelihood.for_chat(tokenizer, end.token_ids, answer.logprobs)
        if self._asked.return_token_ids:
            choice["token_ids"] = list(end.token_ids)
        return choice

    async def stream(self, generation: Generation) -> AsyncIterator[bytes]:
        """The reply as events."""
        head = {**self._head, "object": "chat.completion.chunk"}
        # Everything of a chunk but index, text and usage: written once a stream.
        start = b"data: " + orjson.dumps(head)[:-1] + b',"choices":[{"index":'
        begun: set[int] = set()
        ends: dict[int, Completion] = {}
        made: dict[int, int] = {}
        async for delta in generation.deltas():
            made[delta.index] = delta.num_made
            tail = self._tail(made)
            is_first = delta.index not in begun
            if self._shows_more:
                if delta.token_ids or delta.text:
                    begun.add(delta.index)
                    yield self._detailed(head, delta, tail, is_first=is_first)
            elif delta.text:
                # The role travels with the first text: alone it would count as the first token.
                begun.add(delta.index)
                role = b'"role":"assistant",' if is_first else b""
                yield _TEXT % (start, delta.index, role, orjson.dumps(delta.text), tail)
            if delta.end is not None:
                ends[delta.index] = delta.end
                yield self._last(head, delta.index, delta.end, is_first=delta.index not in begun)
        if self._asked.includes_usage:
            answers = [ends[i] for i in sorted(ends)]
            yield event({**head, "choices": [], "usage": figures.usage(answers)})
        yield DONE

    def _tail(self, made: dict[int, int]) -> bytes:
        if not self._asked.counts_on:
            return b',"usage":null' if self._asked.includes_usage else b""
        count = figures.token_usage(len(self._one.prompt_ids), sum(made.values()))
        return b',"usage":' + orjson.dumps(count)

    def _detailed(
        self, head: dict[str, object], delta: Delta, tail: bytes, *, is_first: bool
    ) -> bytes:
        choice: dict[str, object] = {
            "index": delta.index,
            "delta": ({"role": "assistant"} if is_first else {}) | {"content": delta.text},
            "logprobs": None,
            "finish_reason": None,
        }
        if self._asked.logprobs:
            tokenizer = self._ready.engine.tokenizer
            choice["logprobs"] = likelihood.for_chat(tokenizer, delta.token_ids, delta.logprobs)
        body = {**head, "choices": [choice]}
        if self._asked.return_token_ids:
            choice["token_ids"] = list(delta.token_ids)
            if is_first:
                body["prompt_token_ids"] = list(self._one.prompt_ids)
        return b"data: " + orjson.dumps(body)[:-1] + tail + b"}\n\n"

    def _last(
        self, head: dict[str, object], index: int, end: Completion, *, is_first: bool
    ) -> bytes:
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""} if is_first else {},
            "logprobs": None,
            "finish_reason": FINISH[end.finish_reason],
            "stop_reason": end.stop,
        }
        return event(
            {**head, "choices": [choice], "timings": figures.timings(end.timings, self._ready)}
        )
