"""POST /completion and /infill, GET /props and /slots: what editors ask of llama.cpp's server."""

import time
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from soloist import __version__
from soloist.engine import Completion
from soloist.errors import TokenizerError
from soloist.server import figures
from soloist.server.bodies import prepared, ready_of
from soloist.server.early_end import EarlyEnd
from soloist.server.generation import Generation, watch
from soloist.server.host import Host, Ready
from soloist.server.preparation.jobs import INFILLS, LLAMA_CPP, Job
from soloist.server.preparation.prepared import Prepared, with_warnings
from soloist.server.problems import Problem
from soloist.server.replies import json_reply
from soloist.server.sse import Events, event
from soloist.server.tracing import TEXT, RequestTrace


async def completion(request: Request) -> Response:
    """Continue a text."""
    return await _answer(request, LLAMA_CPP)


async def infill(request: Request) -> Response:
    """Fill a gap in a text."""
    return await _answer(request, INFILLS)


async def props(request: Request) -> Response:
    """What the server and its model are."""
    host: Host = request.app.state.host
    ready = host.ready()
    name, context = host.config.names[0], ready.engine.resolved.context_tokens
    try:
        template = ready.engine.chat_template.source
    except TokenizerError:  # there is none
        template = ""
    return json_reply(
        {
            "default_generation_settings": {"n_ctx": context},
            "total_slots": ready.loop.load.max_running,
            "model_alias": name,
            "model_path": name,
            "chat_template": template,
            "modalities": {"vision": False, "audio": False},
            "build_info": f"soloist-{__version__}",
        }
    )


async def slots(request: Request) -> Response:
    """Places for requests that run at once; 503 where none is free and the query asks for that."""
    host: Host = request.app.state.host
    ready = host.ready()
    load = ready.loop.load
    if request.query_params.get("fail_on_no_slot") and load.num_running >= load.max_running:
        told = f"all {load.max_running} slots are in use; try again later"
        raise Problem(503, told, code="no_slot", headers={"Retry-After": "1"})
    # A list, which is all that llama.cpp's clients read.
    return Response(orjson.dumps(_places(ready)), media_type="application/json")


def asks_for_slots(request: Request) -> bool:
    """Whether a request for `/health` has a field that llama.cpp's server alone knows."""
    return not {"include_slots", "fail_on_no_slot"}.isdisjoint(request.query_params)


def health(request: Request, ready: Ready) -> Response:
    """`/health` in llama.cpp's words, of a server that answers requests."""
    load, asked = ready.loop.load, request.query_params
    is_free = load.num_running < load.max_running
    body: dict[str, object] = {
        "status": "ok" if is_free else "no slot available",
        "slots_idle": load.max_running - load.num_running,
        "slots_processing": load.num_running,
    }
    if "include_slots" in asked:
        body["slots"] = _places(ready)
    if not is_free and "fail_on_no_slot" in asked:
        return json_reply(body, 503, {"Retry-After": "1"})
    return json_reply(body)


def _places(ready: Ready) -> list[dict[str, object]]:
    load, context = ready.loop.load, ready.engine.resolved.context_tokens
    return [
        {"id": n, "n_ctx": context, "is_processing": n < load.num_running}
        for n in range(load.max_running)
    ]


async def _answer(request: Request, job: Job[Any]) -> Response:
    accepted, host, ready = time.perf_counter(), request.app.state.host, ready_of(request)
    found, grammar = await prepared(request, ready, job)
    request_id = f"llamacpp-{uuid.uuid4().hex}"
    trace = RequestTrace(request.headers, TEXT, found.model, accepted)
    generation = Generation(host, ready, request_id, found.prompts, accepted, trace, grammar)
    reply = _Reply(ready, found)
    if found.fields.stream:
        return Events(generation, reply.stream(generation))
    watcher = watch(request.receive, generation)
    try:
        async with generation:
            async for _ in reply.texts(generation):
                pass
    finally:
        watcher.cancel()
    return json_reply(reply.whole())


class _Reply:
    """The shape of the replies to one request."""

    def __init__(self, ready: Ready, found: Prepared[Any]) -> None:
        self._ready, self._asked, self._model = ready, found.fields, found.model
        self._warnings = found.warnings
        (self._one,) = found.prompts
        most_ms = self._asked.t_max_predict_ms
        most_s = most_ms / 1e3 if most_ms and most_ms > 0 else None
        self._early_end = EarlyEnd(self._asked.n_indent or 0, most_s)
        self._text = ""
        self._num_made = 0
        self._end: Completion | None = None

    async def texts(self, generation: Generation) -> AsyncIterator[str]:
        """Pieces of the answer that may be shown, until it has its end."""
        only_reads, ends_early = self._asked.n_predict == 0, False
        async for delta in generation.deltas():
            text = ""
            if not only_reads and not ends_early:
                text = self._early_end.push(delta.text)
                if delta.end is not None:
                    text += self._early_end.finish()
                elif self._early_end.is_over:
                    ends_early = True
                    generation.end_early()
            self._num_made = 0 if only_reads else delta.num_made
            self._text += text
            self._end = delta.end
            yield text

    async def stream(self, generation: Generation) -> AsyncIterator[bytes]:
        """The reply as events."""
        async for text in self.texts(generation):
            if text:
                yield event(
                    {
                        "index": 0,
                        "content": text,
                        "stop": False,
                        "tokens_predicted": self._num_made,
                        "tokens_evaluated": len(self._one.prompt_ids),
                    }
                )
        yield event(self.whole() | ({} if self._asked.response_fields else {"content": ""}))

    def whole(self) -> dict[str, object]:
        """The reply at the end, or those of its fields that were asked for."""
        end = self._end
        assert end is not None, "the answer has its end"
        t, settings = end.timings, self._one.params.describe()
        settings["samplers"] = self._asked.samplers
        settings["n_ctx"] = self._ready.engine.resolved.context_tokens
        body: dict[str, object] = {
            "index": 0,
            "content": self._text,
            "stop": True,
            "model": self._model,
            "tokens_predicted": self._num_made,
            "tokens_evaluated": t.prompt_tokens,
            "tokens_cached": t.cached_tokens,
            "has_new_line": self._early_end.has_line,
            "truncated": False,
            "stop_type": self._stop_type(end),
            "stopping_word": end.stop or "",
            "generation_settings": settings,
            "timings": figures.timings(t, self._ready),
        }
        if self._asked.return_tokens:
            body["tokens"] = [] if self._asked.n_predict == 0 else list(end.token_ids)
        return with_warnings(_selected(body, self._asked.response_fields), self._warnings)

    def _stop_type(self, end: Completion) -> str:
        if self._early_end.is_cut or end.finish_reason in ("length", "cancelled"):
            return "limit"
        return "word" if end.stop is not None else "eos"


def _selected(body: dict[str, object], paths: list[str] | None) -> dict[str, object]:
    """The fields of these paths, each under its path; one that there is not is left out."""
    if not paths:
        return body
    found: dict[str, object] = {}
    for path in paths:
        value: object = body
        for name in path.split("/"):
            value = value.get(name, _ABSENT) if isinstance(value, Mapping) else _ABSENT
        if value is not _ABSENT:
            found[path] = value
    return found


_ABSENT = object()
