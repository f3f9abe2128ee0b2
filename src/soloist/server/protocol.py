"""HTTP/1.1 on a socket: uvicorn's protocol, held to bounds in time, bytes and number.

Whatever a client does or leaves undone, its connection ends within these bounds and leaves nothing:
uvicorn itself waits without end for the rest of a head or of a body, and for a client that does not
read. Knows nothing of paths and models; errors come in the API's shapes.
"""

import asyncio
from enum import Enum
from functools import partial
from typing import Any

import httptools
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from soloist.errors import ShuttingDown
from soloist.server.access import ReplyCount
from soloist.server.problems import Problem, problem_of
from soloist.server.replies import problem_reply

# From the connection's opening, or a request's first byte, to the end of its headers.
HEADER_S = 10.0
# From there to the end of the body.
BODY_S = 60.0
# Of silence between two requests.
IDLE_S = 5.0
# In which a client reads at least so much of what was written, or all of it.
READING_S, LEAST_READ_BYTES = 60.0, 48 * 1024
# In which a client takes note that its connection is closed.
CLOSING_S = 3.0

MOST_HEAD_BYTES = 64 * 1024
MOST_HEADERS = 128
_HEAD_PART_BYTES = 8 * 1024
# Of a body: sizes of chunks, their extensions, trailers; and as much again as the body itself has.
MOST_FRAMING_BYTES = 2 * MOST_HEAD_BYTES
MOST_CONNECTIONS = 1000
# Beyond these, for clients that are told to come back.
_SPARE = 64

# How often bounds in time are looked at, and how long a wait is never cut for want of room.
_LOOK_S = 0.5
_YOUNG_S = 1.0


class _Wait(Enum):
    """What a connection waits for its client to do, for how long; the name is a word for logs."""

    IDLE = "a request"
    HEAD = "the rest of the headers"
    BODY = "the rest of the body"
    READING = "the reply being read"
    CLOSING = "the end"

    @property
    def most_s(self) -> float:
        """Seconds."""
        return {
            _Wait.IDLE: IDLE_S, _Wait.HEAD: HEADER_S, _Wait.BODY: BODY_S,
            _Wait.READING: READING_S, _Wait.CLOSING: CLOSING_S,
        }[self]  # fmt: skip


_UPGRADES = frozenset({b"upgrade", b"http2-settings"})

# What ends for want of room.
_ENDS_EARLY = frozenset({_Wait.IDLE, _Wait.HEAD, _Wait.BODY})


