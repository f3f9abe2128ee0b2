"""The one address: reads a request as far as its model and its beginning, and passes it on.

All that a single server has at its paths is here too. What clients ask of all models or replicas at
once is put together; everything else is the reply of one replica, as it comes.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import orjson
from prometheus_client import CONTENT_TYPE_LATEST
from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from soloist.deploy.calls import Asked, Head, Told
from soloist.deploy.config import Front
from soloist.deploy.lost import last_words
from soloist.deploy.metrics import merged
from soloist.deploy.prefix import Wish
from soloist.deploy.reading import Gist, Reader
from soloist.server.access import common_headers
from soloist.server.app import EXCEPTION_HANDLERS, ROUTES, middleware_of
from soloist.server.bodies import receive_body
from soloist.server.held import Bodies
from soloist.server.metrics import Metrics
from soloist.server.preparation.jobs import served_name
from soloist.server.problems import Problem
from soloist.server.replies import json_reply

log = logging.getLogger(__name__)

Reply = TypeVar("Reply")
Endpoint = Callable[[Request], Awaitable[Response]]

# Of a question to all replicas: one that does not answer is left out, and the reply says so.
_ASK_ALL_S = 2.0

# A path that names a model, as bodies do.
_MODELS = "/v1/models/"

# Headers that are this hop's, hold a key, or say which page sent the request: that was judged here.
_OWN = frozenset(
    {
        b"authorization", b"connection", b"content-length", b"cookie", b"host", b"keep-alive",
        b"origin", b"sec-fetch-dest", b"sec-fetch-mode", b"sec-fetch-site", b"te", b"trailer",
        b"transfer-encoding", b"upgrade", b"x-api-key",
    }
)  # fmt: skip

# Ray's errors for a replica, its node or the way to it being gone.
_GONE = (RayError, DeploymentUnavailableError)


class Cluster:
    """What the ingress' routes share.

    Args:
        front: names, keys and bounds.
        handles: of the models' deployments, in the order of the models.
    """

    def __init__(self, front: Front, handles: Sequence[DeploymentHandle]) -> None:
        self.config, self.session_header = front.server, front.session_header
        named = list(zip(front.names, handles, strict=True))
        self.handles = {names[0]: handle for names, handle in named}
        self._streams = {
            name: handle.options(method_name="handle", stream=True)
            for names, handle in named
            for name in names
        }
        # One name of each model.
        self.firsts = tuple(self.handles)
        self.bodies, self.reader = Bodies(self.config.most_body_bytes), Reader()
        self.metrics = Metrics()

    def stream_of(self, model: str | None) -> DeploymentHandle:
        """What asks a replica of the model that a request names.

        Raises:
            Problem: 404.
        """
        name = served_name(self.config.names, model)
        return self._streams.get(name) or self._streams[name.removesuffix(":latest")]

    async def ask_all(self, asked: Asked) -> dict[str, list[Told]]:
        """The replies of all replicas that answer in time, by model."""

        async def ask(model: str) -> list[Told]:
            try:
                told = (
                    await self.handles[model]
                    .broadcast("whole", asked)
                    .results_async(timeout_s=_ASK_ALL_S, return_exceptions=True)
                )
            except (TimeoutError, *_GONE) as error:
                log.warning("the replicas of %s did not answer: %r", model, error)
                return []
            return sorted((one for one in told if isinstance(one, Told)), key=lambda t: t.replica)

        found = await asyncio.gather(*map(ask, self.firsts))
        return dict(zip(self.firsts, found, strict=True))


def make_ingress(cluster: Cluster) -> ASGIApp:
    """The application of the ingress."""
    paths = frozenset(route.path for route in ROUTES)

    def count(path: str, status: int) -> None:
        known = path if path in paths else "other"
        cluster.metrics.replies.labels(known, str(status)).inc()

    def endpoint(route: Route) -> Endpoint:
        if "DELETE" in (route.methods or ()) or route.path.endswith("/cancel"):
            return cancel
        return _OWN_REPLIES.get(route.path, forward)

    app = Starlette(
        routes=[Route(r.path, endpoint(r), methods=list(r.methods or ())) for r in ROUTES],
        middleware=[
            Middleware(_Common, headers=common_headers(cluster.config)),
            *middleware_of(cluster.config, count),
        ],
        exception_handlers=EXCEPTION_HANDLERS,
    )
    app.state.cluster = cluster
    return app


class _Common:
    """Middleware: the headers of every reply; the request's id is added by Ray's proxy."""

    def __init__(self, app: ASGIApp, headers: Sequence[tuple[str, str]]) -> None:
        self._app = app
        self._headers = [(name.lower().encode(), value.encode()) for name, value in headers]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *self._headers]}
            await send(message)

        await self._app(scope, receive, send_with_headers)


async def forward(request: Request) -> Response:
    """The reply of one replica of the model that the request names."""
    cluster: Cluster = request.app.state.cluster
    with cluster.bodies.body() as held:
        await receive_body(request, held, cluster.config.most_body_bytes)
        body = b"".join(held.parts)
        gist = await cluster.reader.read(body) if body else Gist()
        named = request.path_params.get("name") if request.url.path.startswith(_MODELS) else None
        stream = cluster.stream_of(gist.model or named)
        session = request.headers.get(cluster.session_header)
        asked = _asked(request, body, Wish(gist.hashes, session))
        replies = stream.remote(asked)
        relayed = False
        try:
            head = await _or_problem(anext(aiter(replies)))
            assert isinstance(head, Head), "it comes first"
            relayed = True
        finally:
            if not relayed:  # also where the client has gone meanwhile
                _give_up(replies)
    return _Relayed(request.url.path, head, replies)


async def cancel(request: Request) -> Response:
    """End a running request, whichever replica has it."""
    cluster: Cluster = request.app.state.cluster
    found = await cluster.ask_all(_asked(request))
    told = [one for those in found.values() for one in those]
    if not told:
        raise _lost()
    best = min(told, key=lambda one: one.status)
    return Response(best.body, best.status, media_type="application/json")


async def health(request: Request) -> Response:
    """200 while every model has a replica that takes requests; what each replica says."""
    cluster: Cluster = request.app.state.cluster
    found = await cluster.ask_all(_asked(request))
    models = {
        model: [
            {"replica": one.replica, "node": one.node, **orjson.loads(one.body)} for one in told
        ]
        for model, told in found.items()
    }
    is_ready = all(any(one.status == 200 for one in told) for told in found.values())
    body = {"status": "ready" if is_ready else "not ready", "models": models}
    return json_reply(body, 200 if is_ready else 503, None if is_ready else {"Retry-After": "1"})


async def live(_: Request) -> Response:
    """200: the ingress answers; Ray looks after the replicas."""
    return json_reply({"status": "live"})


async def metrics(request: Request) -> Response:
    """The metrics of all replicas, each with its name, and of this ingress."""
    cluster: Cluster = request.app.state.cluster
    found = await cluster.ask_all(_asked(request))
    parts = [
        (one.body, {"model": model, "replica": one.replica})
        for model, told in found.items()
        for one in told
    ]
    text = await asyncio.to_thread(
        merged, [*parts, (cluster.metrics.text(), {"replica": "ingress"})]
    )
    return Response(text, media_type=CONTENT_TYPE_LATEST)


async def listed(request: Request) -> Response:
    """The models of all deployments, as one replica of each lists its own."""
    cluster: Cluster = request.app.state.cluster
    key = "data" if request.url.path.startswith("/v1/") else "models"

    async def ask(model: str) -> dict[str, Any]:
        told = await _or_problem(cluster.handles[model].whole.remote(_asked(request)))
        return dict(orjson.loads(told.body))

    replies = await asyncio.gather(*map(ask, cluster.firsts))
    return json_reply({**replies[0], key: [one for reply in replies for one in reply[key]]})


_OWN_REPLIES: Mapping[str, Endpoint] = {
    "/health": health,
    "/health/ready": health,
    "/health/live": live,
    "/metrics": metrics,
    "/v1/models": listed,
    "/api/tags": listed,
    "/api/ps": listed,
}


class _Relayed(Response):
    """A replica's reply, passed on as it comes; its end may be an error, never a silence."""

    def __init__(self, path: str, head: Head, parts: DeploymentResponseGenerator) -> None:
        self._path, self._head, self._parts = path, head, parts
        self.background = None

    async def __call__(self, _: Scope, __: Receive, send: Send) -> None:
        """Serve it."""
        head = self._head
        start = {"status": head.status, "headers": list(head.headers)}
        await send({"type": "http.response.start", **start})
        is_over = False
        try:
            if head.body:
                await send({"type": "http.response.body", "body": head.body, "more_body": True})
            async for part in self._body():
                await send({"type": "http.response.body", "body": part, "more_body": True})
            is_over = True
        finally:
            if not is_over:
                _give_up(self._parts)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _body(self) -> AsyncIterator[bytes]:
        try:
            while (part := await _or_problem(anext(self._parts, None))) is not None:
                yield part
        except Problem as problem:
            # Of a reply whose length was told, too little comes: its client sees that.
            if not any(name == b"content-length" for name, _ in self._head.headers):
                yield last_words(self._path, problem)


