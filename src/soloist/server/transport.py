"""A socket whose closing loses no reply."""

import asyncio
from typing import Protocol

from uvicorn.protocols.http.flow_control import FlowControl


class Closing(Protocol):
    """A connection, as its transport sees it."""

    flow: FlowControl

    @property
    def has_more_to_come(self) -> bool:
        """Whether the client may be sending what nobody waits for, and has time to end that."""

    def begin_closing(self) -> None:
        """The transport is told to close; the client has a while to take what was written."""


class LingeringTransport(asyncio.Transport):
    """A transport whose `close` gives the client time to read what was written.

    Closing a socket with bytes that nobody read discards replies on their way; so where more may
    come, only the direction to the client is closed. The connection's bounds end the rest.
    """

    def __init__(self, transport: asyncio.Transport, connection: Closing) -> None:
        super().__init__()
        self._transport = transport
        self._connection: Closing | None = connection

    @property
    def num_unread(self) -> int:
        """Bytes that wait here for the client to read those before them."""
        return self._transport.get_write_buffer_size()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Nothing, once it is closing."""
        if self._connection is not None:
            self._transport.write(data)

    def is_closing(self) -> bool:
        """Whether nothing more is written."""
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
        """Close it at once, whatever the client has not read."""
        self.release()
        self._transport.abort()

    def release(self) -> Closing | None:
        """The connection, the first time."""
        connection, self._connection = self._connection, None
        return connection

    def pause_reading(self) -> None:
        """Take nothing from the client for now."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Take what comes again."""
        self._transport.resume_reading()

    def get_extra_info(self, name: str, default: object = None) -> object:
        """What is known about the socket."""
        return self._transport.get_extra_info(name, default)
