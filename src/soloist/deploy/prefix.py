"""How a request begins: a chain of hashes, and the session it belongs to. Knows nothing of Ray.

A replica has cached what it has read. Which tokens those are only the replica knows; here the text
of the request stands for them, in pieces of a fixed length. The hash of a piece covers all pieces
before it, so that equal hashes mean equal beginnings (the scheme of vLLM's hashes of blocks).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import orjson

# Of JSON, about a quarter as many tokens: replicas cache prompts in chunks of 128 tokens and more.
PIECE_BYTES = 512
# Beginnings longer than two megabytes are told apart by their first two.
MOST_PIECES = 4096

# In the order in which chat templates and APIs put them before a prompt.
_STEADY = ("model", "tools", "functions", "system", "instructions", "input_extra", "input_prefix")
_GROWING = ("messages", "input", "prompt", "content")


@dataclass(frozen=True, slots=True)
class Wish:
    """What a request asks of the choice of its replica.

    Attributes:
        hashes: of its beginning, the first piece first; of 8 bytes each.
        session: requests of one session go to one replica, where that is possible.
    """

    hashes: tuple[bytes, ...] = ()
    session: str | None = None


def hashes_of(body: Mapping[str, Any]) -> tuple[bytes, ...]:
    """The chain of hashes of a request's whole pieces; what is shorter than one has none."""
    text = b"".join(_pieces(body))
    chain, found = b"", []
    for start in range(0, min(len(text), MOST_PIECES * PIECE_BYTES) - PIECE_BYTES + 1, PIECE_BYTES):
        piece = text[start : start + PIECE_BYTES]
        chain = blake2b(piece, digest_size=8, key=chain).digest()
        found.append(chain)
    return tuple(found)


def _pieces(body: Mapping[str, Any]) -> Iterator[bytes]:
    for name in _STEADY:
        if (value := body.get(name)) is not None:
            yield orjson.dumps({name: value})
    for name in _GROWING:
        match body.get(name):
            case None:
                pass
            case list() as items:  # a conversation that grew begins as it did before
                for item in items:
                    yield orjson.dumps(item)
            case value:
                yield orjson.dumps(value)
