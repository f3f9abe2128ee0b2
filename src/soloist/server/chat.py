"""POST /v1/chat/completions."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace

import orjson
from starlette.requests import Request
from starlette.responses import Response

from soloist.engine import Completion
from soloist.sampling import SamplingParams
from soloist.server import figures, likelihood
from soloist.server.bodies import prepared, ready_of
from soloist.server.fields import ChatRequest
from soloist.server.generation import Delta, Generation, Whole, collect
from soloist.server.host import Ready
from soloist.server.parts import Teller, message_of
from soloist.server.preparation.jobs import CHATS
from soloist.server.preparation.prepared import Prepared, with_warnings
from soloist.server.replies import json_reply, long_json
from soloist.server.sse import DONE, Events, event, event_with
from soloist.server.tracing import CHAT, RequestTrace

# A chunk: its start, index, text and end.
_TEXT = b'%b%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}]%b}\n\n'


async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    accepted, host, ready = time.perf_counter(), request.app.state.host, ready_of(request)
    found, grammar = await prepared(request, ready, CHATS)
    (one,), asked = found.prompts, found.fields
    answers = [replace(one, params=params) for params in choices(one.params, asked.n or 1)]
    request_id = f"chatcmpl-{uuid.uuid4().hex}"
    chat = _Chat(ready, found, request_id)
    chat.tellers = [Teller(found.style, found.prompt_end) for _ in answers]
    trace = RequestTrace(request.headers, CHAT, found.model, accepted)
    generation = Generation(host, ready, request_id, answers, accepted, trace, grammar)
    if asked.stream:
        words = figures.last_words(generation, ready)
        return Events(generation, chat.stream(generation), words)
    wholes = await collect(request, generation)
    if not asked.logprobs:
        return json_reply(chat.whole(wholes))
    body = await asyncio.to_thread(lambda: long_json(chat.whole(wholes)))
    return Response(body, media_type="application/json")


def choices(params: SamplingParams, count: int) -> list[SamplingParams]:
    """Parameters of several answers to one prompt; a seed counts on, or all were the same."""
    if params.seed is None:
        return [params] * count
    return [replace(params, seed=(params.seed + i) % 2**64) for i in range(count)]


class _Chat:
    """The shape of the replies to one request."""

    def __init__(self, ready: Ready, found: Prepared[ChatRequest], request_id: str) -> None:
        self._ready, self._asked, self._one = ready, found.fields, found.prompts[0]
        self._warnings = found.warnings
        drafting = ready.engine.model.drafting
        if drafting is None and self._one.prediction_ids is not None:
            self._warnings += ("prediction was left out: this server checks no drafts",)
        self.tellers: list[Teller] = []
        self._shows_more = bool(self._asked.logprobs or self._asked.return_token_ids)
        self._head = {
            "id": request_id,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": found.model,
        }

    def whole(self, answers: list[Whole]) -> dict[str, object]:
        """The reply at the end."""
        ends = [answer.end for answer in answers]
        body = {
            **self._head,
            "choices": [self._choice(i, answer) for i, answer in enumerate(answers)],
            "usage": figures.usage(ends, self._ready),
            "timings": figures.timings(ends[0].timings, self._ready),
        }
        if self._asked.return_token_ids:
            body["prompt_token_ids"] = list(self._one.prompt_ids)
        return with_warnings(body, self._warnings)

    def _choice(self, index: int, answer: Whole) -> dict[str, object]:
        end = answer.end
        message = message_of(self.tellers[index].deltas(answer.text, is_last=True))
        choice = self._ended(index, {"message": message}, end)
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
        latest: dict[int, Delta] = {}
        async for delta in generation.deltas():
            index, end = delta.index, delta.end
            latest[index] = delta
            tail = figures.usage_so_far(
                self._asked, len(self._one.prompt_ids), generation.num_cached(), latest
            )
            told = self.tellers[index].deltas(delta.text, is_last=end is not None)
            if self._shows_more and delta.token_ids and not told:
                told = [{"content": ""}]
            # What belongs to the tokens goes with the first piece of them.
            more = self._more(delta, is_first=index not in begun) if self._shows_more else {}
            for fields in told:
                # The role travels with the first text: alone it would count as the first token.
                role = {} if index in begun else {"role": "assistant"}
                begun.add(index)
                if more or role or len(fields) > 1 or "content" not in fields:
                    yield self._detailed(head, index, role | fields, more, tail)
                    more = {}
                else:
                    yield _TEXT % (start, index, orjson.dumps(fields["content"]), tail)
            if end is not None:
                ends[index] = end
                yield self._last(head, index, end, tail, is_first=index not in begun)
        if self._asked.includes_usage:
            answers = [ends[i] for i in sorted(ends)]
            yield event({**head, "choices": [], "usage": figures.usage(answers, self._ready)})
        yield DONE

    def _more(self, delta: Delta, *, is_first: bool) -> dict[str, object]:
        """Fields of a choice beside its text."""
        more: dict[str, object] = {}
        if self._asked.logprobs:
            tokenizer = self._ready.engine.tokenizer
            more["logprobs"] = likelihood.for_chat(tokenizer, delta.token_ids, delta.logprobs)
        if self._asked.return_token_ids:
            more["token_ids"] = list(delta.token_ids)
            if is_first:
                more["prompt_token_ids"] = list(self._one.prompt_ids)
        return more

    def _detailed(
        self,
        head: dict[str, object],
        index: int,
        fields: dict[str, object],
        more: dict[str, object],
        tail: bytes,
    ) -> bytes:
        choice = {"index": index, "delta": fields, "logprobs": None, "finish_reason": None} | more
        return event_with({**head, "choices": [choice]}, tail)

    def _last(
        self, head: dict[str, object], index: int, end: Completion, tail: bytes, *, is_first: bool
    ) -> bytes:
        delta = {"role": "assistant", "content": ""} if is_first else {}
        choice = self._ended(index, {"delta": delta}, end)
        shown = figures.timings(end.timings, self._ready)
        body = with_warnings({**head, "choices": [choice], "timings": shown}, self._warnings)
        return event_with(body, tail)

    def _ended(self, index: int, said: dict[str, object], end: Completion) -> dict[str, object]:
        """A choice that has its end."""
        teller = self.tellers[index]
        choice: dict[str, object] = {
            "index": index,
            **said,
            "logprobs": None,
            "finish_reason": teller.finish_reason(end),
            "stop_reason": end.stop,
        }
        return choice | ({"warning": teller.reader.warning} if teller.reader.warning else {})
