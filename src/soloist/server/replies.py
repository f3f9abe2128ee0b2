"""Replies that are not streams: JSON, and errors as the clients of a path read them."""

from collections.abc import Iterator, Mapping

import orjson
from starlette.responses import Response

from soloist.server.problems import Problem

# Items of a list that are written at a time: with twenty alternatives each, a millisecond's work.
_AT_ONCE = 256


def json_reply(
    body: Mapping[str, object], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """JSON by orjson: floats as short as they can be, everything UTF-8."""
    return Response(
        orjson.dumps(body), status, headers=dict(headers or {}), media_type="application/json"
    )


def long_json(value: object) -> bytes:
    """The bytes that `orjson.dumps` makes, for a thread: others run between their pieces."""
    return b"".join(_pieces(value))


def _pieces(value: object) -> Iterator[bytes]:
    match value:
        case dict() if value:
            for number, (key, held) in enumerate(value.items()):
                yield (b"," if number else b"{") + orjson.dumps(key) + b":"
                yield from _pieces(held)
            yield b"}"
        case list() if len(value) > _AT_ONCE:
            for start in range(0, len(value), _AT_ONCE):
                yield (b"," if start else b"[") + orjson.dumps(value[start : start + _AT_ONCE])[
                    1:-1
                ]
            yield b"]"
        case list() if value and isinstance(value[0], dict):
            for number, held in enumerate(value):
                yield b"," if number else b"["
                yield from _pieces(held)
            yield b"]"
        case _:
            yield orjson.dumps(value)


def problem_reply(path: str, problem: Problem) -> Response:
    """An error, as Anthropic's clients read it below `/v1/messages` and OpenAI's elsewhere."""
    is_anthropics = path.startswith("/v1/messages")
    body = problem.anthropic_body() if is_anthropics else problem.body()
    return json_reply(body, problem.status, problem.headers)
