"""The bytes of requests that are on their way in, all of them together."""

import asyncio
import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from soloist.server.preparation.limits import LARGE_BYTES
from soloist.server.problems import Problem

# As many bodies of the largest size as may be held at once, for all connections there are.
MOST_LARGEST = 8


class Body:
    """The body of one request, as it comes.

    Attributes:
        parts: so far.
        num_bytes: of them.
    """

    def __init__(self, bodies: "Bodies") -> None:
        self._bodies = bodies
        self.parts: list[bytes] = []
        self.num_bytes = 0

    def add(self, part: bytes) -> None:
        """Hold what came.

        Raises:
            Problem: 503 where others hold too much.
        """
        bodies = self._bodies
        if bodies.num_bytes + len(part) > bodies.most_bytes:
            raise Problem(
                503,
                f"the server holds {bodies.num_bytes:,} bytes of requests that are being read "
                f"(allowed: {bodies.most_bytes:,}); try again",
                code="busy",
                headers={"Retry-After": "1", "Connection": "close"},
            )
        bodies.num_bytes += len(part)
        self.num_bytes += len(part)
        self.parts.append(part)


class Bodies:
    """Counts the bytes that all bodies hold; used in the event loop's thread.

    Attributes:
        most_bytes: that they may hold.
        num_bytes: that they hold.

    Args:
        most_body_bytes: of one request.
    """

    def __init__(self, most_body_bytes: int) -> None:
        self.most_bytes = MOST_LARGEST * most_body_bytes
        self.num_bytes = 0

    @contextmanager
    def body(self) -> Iterator[Body]:
        """A body, which is forgotten when the context is left."""
        body = Body(self)
        try:
            yield body
        finally:
            self.num_bytes -= body.num_bytes
            if body.num_bytes > LARGE_BYTES:
                body.parts.clear()
                asyncio.get_running_loop().run_in_executor(None, give_back)


def give_back() -> None:
    """Return freed memory to the system: glibc keeps what many small parts of a body took."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
