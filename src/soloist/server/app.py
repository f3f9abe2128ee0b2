"""The application: which path is answered by what, and what an error becomes."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from threading import Thread
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ExceptionHandler

from soloist.errors import SoloistError
from soloist.server import documentation, llama_cpp, ollama, ollama_models, playground, status
from soloist.server.access import CountReply, Gate, Lock
from soloist.server.bodies import whole_reply
from soloist.server.chat import chat_completions
from soloist.server.completions import completions
from soloist.server.config import ServerConfig
from soloist.server.host import Host
from soloist.server.messages import messages
from soloist.server.origin import Senders
from soloist.server.preparation.jobs import COUNT_TOKENS, DETOKENIZE, TOKENIZE
from soloist.server.problems import Problem, problem_of
from soloist.server.replies import problem_reply
from soloist.server.responses import responses

log = logging.getLogger(__name__)

# Asked in this order for every request: those whose first token is waited for go first.
ROUTES = (
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/infill", llama_cpp.infill, methods=["POST"]),
    Route("/completion", llama_cpp.completion, methods=["POST"]),
    Route("/v1/responses", responses, methods=["POST"]),
    Route("/v1/messages", messages, methods=["POST"]),
    Route("/v1/messages/count_tokens", partial(whole_reply, job=COUNT_TOKENS), methods=["POST"]),
    Route("/api/chat", ollama.chat, methods=["POST"]),
    Route("/api/generate", ollama.generate, methods=["POST"]),
    Route("/api/show", ollama_models.show, methods=["POST"]),
    Route("/api/tags", ollama_models.tags),
    Route("/api/ps", ollama_models.ps),
    Route("/api/version", ollama_models.version),
    Route("/v1/chat/completions/{request_id}", status.cancel, methods=["DELETE"]),
    Route("/v1/completions/{request_id}", status.cancel, methods=["DELETE"]),
    Route("/v1/responses/{request_id}", status.cancel, methods=["DELETE"]),
    Route("/v1/responses/{request_id}/cancel", status.cancel, methods=["POST"]),
    Route("/v1/messages/{request_id}", status.cancel, methods=["DELETE"]),
    Route("/v1/models", status.models),
    Route("/v1/models/{name:path}", status.model),
    Route("/tokenize", partial(whole_reply, job=TOKENIZE), methods=["POST"]),
    Route("/detokenize", partial(whole_reply, job=DETOKENIZE), methods=["POST"]),
    Route("/props", llama_cpp.props),
    Route("/slots", llama_cpp.slots),
    Route("/health", status.health),
    Route("/health/ready", status.health),
    Route("/health/live", status.live),
    Route("/metrics", status.metrics),
    Route("/docs", documentation.page),
    Route("/openapi.json", documentation.openapi),
    Route("/", playground.page),
    Route("/playground/{name:path}", playground.part),
)


def make_app(host: Host) -> Starlette:
    """The application of one server; starting it loads the engine, ending it ends the engine."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        host.start()
        # While the model is loaded: beside streams it would hold them up.
        Thread(target=documentation.prepare, name="soloist-documentation", daemon=True).start()
        yield
        host.close()

    app = Starlette(
        routes=ROUTES,
        middleware=middleware_of(host.config, reply_counter(host)),
        lifespan=lifespan,
        exception_handlers=EXCEPTION_HANDLERS,
    )
    app.state.host = host
    return app


def middleware_of(config: ServerConfig, count_reply: CountReply) -> list[Middleware]:
    """What stands before every route: who may use the API, and from which pages."""
    senders = Senders(config.host, config.allowed_hosts, config.cors_origins)
    middleware = [Middleware(Gate, senders=senders, count_reply=count_reply)]
    if origins := config.cors_origins:
        # Before the lock: a browser asks without a key whether it may ask.
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=origins,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=["x-request-id"],
            )
        )
    middleware.append(Middleware(Lock, api_keys=config.api_keys))
    return middleware


def reply_counter(host: Host) -> CountReply:
    """What counts the replies of this application, and those that never reach it."""
    paths = frozenset(route.path for route in ROUTES)

    def count(path: str, status: int) -> None:
        known = path if path in paths else "other"  # anybody can make up others
        host.metrics.replies.labels(known, str(status)).inc()

    return count


def _reply(request: Request, problem: Problem) -> Response:
    return problem_reply(request.url.path, problem)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Problem | SoloistError), "registered for these"
    return _reply(request, problem_of(error))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for it"
    if error.status_code == 405 and request.path_params:
        # A path of the API that is not served here, such as /v1/messages/batches, looks like an id.
        error = HTTPException(404)
    told = f"{request.method} {request.url.path}: {error.detail.lower()}"
    if error.status_code == 404:
        told += f" (available: {', '.join(route.path for route in ROUTES)})"
    return _reply(request, Problem(error.status_code, told, headers=error.headers))


async def _gone(request: Request, _: Exception) -> Response:
    return _reply(request, Problem(499, "the client went away"))


async def _internal_error(request: Request, error: Exception) -> Response:
    # The server's log has the traceback. Uvicorn closes the connection, so the client is told.
    told = f"a bug in Soloist: {type(error).__name__}; the server's log has the traceback"
    return _reply(request, Problem(500, told, code="internal", headers={"Connection": "close"}))


# What errors become, in the application of any server of this API.
EXCEPTION_HANDLERS: dict[Any, ExceptionHandler] = {
    Problem: _refused,
    SoloistError: _refused,
    HTTPException: _http_error,
    ClientDisconnect: _gone,
    Exception: _internal_error,
}
