"""One replica: the application of a single server, asked through Ray instead of a socket."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from starlette.types import Message

from soloist.deploy.calls import Asked, Head, Told
from soloist.deploy.config import Deployment, ModelSpec
from soloist.engine import Engine
from soloist.errors import EngineStopped, SoloistError, Stalled
from soloist.server.app import make_app
from soloist.server.host import Host
from soloist.server.process import collect_less, switch_sooner
from soloist.server.status import LIVE_S
from soloist.weights.reading import LoadProgress

log = logging.getLogger(__name__)

# How often a replica looks whether it has loaded, and how long a request that was given up has to
# end: it does at its next token.
_LOOK_S, _END_S = 0.05, 5.0


class Replica:
    """A deployment of Ray Serve; it is there once its model is loaded.

    Args:
        deployment: all that runs on the cluster.
        spec: the model of this replica.

    Raises:
        RuntimeError: the model cannot be loaded; Ray shows the words.
    """

    # Ray awaits it, in the event loop of the requests.
    async def __init__(  # type: ignore[misc]
        self, deployment: Deployment, spec: ModelSpec
    ) -> None:
        self._spec = spec
        self._name = serve.get_replica_context().replica_id.unique_id
        self._node = ray.get_runtime_context().get_node_id()
        switch_sooner()
        config = deployment.server(spec, self._name)
        self._host = Host(self.load, config, on_ready=lambda _: collect_less())
        self._app = make_app(self._host)
        self._stack = AsyncExitStack()
        await self._stack.enter_async_context(self._app.router.lifespan_context(self._app))
        while self._host.is_loading:
            await asyncio.sleep(_LOOK_S)
        self.check_health()

    def load(self, on_progress: Callable[[LoadProgress], None]) -> Engine:
        """The engine; called in a thread of its own."""
        return Engine.load(self._spec.engine(), on_progress)

    def check_health(self) -> None:
        """Raise where starting the replica again is what helps; Ray asks now and then."""
        error: SoloistError | None = self._host.failure
        if error is None and (loop := self._host.loop) is not None:
            error = None if loop.failure is None else EngineStopped(loop.failure)
            if (progress := loop.progress).age_s > LIVE_S:
                error = Stalled(progress.age_s, progress.step)
        if error is not None:
            # Of a class that whoever reads it has.
            raise RuntimeError(str(error))

    async def handle(self, asked: Asked) -> AsyncIterator[Head | bytes]:
        """A reply: its head, then its body, in pieces that have what came since the last one."""
        call = _Call(asked)
        task = asyncio.create_task(self._serve(call))
        try:
            while (part := await call.part()) is not None:
                yield part
        finally:
            # Also where nobody waits any more: the application hears that its client has gone.
            call.is_given_up.set()
            await asyncio.wait([task], timeout=_END_S)

    async def whole(self, asked: Asked) -> Told:
        """A whole reply, and who made it."""
        head, body = Head(500, ()), b""
        async for part in self.handle(asked):
            if isinstance(part, Head):
                head, body = part, part.body
            else:
                body += part
        return Told(self._name, self._node, head.status, body)

    async def _serve(self, call: "_Call") -> None:
        try:
            await self._app(call.scope, call.receive, call.send)
        except Exception:  # it was replied to, as a bug in Soloist
            log.exception("%s %s failed", call.scope["method"], call.scope["path"])
        finally:
            call.end()


class _Call:
    """A request as an ASGI application has it, and its reply so far.

    Attributes:
        scope: of the request.
        is_given_up: nobody waits for the reply.
    """

    def __init__(self, asked: Asked) -> None:
        self.scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "scheme": "http",
            "method": asked.method,
            "path": asked.path,
            "raw_path": asked.path.encode(),
            "root_path": "",
            "query_string": asked.query,
            "headers": list(asked.headers),
            "state": {},
        }
        self.is_given_up = asyncio.Event()
        self._body: bytes | None = asked.body
        self._head: Head | None = None
        self._parts: list[bytes] = []
        self._woken, self._is_over = asyncio.Event(), False

    async def receive(self) -> Message:
        """The body, then that the client has gone, as soon as it has."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.is_given_up.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """A part of the reply."""
        if message["type"] == "http.response.start":
            self._head = Head(message["status"], tuple(message["headers"]))
        elif body := message.get("body"):
            self._parts.append(body)
        self._woken.set()

    def end(self) -> None:
        """The reply is whole."""
        self._is_over = True
        self._woken.set()

    async def part(self) -> Head | bytes | None:
        """What came since the last time; None after the end."""
        while not self._parts and not self._is_over:
            self._woken.clear()
            await self._woken.wait()
        body, self._parts = b"".join(self._parts), []
        head, self._head = self._head, None
        return (body or None) if head is None else replace(head, body=body)