class Connections:
    """The open connections of one server, and what they wait for.

    Args:
        most: of them; beyond it, one that waits for its client makes room, or the new one is told
            to come back.
        most_body_bytes: of one request.
        replies: counts those that the application has no part in.
    """

    def __init__(self, most: int, most_body_bytes: int, replies: ReplyCount) -> None:
        self.most_body_bytes, self.replies = most_body_bytes, replies
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
            connection.refuse(_no_room())

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
        self.wait: _Wait | None = None
        self.problem: Problem | None = None
        self.url = b""
        self._missing: _Wait | None = _Wait.HEAD  # what of a request is still to come
        self._takes_more = self._lingers = True
        # Bytes: of the latest data, of data since the one that a request began in, of its body, of
        # what was dropped, and of what the client has to read.
        self._num_given = self._num_fed = self._num_body = self._num_dropped = 0
        self._num_unread = 0

    # What the event loop calls.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        self._bounded = _Transport(transport, self)
        super().connection_made(self._bounded)
        self._wait_for(_Wait.HEAD)
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
        while self._missing is not _Wait.BODY and len(data) - start > _HEAD_PART_BYTES:
            self._receive(data[start : start + _HEAD_PART_BYTES])
            start += _HEAD_PART_BYTES
        self._receive(data[start:])

    def _receive(self, data: bytes) -> None:
        if not self._takes_more:
            self._drop(data)
            return
        if self._missing is None and not self._is_answering:
            self._missing, self._num_fed = _Wait.HEAD, 0
        self._num_given = len(data)
        self._num_fed += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            self.refuse(self.problem or _malformed(error))
        else:
            self._check_sizes()
        if self._takes_more and self.wait is not _Wait.READING:
            awaited = self._awaited
            if awaited is not self.wait:
                self._wait_for(awaited)

    def pause_writing(self) -> None:
        """The client does not read."""
        super().pause_writing()
        if self.wait is not _Wait.CLOSING:
            self._wait_for(_Wait.READING)

    def resume_writing(self) -> None:
        """It does again."""
        super().resume_writing()
        if self.wait is _Wait.READING:
            self._wait_for(self._awaited)

    def shutdown(self) -> None:
        """The server ends: so do waiting for a request and for a body that nobody will read."""
        self._lingers = False
        if self._missing is _Wait.BODY and self._is_answering:
            self.refuse(problem_of(ShuttingDown()))
        else:
            super().shutdown()

    # What the parser calls.

    def on_message_begin(self) -> None:
        """A request begins."""
        if self._is_answering:
            raise _Pipelined
        super().on_message_begin()
        self._missing, self._num_fed, self._num_body = _Wait.HEAD, 0, 0

    def on_headers_complete(self) -> None:
        """Its headers are whole."""
        if (
            # Or less: its exact size is unknown. Its first part was not counted.
            self._num_fed + self._num_given + _HEAD_PART_BYTES > MOST_HEAD_BYTES
            or len(self.headers) > MOST_HEADERS
        ):
            self._check_head()
        if self.parser.should_upgrade():
            return
        super().on_headers_complete()
        self._missing = _Wait.BODY
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
        if self._missing is _Wait.HEAD:  # of one that is parsed again
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
    def _awaited(self) -> _Wait | None:
        if self._missing is None and not self._is_answering:
            return _Wait.IDLE
        return self._missing

    @property
    def has_more_to_come(self) -> bool:
        """Whether the client may be sending what nobody waits for, and has time to end that."""
        return self._lingers and (self._missing is _Wait.BODY or not self._takes_more)

    def refuse(self, problem: Problem) -> None:
        """End the connection: with this, if nothing was replied to its request."""
        self._finish_with_this()
        if not self._is_answering:
            if self._missing is not _Wait.BODY:
                self._write(problem)
            self.transport.close()
        elif self._missing is _Wait.BODY:
            if self.cycle.response_started:
                self.transport.close()
            else:
                # The application asks for the body, and hears of it.
                self.problem = problem
                self.cycle.message_event.set()
                self._wait_for(_Wait.CLOSING)

    def make_room(self) -> None:
        """Others want to use the server, too."""
        if self.wait is _Wait.BODY:
            self.refuse(_no_room())
        else:
            self.transport.abort()

    def wait_is_over(self) -> None:
        """The client had its time."""
        if self.wait is _Wait.BODY:
            self.refuse(_too_slow(_Wait.BODY))
        elif self.wait is _Wait.HEAD and self._num_given:
            self.refuse(_too_slow(_Wait.HEAD))
        elif self.wait in (_Wait.IDLE, _Wait.HEAD):
            self.transport.close()
        elif self._bounded.num_unread and (
            self.wait is _Wait.CLOSING
            or self._num_unread - self._bounded.num_unread >= LEAST_READ_BYTES
        ):
            self._wait_for(_Wait.READING)
        else:
            self.transport.abort()

    def begin_closing(self) -> None:
        """The transport is told to close; the client has a while to take what was written."""
        self._takes_more = False
        self._wait_for(_Wait.CLOSING)

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

    def _wait_for(self, wait: _Wait | None) -> None:
        self.wait = wait
        if wait is None:
            self.others.end_wait(self)
        else:
            if wait is _Wait.READING:
                self._num_unread = self._bounded.num_unread
            self.others.begin_wait(self)

    def _finish_with_this(self) -> None:
        """Take no further request; the reply that is on its way says so, if it has not begun."""
        self._takes_more = False
        if self._is_answering:
            self.cycle.keep_alive = False
            if self.wait is not _Wait.READING:
                self._wait_for(None)

    def _drop(self, data: bytes) -> None:
        self._num_dropped += len(data)
        if self._is_answering and self._num_dropped > self.others.most_body_bytes:
            self.transport.abort()

    def _check_head(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > MOST_HEAD_BYTES or len(self.headers) > MOST_HEADERS:
            self.problem = _head_too_large()
            raise self.problem

    def _check_sizes(self) -> None:
        if self._missing is _Wait.HEAD and (
            self._num_fed > MOST_HEAD_BYTES or len(self.headers or ()) > MOST_HEADERS
        ):
            self.refuse(_head_too_large())
        elif self._missing is _Wait.BODY:
            if self._num_fed - 2 * self._num_body > MOST_FRAMING_BYTES:
                self.refuse(_too_much_framing())
            elif not self._is_answering and self._num_body > self.others.most_body_bytes:
                self.transport.close()

    def _write(self, problem: Problem) -> None:
        """A reply without the application."""
        path = self.url.decode("latin-1")
        reply = problem_reply(path, problem)
        headers = [*self.server_state.default_headers, *reply.raw_headers]
        lines = [name + b": " + value + b"\r\n" for name, value in headers]
        head = (STATUS_LINE[problem.status], *lines, b"connection: close\r\n\r\n")
        self.transport.write(b"".join((*head, bytes(reply.body))))
        self.others.replies.add(path, problem.status)


class _Transport(asyncio.Transport):
    """A transport whose `close` gives the client time to read what was written.

    Closing a socket with bytes that nobody read discards replies on their way; so where more may
    come, only the direction to the client is closed. The connection's bounds end the rest.
    """

    def __init__(self, transport: asyncio.Transport, connection: Connection) -> None:
        super().__init__()
        self._transport = transport
        self._connection: Connection | None = connection

    @property
    def num_unread(self) -> int:
        """Bytes that wait here for the client to read those before them."""
        return self._transport.get_write_buffer_size()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Nothing, once it is closing."""
        if self._connection is not None:
            self._transport.write(data)

    def is_closing(self) -> bool:
        return self._connection is None or self._transport.is_closing()

    def close(self) -> None:
        """Close it in both directions the second time."""
        if (connection := self.release()) is None:
            self._transport.close()
            return
        if connection.has_more_to_come:
            connection.flow.resume_reading()
            self._transport.write_eof()
        else:
            self._transport.close()
        connection.begin_closing()

    def abort(self) -> None:
        self.release()
        self._transport.abort()

    def release(self) -> "Connection | None":
        """The connection, the first time."""
        connection, self._connection = self._connection, None
        return connection

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self._transport.get_extra_info(name, default)


class _Pipelined(Exception):
    """A request came before the reply to the one before it."""


async def _answer(
    connection: Connection, app: ASGIApp, scope: Scope, receive: Receive, send: Send
) -> None:
    """The application, which hears of a body that will not come when it asks for it."""

    async def receive_in_bounds() -> Message:
        message = await receive()
        if connection.problem is not None:
            raise connection.problem
        return message

    await app(scope, receive_in_bounds, send)


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


def _malformed(error: httptools.HttpParserError) -> Problem:
    return Problem(400, f"the request is not well-formed HTTP/1.1: {str(error)[:80].lower()}")


def _too_slow(wait: _Wait) -> Problem:
    return Problem(408, f"{wait.value} did not come within {wait.most_s:g} s")


def _head_too_large() -> Problem:
    return Problem(
        431,
        f"the request's line and headers are too large (allowed: {MOST_HEAD_BYTES:,} bytes in "
        f"{MOST_HEADERS} headers)",
    )


def _too_much_framing() -> Problem:
    return Problem(
        400,
        "the body's chunks are too small, or its trailers too long (allowed on top of the body: "
        f"{MOST_FRAMING_BYTES:,} bytes and the body's size); send larger chunks",
    )


def _no_room() -> Problem:
    return Problem(
        503, "too many connections are open; try again later", code="overloaded",
        headers={"Retry-After": "1"},
    )  # fmt: skip
