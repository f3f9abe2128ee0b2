"""HTTP/1.1 on a socket: uvicorn's protocol, held to bounds in time, bytes and number.

Whatever a client does or leaves undone, its connection ends within these bounds and leaves nothing:
uvicorn itself waits without end for the rest of a head or of a body, and for a client that does not
read. Knows nothing of paths and models; errors come in the API's shapes.
"""

import asyncio
from functools import partial
from typing import Any

import httptools
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from soloist.errors import ShuttingDown
from soloist.server import bounds
from soloist.server.access import CountReply
from soloist.server.bounds import Wait
from soloist.server.problems import Problem, problem_of
from soloist.server.replies import problem_reply
from soloist.server.request_ids import HEADER, request_id
from soloist.server.transport import LingeringTransport

_HEAD_PART_BYTES = 8 * 1024
# Connections beyond the most, for clients that are told to come back.
_SPARE = 64

# How often bounds in time are looked at, and how long a wait is never cut for want of room.
_LOOK_S = 0.5
_YOUNG_S = 1.0

_UPGRADES = frozenset({b"upgrade", b"http2-settings"})

# What ends for want of room.
_ENDS_EARLY = frozenset({Wait.IDLE, Wait.HEAD, Wait.BODY})


class Connections:
    """The open connections of one server, and what they wait for.

    Args:
        most: of them; beyond it, one that waits for its client makes room, or the new one is told
            to come back.
        most_body_bytes: of one request.
        count_reply: counts replies that the application has no part in.
    """

    def __init__(self, most: int, most_body_bytes: int, count_reply: CountReply) -> None:
        self.most_body_bytes, self.count_reply = most_body_bytes, count_reply
        self._most = most
        self._open: set[Connection] = set()
        # Since when, in this order: the first one has waited for the longest time.
        self._since: dict[Connection, float] = {}
        self._look_again: asyncio.TimerHandle | None = None

    def protocol(self) -> type[HttpToolsProtocol]:
        """The class of protocols whose connections these are, for uvicorn."""
        return type("BoundConnection", (Connection,), {"others": self})

    def add(self, connection: "Connection") -> None:
        """A connection was opened."""
        self._open.add(connection)
        if self._look_again is None:
            self._look_again = connection.loop.call_later(_LOOK_S, self._look, connection.loop)
        if len(self._open) <= self._most:
            return
        now = connection.loop.time()
        oldest = next((other for other in self._since if other.wait in _ENDS_EARLY), None)
        if len(self._open) > self._most + _SPARE:
            connection.transport.abort()
        elif oldest is not None and now - self._since[oldest] >= _YOUNG_S:
            oldest.make_room()
        else:
            connection.refuse(bounds.no_room())

    def remove(self, connection: "Connection") -> None:
        """It is closed."""
        self._open.discard(connection)
        self._since.pop(connection, None)

    def abort(self) -> None:
        """End all of them at once."""
        for connection in list(self._open):
            connection.transport.abort()

    def begin_wait(self, connection: "Connection") -> None:
        """It waits from now on."""
        self._since.pop(connection, None)
        self._since[connection] = connection.loop.time()

    def end_wait(self, connection: "Connection") -> None:
        """It waits for nothing."""
        self._since.pop(connection, None)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._look_again = loop.call_later(_LOOK_S, self._look, loop) if self._open else None
        now = loop.time()
        for connection, since in list(self._since.items()):
            if connection.wait is not None and now - since >= connection.wait.most_s:
                connection.wait_is_over()


