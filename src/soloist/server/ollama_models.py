"""GET /api/tags, /api/ps, /api/version and POST /api/show: what Ollama's clients ask of a model."""

import hashlib

from starlette.requests import Request
from starlette.responses import Response

from soloist.errors import TokenizerError
from soloist.server.bodies import prepared, ready_of
from soloist.server.host import Host, Ready
from soloist.server.ollama import timestamp
from soloist.server.preparation.jobs import OLLAMA_SHOWS
from soloist.server.replies import json_reply
from soloist.text.parts import PartFormat, format_of

# Of Ollama whose API this is: clients ask for a least version.
API_VERSION = "0.12.0"

_NEVER = "9999-12-31T23:59:59Z"
_TAG = ":latest"


async def tags(request: Request) -> Response:
    """The names that the model answers to."""
    host: Host = request.app.state.host
    ready = host.ready()
    return json_reply({"models": [_model(name, ready) for name in host.config.names]})


async def ps(request: Request) -> Response:
    """The same: the model is loaded until the server ends."""
    host: Host = request.app.state.host
    ready = host.ready()
    loaded = {
        "expires_at": _NEVER,
        "size_vram": 0 if ready.engine.resolved.device == "cpu" else _size_bytes(ready),
        "context_length": ready.engine.resolved.context_tokens,
    }
    return json_reply({"models": [_model(name, ready) | loaded for name in host.config.names]})


async def show(request: Request) -> Response:
    """One model."""
    ready = ready_of(request)
    await prepared(request, ready, OLLAMA_SHOWS)
    engine = ready.engine
    family = engine.config.family
    return json_reply(
        {
            "modified_at": timestamp(ready.created),
            "details": _details(ready),
            "model_info": {
                "general.architecture": family,
                "general.parameter_count": engine.report.num_parameters,
                f"{family}.context_length": engine.resolved.context_tokens,
            },
            "capabilities": _capabilities(ready),
        }
    )


async def version(_: Request) -> Response:
    """The version of the API."""
    return json_reply({"version": API_VERSION})


def _model(name: str, ready: Ready) -> dict[str, object]:
    tagged = name if ":" in name else name + _TAG
    return {
        "name": tagged,
        "model": tagged,
        "modified_at": timestamp(ready.created),
        "size": _size_bytes(ready),
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "details": _details(ready),
    }


def _size_bytes(ready: Ready) -> int:
    return ready.engine.report.checkpoint_bytes


def _details(ready: Ready) -> dict[str, object]:
    engine = ready.engine
    return {
        "parent_model": engine.report.model if engine.report.adapter else "",
        "format": "safetensors",
        "family": engine.config.family,
        "families": [engine.config.family],
        "parameter_size": _rounded(engine.report.num_parameters),
        "quantization_level": engine.report.weights or str(engine.resolved.dtype.value),
    }


def _capabilities(ready: Ready) -> list[str]:
    """What the model's template and tokens allow, in Ollama's words."""
    engine = ready.engine
    try:
        style = format_of(engine.chat_template.source)
    except TokenizerError:  # there is none
        style = PartFormat(None, thinks=False)
    found = {
        "completion": True,
        "tools": style.calls is not None,
        "insert": engine.tokenizer.fills_in,
        "thinking": style.thinks,
    }
    return [name for name, has in found.items() if has]


def _rounded(num_parameters: int) -> str:
    if num_parameters >= 10**9:
        return f"{num_parameters / 1e9:.1f}B"
    return f"{num_parameters / 1e6:.1f}M"
