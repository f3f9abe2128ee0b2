"""What a connection may take of the server in time, bytes and number; refusals of more."""

import resource
from enum import Enum

import httptools

from soloist.server.problems import Problem

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
# Of a body: sizes of chunks, their extensions, trailers; and as much again as the body itself has.
MOST_FRAMING_BYTES = 2 * MOST_HEAD_BYTES
MOST_CONNECTIONS = 1000
# Beside connections: the model's files, libraries, the GPU's, other processes' pipes.
_RESERVED = 256


class Wait(Enum):
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
            Wait.IDLE: IDLE_S, Wait.HEAD: HEADER_S, Wait.BODY: BODY_S,
            Wait.READING: READING_S, Wait.CLOSING: CLOSING_S,
        }[self]  # fmt: skip


def connections_for(most: int) -> int:
    """Connections, up to `most`, that the system lets this process have, once it is asked for them.

    The soft limit is raised as far as `most` needs and the hard one allows, and never lowered.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most + _RESERVED
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return most
    # A limit without room for the reserve still has room for some connections.
    return max(min(most, soft - _RESERVED), min(most, soft // 4))


def malformed(error: httptools.HttpParserError) -> Problem:
    """A request that cannot be parsed."""
    return Problem(400, f"the request is not well-formed HTTP/1.1: {str(error)[:80].lower()}")


def too_slow(wait: Wait) -> Problem:
    """A part of a request that came too late."""
    return Problem(408, f"{wait.value} did not come within {wait.most_s:g} s")


def head_too_large() -> Problem:
    """A line and headers of too many bytes, or too many headers."""
    return Problem(
        431,
        f"the request's line and headers are too large (allowed: {MOST_HEAD_BYTES:,} bytes in "
        f"{MOST_HEADERS} headers)",
    )


def too_much_framing() -> Problem:
    """A body with too many bytes around it."""
    return Problem(
        400,
        "the body's chunks are too small, or its trailers too long (allowed on top of the body: "
        f"{MOST_FRAMING_BYTES:,} bytes and the body's size); send larger chunks",
    )


def no_room() -> Problem:
    """A connection too many."""
    return Problem(
        503, "too many connections are open; try again later", code="overloaded",
        headers={"Retry-After": "1"},
    )  # fmt: skip