class Connection(HttpToolsProtocol):
    """One connection, whose requests come one after the other.

    A request that comes before the reply to the one before it is not answered: the connection ends
    with that reply, so that its client sends the request again. Otherwise a client's going away
    could not be seen while it has requests queued here.

    Attributes:
        others: all connections of the server.
        wait: what it waits for its client to do, if anything.
    """

    others: Connections

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.app = partial(_answer, self, self.config.loaded_app)
        self.wait: Wait | None = None
        self.problem: Problem | None = None
        self.url = b""
        self._missing: Wait | None = Wait.HEAD  # what of a request is still to come
        self._takes_more = self._lingers = True
        # Bytes: of the latest data, of data since the one that a request began in, of its body, of
        # what was dropped, and of what the client has to read.
        self._num_given = self._num_fed = self._num_body = self._num_dropped = 0
        self._num_unread = 0

    # What the event loop calls.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        self._bounded = LingeringTransport(transport, self)
        super().connection_made(self._bounded)
        self._wait_for(Wait.HEAD)
        self.others.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing of it stays."""
        self.others.remove(self)
        # Nor a circle of references, which would wait for a collection.
        self._bounded.release()
        self.app = self.config.loaded_app
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came; what nobody waits for is dropped, up to a bound."""
        start = 0
        # A head in parts, since each of its headers costs a call: too many are refused early.
        while self._missing is not Wait.BODY and len(data) - start > _HEAD_PART_BYTES:
            self._receive(data[start : start + _HEAD_PART_BYTES])
            start += _HEAD_PART_BYTES
        self._receive(data[start:])

    def _receive(self, data: bytes) -> None:
        if not self._takes_more:
            self._drop(data)
            return
        if self._missing is None and not self._is_answering:
            self._missing, self._num_fed = Wait.HEAD, 0
        self._num_given = len(data)
        self._num_fed += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            self.refuse(self.problem or bounds.malformed(error))
        else:
            self._check_sizes()
        if self._takes_more and self.wait is not Wait.READING:
            awaited = self._awaited
            if awaited is not self.wait:
                self._wait_for(awaited)

    def pause_writing(self) -> None:
        """The client does not read."""
        super().pause_writing()
        if self.wait is not Wait.CLOSING:
            self._wait_for(Wait.READING)

    def resume_writing(self) -> None:
        """It does again."""
        super().resume_writing()
        if self.wait is Wait.READING:
            self._wait_for(self._awaited)

    def shutdown(self) -> None:
        """The server ends: so do waiting for a request and for a body that nobody will read."""
        self._lingers = False
        if self._missing is Wait.BODY and self._is_answering:
            self.refuse(problem_of(ShuttingDown()))
        else:
            super().shutdown()

    # What the parser calls.

    def on_message_begin(self) -> None:
        """A request begins."""
        if self._is_answering:
            raise _Pipelined
        super().on_message_begin()
        self._missing, self._num_fed, self._num_body = Wait.HEAD, 0, 0

    def on_headers_complete(self) -> None:
        """Its headers are whole."""
        if (
            # Or less: its exact size is unknown. Its first part was not counted.
            self._num_fed + self._num_given + _HEAD_PART_BYTES > bounds.MOST_HEAD_BYTES
            or len(self.headers) > bounds.MOST_HEADERS
        ):
            self._check_head()
        if self.parser.should_upgrade():
            return
        super().on_headers_complete()
        self._missing = Wait.BODY
        # Of a request that was judged by its headers, no header changes: trailers go nowhere.
        self.headers = []
        if self.cycle.waiting_for_100_continue:
            # Whether the body comes after a reply without "continue" is the client's choice.
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        """A part of its body."""
        self._num_body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """It is whole."""
        if self._missing is Wait.HEAD:  # of one that is parsed again
            return
        self._missing = None
        super().on_message_complete()

    # What the application's replies call.

    def on_response_complete(self) -> None:
        """A reply was written."""
        self.server_state.total_requests += 1
        if not self.transport.is_closing():
            self.flow.resume_reading()
            if self.wait is None:
                self._wait_for(self._awaited)

    # What this module calls.

    @property
    def _is_answering(self) -> bool:
        """Whether a request was handed to the application, whose reply is not whole."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _awaited(self) -> Wait | None:
        if self._missing is None and not self._is_answering:
            return Wait.IDLE
        return self._missing

    @property
    def has_more_to_come(self) -> bool:
        """Whether the client may be sending what nobody waits for, and has time to end that."""
        return self._lingers and (self._missing is Wait.BODY or not self._takes_more)

    def refuse(self, problem: Problem) -> None:
        """End the connection: with this, if nothing was replied to its request."""
        self._finish_with_this()
        if not self._is_answering:
            if self._missing is not Wait.BODY:
                self._write(problem)
            self.transport.close()
        elif self._missing is Wait.BODY:
            if self.cycle.response_started:
                self.transport.close()
            else:
                # The application asks for the body, and hears of it.
                self.problem = problem
                self.cycle.message_event.set()
                self._wait_for(Wait.CLOSING)

    def make_room(self) -> None:
        """Others want to use the server, too."""
        if self.wait is Wait.BODY:
            self.refuse(bounds.no_room())
        else:
            self.transport.abort()

    def wait_is_over(self) -> None:
        """The client had its time."""
        if self.wait is Wait.BODY:
            self.refuse(bounds.too_slow(Wait.BODY))
        elif self.wait is Wait.HEAD and self._num_given:
            self.refuse(bounds.too_slow(Wait.HEAD))
        elif self.wait in (Wait.IDLE, Wait.HEAD):
            self.transport.close()
        elif self._bounded.num_unread and (
            self.wait is Wait.CLOSING
            or self._num_unread - self._bounded.num_unread >= bounds.LEAST_READ_BYTES
        ):
            self._wait_for(Wait.READING)
        else:
            self.transport.abort()

    def begin_closing(self) -> None:
        """The transport is told to close; the client has a while to take what was written."""
        self._takes_more = False
        self._wait_for(Wait.CLOSING)

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as other:
            if (method := self.parser.get_method()) == b"CONNECT":
                raise httptools.HttpParserError("CONNECT is for proxies") from other
            # The parser drops the body of such a request; clients send one if they would like
            # HTTP/2 (Java's do, and `curl --http2`), and take a reply as if they had not asked.
            version = self.parser.get_http_version().encode()
            lines = [b"%b %b HTTP/%b" % (method, self.url, version)]
            lines += [b"%b: %b" % pair for pair in _without_upgrade(self.headers)]
            self.parser = httptools.HttpRequestParser(self)
            self.parser.feed_data(b"\r\n".join([*lines, b"", data[other.args[0] :]]))

    def _wait_for(self, wait: Wait | None) -> None:
        self.wait = wait
        if wait is None:
            self.others.end_wait(self)
        else:
            if wait is Wait.READING:
                self._num_unread = self._bounded.num_unread
            self.others.begin_wait(self)

    def _finish_with_this(self) -> None:
        """Take no further request; the reply that is on its way says so, if it has not begun."""
        self._takes_more = False
        if self._is_answering:
            self.cycle.keep_alive = False
            if self.wait is not Wait.READING:
                self._wait_for(None)

    def _drop(self, data: bytes) -> None:
        self._num_dropped += len(data)
        if self._is_answering and self._num_dropped > self.others.most_body_bytes:
            self.transport.abort()

    def _check_head(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > bounds.MOST_HEAD_BYTES or len(self.headers) > bounds.MOST_HEADERS:
            self.problem = bounds.head_too_large()
            raise self.problem

    def _check_sizes(self) -> None:
        if self._missing is Wait.HEAD and (
            self._num_fed > bounds.MOST_HEAD_BYTES or len(self.headers or ()) > bounds.MOST_HEADERS
        ):
            self.refuse(bounds.head_too_large())
        elif self._missing is Wait.BODY:
            if self._num_fed - 2 * self._num_body > bounds.MOST_FRAMING_BYTES:
                self.refuse(bounds.too_much_framing())
            elif not self._is_answering and self._num_body > self.others.most_body_bytes:
                self.transport.close()

    def _write(self, problem: Problem) -> None:
        """A reply without the application."""
        path = self.url.decode("latin-1")
        reply = problem_reply(path, problem)
        named = (HEADER, request_id(self.headers or ()))
        headers = [*self.server_state.default_headers, *reply.raw_headers, named]
        lines = [name + b": " + value + b"\r\n" for name, value in headers]
        head = (STATUS_LINE[problem.status], *lines, b"connection: close\r\n\r\n")
        self.transport.write(b"".join((*head, bytes(reply.body))))
        self.others.count_reply(path, problem.status)


class _Pipelined(Exception):
    """A request came before the reply to the one before it."""


async def _answer(
    connection: Connection, app: ASGIApp, scope: Scope, receive: Receive, send: Send
) -> None:
    """The application, which hears of a body that will not come when it asks for it.

    Its reply gets the request's id.
    """
    named = (HEADER, request_id(scope["headers"]))

    async def receive_in_bounds() -> Message:
        message = await receive()
        if connection.problem is not None:
            raise connection.problem
        return message

    async def send_with_id(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), named]}
        await send(message)

    await app(scope, receive_in_bounds, send_with_id)


def _without_upgrade(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Headers of a request that asks for no other protocol."""
    kept = []
    for name, value in headers:
        if name == b"connection":
            options = [option.strip() for option in value.lower().split(b",")]
            kept.append((name, b", ".join(o for o in options if o not in _UPGRADES)))
        elif name not in _UPGRADES:
            kept.append((name, value))
    return kept
