"""GET /health, /metrics, /v1/models: how the server is and what it serves. DELETE of a request."""

import asyncio

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from soloist.errors import SoloistError
from soloist.server.host import Host, Ready
from soloist.server.names import served_name
from soloist.server.problems import Problem
from soloist.server.replies import json_reply

# A chunk of a prompt is the longest that the device loop may be busy without looking up.
PING_S = 10.0


async def health(request: Request) -> Response:
    """200 if the device loop answers; else 503 and why not."""
    host: Host = request.app.state.host
    if host.is_loading:
        body = {"status": "loading", "progress": host.loaded_share}
        return json_reply(body, 503, {"Retry-After": "1"})
    try:
        ready = host.ready()
        await asyncio.wait_for(asyncio.wrap_future(ready.loop.ping()), PING_S)
    except TimeoutError:
        reason = f"the device loop has not answered for {PING_S:.0f} s"
        return json_reply({"status": "stuck", "reason": reason}, 503)
    except (Problem, SoloistError) as error:
        return json_reply({"status": "stopped", "reason": error.message}, 503)
    load = ready.loop.load
    return json_reply(
        {
            "status": "ready",
            "model": host.config.names[0],
            "device": ready.engine.report.place,
            "executor": ready.engine.report.executor,
            "requests_running": load.num_running,
            "requests_waiting": load.num_waiting,
        }
    )


async def metrics(request: Request) -> Response:
    """Counters for Prometheus."""
    host: Host = request.app.state.host
    return Response(host.metrics.text(), media_type=CONTENT_TYPE_LATEST)


async def models(request: Request) -> Response:
    """The names the model answers to."""
    host: Host = request.app.state.host
    ready = host.ready()
    return json_reply(
        {"object": "list", "data": [_model(name, ready) for name in host.config.names]}
    )


async def model(request: Request) -> Response:
    """One of them."""
    host: Host = request.app.state.host
    ready = host.ready()
    return json_reply(_model(served_name(host.config.names, request.path_params["name"]), ready))


async def cancel(request: Request) -> Response:
    """End a running request; its own client is told."""
    host: Host = request.app.state.host
    request_id = request.path_params["request_id"]
    running = host.running.get(request_id)
    if running is None:
        raise Problem(404, f"no request '{request_id}' is running", code="not_found")
    running.cut(Problem(499, "the request was cancelled on demand", code="cancelled"))
    return json_reply({"id": request_id, "object": "request.cancelled", "deleted": True})


def _model(name: str, ready: Ready) -> dict[str, object]:
    engine = ready.engine
    return {
        "id": name,
        "object": "model",
        "created": ready.created,
        "owned_by": "soloist",
        "max_model_len": engine.resolved.context_tokens,
        "fills_in": engine.tokenizer.fills_in,
        "family": engine.config.family,
        "num_parameters": engine.report.num_parameters,
    }
