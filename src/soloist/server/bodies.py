"""From the bytes of a request to a prompt that the engine can take."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from soloist.errors import PreparationFailed
from soloist.server.held import Body
from soloist.server.host import Host, Ready
from soloist.server.preparation.jobs import Job
from soloist.server.preparation.limits import LARGE_BYTES
from soloist.server.preparation.prepared import Prepared, Wanted
from soloist.server.problems import Problem
from soloist.text.grammar import Grammar

Result = TypeVar("Result")


def ready_of(request: Request) -> Ready:
    """The engine that will answer a request.

    Raises:
        Problem: 503 while there is none.
    """
    host: Host = request.app.state.host
    return host.ready()


async def prepared(
    request: Request, ready: Ready, job: Job[Wanted]
) -> tuple[Prepared[Wanted], Grammar | None]:
    """A request that was read, and the grammar of its answers.

    Raises:
        Problem: it cannot be answered.
        Unavailable: not now, whatever it asks for.
    """
    ready.loop.require_open()  # before any work is done for it
    found = await _read(request, ready, job)
    assert isinstance(found, Prepared), "this kind of request is for the engine"
    if found.grammar is None:
        return found, None
    # It compiled in the process that read the request, so it does here; streams go on meanwhile.
    return found, await asyncio.to_thread(ready.engine.grammars.compile, found.grammar)


async def whole_reply(request: Request, job: Job[Wanted]) -> Response:
    """The reply to a request that needs no engine.

    Raises:
        Problem: it cannot be answered.
    """
    found = await _read(request, ready_of(request), job)
    assert isinstance(found, bytes), "this kind of request is answered at once"
    return Response(found, media_type="application/json")


async def _read(request: Request, ready: Ready, job: Job[Wanted]) -> Prepared[Wanted] | bytes:
    host: Host = request.app.state.host
    coding = request.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise Problem(415, f"Content-Encoding is '{coding}' (allowed: none); send plain JSON")
    with host.bodies.body() as body:
        await receive_body(request, body, host.config.most_body_bytes)
        work = ready.preparation.prepare(job, body.parts)
        try:
            if body.num_bytes <= LARGE_BYTES:
                return await work
            return await _while_connected(request, work)
        except PreparationFailed as error:
            host.fail(error)
            raise


async def _while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """What a coroutine returns; it is cancelled where the client goes away.

    Raises:
        Problem: the client went away.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(request.receive())  # after the body: that the client has gone
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Problem(499, "the client went away")
        return task.result()
    finally:
        gone.cancel()
        task.cancel()


async def receive_body(request: Request, body: Body, most_bytes: int) -> None:
    """Read a request's body.

    Raises:
        Problem: 413 where it is larger than allowed, 503 where others hold too much.
    """
    told = request.headers.get("content-length", "0")
    if told.isdecimal() and int(told) > most_bytes:
        raise _too_large(most_bytes)
    async for part in request.stream():
        body.add(part)
        if body.num_bytes > most_bytes:
            raise _too_large(most_bytes)


def _too_large(most_bytes: int) -> Problem:
    return Problem(
        413,
        f"the body is larger than the allowed {most_bytes:,} bytes (--max-body-mb)",
        headers={"Connection": "close"},
    )
