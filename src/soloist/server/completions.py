"""POST /v1/completions."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import orjson
from starlette.requests import Request
from starlette.responses import Response

from soloist.engine import Completion, Scored
from soloist.sampling.logprobs import TokenLogprobs
from soloist.server import figures, likelihood
from soloist.server.bodies import prepared, ready_of
from soloist.server.chat import choices
from soloist.server.fields import CompletionRequest
from soloist.server.generation import Delta, Generation, Whole, collect
from soloist.server.host import Ready
from soloist.server.parts import FINISH
from soloist.server.preparation.jobs import COMPLETIONS
from soloist.server.preparation.prepared import PreparedPrompt
from soloist.server.replies import json_reply, long_json
from soloist.server.sse import DONE, Events, event, event_with
from soloist.server.tracing import TEXT, RequestTrace

# A chunk: its start, index, text and end.
_TEXT = b'%b%d,"text":%b,"logprobs":null,"finish_reason":null}]%b}\n\n'


async def completions(request: Request) -> Response:
    """Continue texts."""
    accepted, host, ready = time.perf_counter(), request.app.state.host, ready_of(request)
    found, grammar = await prepared(request, ready, COMPLETIONS)
    asked = found.fields
    answers = [
        replace(one, params=params)
        for one in found.prompts
        for params in choices(one.params, asked.n or 1)
    ]
    request_id = f"cmpl-{uuid.uuid4().hex}"
    trace = RequestTrace(request.headers, TEXT, found.model, accepted)
    generation = Generation(host, ready, request_id, answers, accepted, trace, grammar)
    texts = _Texts(ready, asked, request_id, found.model, found.prompts)
    if asked.stream:
        words = figures.last_words(generation, ready, len(found.prompts))
        return Events(generation, texts.stream(generation), words)
    wholes = await collect(request, generation)
    if asked.logprobs is None:
        return json_reply(texts.whole(wholes))
    # A long prompt has as many log probabilities.
    body = await asyncio.to_thread(lambda: long_json(texts.whole(wholes)))
    return Response(body, media_type="application/json")


class _Texts:
    """The shape of the replies to one request."""

    def __init__(
        self,
        ready: Ready,
        asked: CompletionRequest,
        request_id: str,
        model: str,
        prompts: Sequence[PreparedPrompt],
    ) -> None:
        self._ready, self._asked, self._prompts = ready, asked, prompts
        self._shows_more = bool(asked.logprobs is not None or asked.return_token_ids)
        self._head = {
            "id": request_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._offsets: dict[int, int] = {}

    def _prompt_of(self, index: int) -> PreparedPrompt:
        return self._prompts[index // (self._asked.n or 1)]

    def _echoed(self, index: int) -> str:
        """What `echo` puts before an answer: the prompt as it was given."""
        if not self._asked.echo:
            return ""
        given = self._asked.prompt
        if isinstance(given, str):
            return given
        one = given[index // (self._asked.n or 1)]
        if isinstance(one, str):
            return one
        ids = self._prompt_of(index).prompt_ids
        return self._ready.engine.tokenizer.decode(ids, skip_special_tokens=False)

    def whole(self, answers: list[Whole]) -> dict[str, object]:
        """The reply at the end."""
        ends = [answer.end for answer in answers]
        return {
            **self._head,
            "choices": [self._choice(i, answer) for i, answer in enumerate(answers)],
            "usage": figures.usage(ends, self._ready, len(self._prompts)),
            "timings": figures.timings(ends[0].timings, self._ready),
        }

    def _choice(self, index: int, answer: Whole) -> dict[str, object]:
        end = answer.end
        choice = _ended(index, self._echoed(index) + answer.text, end)
        if self._asked.logprobs is not None:
            choice["logprobs"] = self._likelihood(
                index, answer.scored, end.token_ids, answer.logprobs
            )
        if self._asked.return_token_ids:
            choice["token_ids"] = list(end.token_ids)
            choice["prompt_token_ids"] = list(self._prompt_of(index).prompt_ids)
        return choice

    def _likelihood(
        self,
        index: int,
        scored: Scored | None,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
    ) -> dict[str, object]:
        """Of the next tokens of an answer, and of its prompt before them if it was just scored."""
        tokenizer, before = self._ready.engine.tokenizer, self._offsets.get(index, 0)
        echoed = "" if scored is None else self._echoed(index)
        shown, self._offsets[index] = likelihood.for_completion(
            tokenizer, token_ids, logprobs, before + len(echoed)
        )
        if scored is None:
            return shown
        prompt_ids = self._prompt_of(index).prompt_ids
        return likelihood.joined(
            likelihood.for_prompt(tokenizer, prompt_ids, scored.logprobs, echoed), shown
        )

    async def stream(self, generation: Generation) -> AsyncIterator[bytes]:
        """The reply as events."""
        # Everything of a chunk but index, text and usage: written once a stream.
        start = b"data: " + orjson.dumps(self._head)[:-1] + b',"choices":[{"index":'
        prompt_tokens = sum(len(prompt.prompt_ids) for prompt in self._prompts)
        begun: set[int] = set()
        ends: dict[int, Completion] = {}
        latest: dict[int, Delta] = {}
        async for delta in generation.deltas():
            latest[delta.index] = delta
            cached = generation.num_cached(len(self._prompts))
            tail = figures.usage_so_far(self._asked, prompt_tokens, cached, latest)
            is_first = delta.index not in begun
            text = self._echoed(delta.index) + delta.text if is_first else delta.text
            if text or (self._shows_more and (delta.token_ids or delta.scored is not None)):
                begun.add(delta.index)
                if delta.scored is not None:
                    yield await asyncio.to_thread(
                        self._detailed, delta, text, tail, is_first=is_first
                    )
                elif self._shows_more:
                    yield self._detailed(delta, text, tail, is_first=is_first)
                else:
                    yield _TEXT % (start, delta.index, orjson.dumps(text), tail)
            if delta.end is not None:
                ends[delta.index] = delta.end
                yield self._last(delta.index, delta.end, tail)
        if self._asked.includes_usage:
            total = figures.usage([ends[i] for i in sorted(ends)], self._ready, len(self._prompts))
            yield event({**self._head, "choices": [], "usage": total})
        yield DONE

    def _detailed(self, delta: Delta, text: str, tail: bytes, *, is_first: bool) -> bytes:
        choice: dict[str, object] = {
            "index": delta.index, "text": text, "logprobs": None, "finish_reason": None,
        }  # fmt: skip
        if self._asked.logprobs is not None:
            choice["logprobs"] = self._likelihood(
                delta.index, delta.scored, delta.token_ids, delta.logprobs
            )
        if self._asked.return_token_ids:
            choice["token_ids"] = list(delta.token_ids)
            if is_first:
                choice["prompt_token_ids"] = list(self._prompt_of(delta.index).prompt_ids)
        body = {**self._head, "choices": [choice]}
        if delta.scored is None:
            return event_with(body, tail)
        return b"data: " + long_json(body)[:-1] + tail + b"}\n\n"

    def _last(self, index: int, end: Completion, tail: bytes) -> bytes:
        shown = figures.timings(end.timings, self._ready)
        body = {**self._head, "choices": [_ended(index, "", end)], "timings": shown}
        return event_with(body, tail)


def _ended(index: int, text: str, end: Completion) -> dict[str, object]:
    """A choice that has its end."""
    return {
        "index": index,
        "text": text,
        "logprobs": None,
        "finish_reason": FINISH[end.finish_reason],
        "stop_reason": end.stop,
    }
