"""What the ingress has to know of a request's body: the model it names, and how it begins.

A large body is read by a process beside the ingress, which passes other clients' streams on.
"""

import asyncio
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import orjson

from soloist.deploy.prefix import hashes_of

# Read in about a millisecond.
_QUICK_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Gist:
    """Of one body.

    Attributes:
        model: that it names, if it does.
        hashes: see `Wish`.
    """

    model: str | None = None
    hashes: tuple[bytes, ...] = ()


def gist_of(body: bytes) -> Gist:
    """Of JSON; what is no object has none, and its replica says what is wrong with it."""
    try:
        read = orjson.loads(body)
        if not isinstance(read, dict):
            return Gist()
        model = read.get("model")
        return Gist(model if isinstance(model, str) else None, hashes_of(read))
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return Gist()


class Reader:
    """Reads bodies, short ones at once."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    async def read(self, body: bytes) -> Gist:
        """Its gist."""
        if len(body) <= _QUICK_BYTES:
            return gist_of(body)
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, mp_context=context)
        return await asyncio.get_running_loop().run_in_executor(self._pool, gist_of, body)
