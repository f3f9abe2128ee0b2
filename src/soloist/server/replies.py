"""Replies that are not streams: JSON, and errors as the clients of a path read them."""

from collections.abc import Mapping

import orjson
from starlette.responses import Response

from soloist.server.problems import Problem


def json_reply(
    body: Mapping[str, object], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """JSON by orjson: floats as short as they can be, everything UTF-8."""
    return Response(
        orjson.dumps(body), status, headers=dict(headers or {}), media_type="application/json"
    )


def problem_reply(path: str, problem: Problem) -> Response:
    """An error, as Anthropic's clients read it below `/v1/messages` and OpenAI's elsewhere."""
    is_anthropics = path.startswith("/v1/messages")
    body = problem.anthropic_body() if is_anthropics else problem.body()
    return json_reply(body, problem.status, problem.headers)