def _give_up(parts: DeploymentResponseGenerator) -> None:
    """End a stream that nobody reads: Ray counts it until its end was read."""
    parts.cancel()
    task = asyncio.create_task(_read_up(parts))
    _READING_UP.add(task)
    task.add_done_callback(_READING_UP.discard)


async def _read_up(parts: DeploymentResponseGenerator) -> None:
    with suppress(Exception, asyncio.CancelledError):
        async with asyncio.timeout(_ASK_ALL_S):
            async for _ in parts:
                pass


# Tasks that nobody else keeps.
_READING_UP: set[asyncio.Task[None]] = set()


def _asked(request: Request, body: bytes = b"", wish: Wish | None = None) -> Asked:
    kept = [(name, value) for name, value in request.scope["headers"] if name not in _OWN]
    headers = (*kept, (b"host", b"localhost"))
    return Asked(
        request.method, request.url.path, request.scope["query_string"], headers, body,
        wish or Wish(),
    )  # fmt: skip


async def _or_problem(reply: Awaitable[Reply]) -> Reply:
    """What comes, or the words for a replica that is not there.

    Raises:
        Problem: 429 where as many wait as may; 503 where the replica has gone.
    """
    try:
        return await reply
    except BackPressureError as error:
        raise Problem(
            429,
            "the queue is full: as many requests wait for a replica as may; this request was not "
            "accepted; try again",
            code="queue_full",
            headers={"Retry-After": "1"},
        ) from error
    except _GONE as error:
        log.warning("a replica has gone: %r", error)
        raise _lost() from error


def _lost() -> Problem:
    return Problem(
        503,
        "the replica that had this request has gone, with its machine or for a newer one; send the "
        "request again, and another replica answers it from the beginning",
        code="replica_lost",
        headers={"Retry-After": "1"},
    )
