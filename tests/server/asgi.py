"""The application without sockets: requests as an ASGI server hands them over."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from server.running import CONFIG
from soloist.engine import Engine
from soloist.server.app import make_app
from soloist.server.host import Host


class Exchange:
    """One request and what comes back.

    Attributes:
        status: of the reply, 0 before it has begun.
        body: so far.
        is_whole: whether the reply has ended.
    """

    def __init__(self, app, method: str, path: str, body: object = None) -> None:
        self.status, self.body, self.is_whole = 0, b"", False
        self._app = app
        self._content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._gone = asyncio.Event()
        self._grown = asyncio.Event()
        self._is_sent = False
        self._scope = {
            "type": "http", "method": method, "path": path, "raw_path": path.encode(),
            "query_string": b"", "root_path": "", "scheme": "http", "http_version": "1.1",
            "asgi": {"version": "3.0", "spec_version": "2.4"}, "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        }  # fmt: skip

    async def run(self) -> "Exchange":
        await self._app(self._scope, self._receive, self._send)
        return self

    def hang_up(self) -> None:
        """The client goes away."""
        self._gone.set()

    async def grows(self) -> None:
        """Wait for more of the reply."""
        self._grown.clear()
        await self._grown.wait()

    async def _receive(self) -> dict[str, object]:
        if not self._is_sent:
            self._is_sent = True
            return {"type": "http.request", "body": self._content, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict) -> None:
        await asyncio.sleep(0)
        self._grown.set()
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif not self._gone.is_set():
            self.body += message.get("body", b"")
            self.is_whole = not message.get("more_body", False)


@asynccontextmanager
async def application(engine: Engine, **changed: object) -> AsyncIterator[tuple[object, Host]]:
    """An application that is ready, and its host."""
    host = Host(lambda _: engine, replace(CONFIG, **changed))
    app = make_app(host)
    async with app.router.lifespan_context(app):
        while host.is_loading:
            await asyncio.sleep(0.001)
        yield app, host
        while not is_idle(host):
            await asyncio.sleep(0.001)
        host.stop()


def is_idle(host: Host) -> bool:
    load = host.ready().loop.load
    return load.num_running == load.num_waiting == 0 and not host.running
