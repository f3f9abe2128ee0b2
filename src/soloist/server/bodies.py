"""From the bytes of a request to a checked model of it."""

import asyncio
from typing import TypeVar

import orjson
from pydantic import ValidationError
from starlette.requests import Request

from soloist.server.fields import Fields
from soloist.server.problems import Problem, problem_of_fields

# A client that needs longer for a body is not there any more.
BODY_S = 60.0

Wanted = TypeVar("Wanted", bound=Fields)


async def read(request: Request, schema: type[Wanted], most_bytes: int) -> Wanted:
    """The request's body as `schema`.

    Raises:
        Problem: it is too large, compressed, comes too slowly, is no JSON object, or has unusable
            fields.
    """
    coding = request.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise Problem(415, f"Content-Encoding is '{coding}' (allowed: none); send plain JSON")
    try:
        async with asyncio.timeout(BODY_S):
            body = await _bytes(request, most_bytes)
    except TimeoutError as error:
        raise Problem(408, f"the body did not come within {BODY_S:.0f} s") from error
    try:
        given = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Problem(400, f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(given, dict):
        raise Problem(400, "the body is JSON, but not an object", code="invalid_json")
    try:
        return schema.model_validate(given)
    except ValidationError as error:
        raise problem_of_fields(error) from error


async def _bytes(request: Request, most_bytes: int) -> bytes:
    told = request.headers.get("content-length", "0")
    if told.isdecimal() and int(told) > most_bytes:
        raise _too_large(most_bytes)
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most_bytes:
            raise _too_large(most_bytes)
        parts.append(part)
    return b"".join(parts)


def _too_large(most_bytes: int) -> Problem:
    return Problem(
        413, f"the body is larger than {most_bytes:,} bytes", headers={"Connection": "close"}
    )
