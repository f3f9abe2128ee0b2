"""GET /health, /metrics, /v1/models: how the server is and what it serves. DELETE of a request.

Nothing here waits for the device, nor takes a lock that is held while it works.
"""

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from soloist.engine.loop import EngineLoop
from soloist.server import llama_cpp
from soloist.server.host import Host, Ready
from soloist.server.preparation.jobs import served_name
from soloist.server.problems import Problem
from soloist.server.replies import json_reply

# Something runs and nothing has moved for so long: other servers should get the requests, and an
# orchestrator should start this one again.
READY_S, LIVE_S = 10.0, 60.0


async def health(request: Request) -> Response:
    """200 while idle or while the engine gets on; else 503 and why not."""
    host: Host = request.app.state.host
    if host.is_loading:
        body = {"status": "loading", "progress": host.loaded_share}
        return json_reply(body, 503, {"Retry-After": "1"})
    try:
        ready = host.ready()
    except Problem as problem:
        return json_reply({"status": "stopped", "reason": problem.message}, 503)
    if (stuck := _stuck(ready.loop, READY_S)) is not None:
        return stuck
    if llama_cpp.asks_for_slots(request):
        return llama_cpp.health(request, ready)
    load, report = ready.loop.load, ready.engine.report
    return json_reply(
        {
            "status": "ready",
            "model": host.config.names[0],
            "device": report.place,
            "executor": report.executor,
            "requests_running": load.num_running,
            "requests_waiting": load.num_waiting,
        }
    )


async def live(request: Request) -> Response:
    """200 unless starting the process again is what would help: also while it loads or ends."""
    host: Host = request.app.state.host
    if host.failure is not None:
        return json_reply({"status": "failed", "reason": host.failure.message}, 503)
    stuck = None if host.loop is None else _stuck(host.loop, LIVE_S)
    return json_reply({"status": "live"}) if stuck is None else stuck


def _stuck(loop: EngineLoop, most_s: float) -> Response | None:
    """503 where something runs and nothing has moved for longer; None where it gets on."""
    progress = loop.progress
    if progress.age_s <= most_s:
        return None
    return json_reply(
        {
            "status": "stuck",
            "reason": f"no progress for {progress.age_s:.0f} s while {progress.step}",
            "last_step_age_s": progress.age_s,
        },
        503,
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
    running.cut(Problem(499, "the request was cancelled through the API", code="cancelled"))
    return json_reply({"id": request_id, "object": "request.cancelled", "deleted": True})


def _model(name: str, ready: Ready) -> dict[str, object]:
    engine = ready.engine
    return {
        "id": name,
        "object": "model",
        "created": ready.created,
        "owned_by": "soloist",
        "root": engine.report.adapter or engine.report.model,
        "parent": engine.report.model if engine.report.adapter else None,
        "max_model_len": engine.resolved.context_tokens,
        # The same, as llama.vscode's agent reads it: it takes 8,192 where it finds none.
        "context_length": engine.resolved.context_tokens,
        "default_max_tokens": engine.processor.default_tokens,
        "fills_in": engine.tokenizer.fills_in,
        "family": engine.config.family,
        "num_parameters": engine.report.num_parameters,
    }
