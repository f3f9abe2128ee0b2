"""Replies that are not streams."""

from collections.abc import Mapping

import orjson
from starlette.responses import Response


def json_reply(
    body: Mapping[str, object], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """JSON by orjson: floats as short as they can be, everything UTF-8."""
    return Response(
        orjson.dumps(body), status, headers=dict(headers or {}), media_type="application/json"
    )
