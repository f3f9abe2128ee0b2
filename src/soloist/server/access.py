"""Who may use the API, and what every reply has in common."""

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from soloist.server import playground
from soloist.server.metrics import Metrics
from soloist.server.problems import Problem
from soloist.server.replies import problem_reply

# What a page, a load balancer and a reader of the documentation need before they have a key.
OPEN_PATHS = frozenset({"/health", "/docs", "/openapi.json", *playground.PATHS})


class Keys:
    """API keys, compared in a time that tells nothing about them.

    Args:
        keys: any of them opens the API; none leaves it open.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def check(self, headers: Headers) -> None:
        """Refuse a request without a key, which may come as OpenAI's or as Anthropic's clients do.

        Raises:
            Problem: 401.
        """
        if not self._digests:
            return
        kind, _, token = headers.get("authorization", "").partition(" ")
        given = token if kind.lower() == "bearer" else headers.get("x-api-key", "")
        found = [hmac.compare_digest(_digest(given), known) for known in self._digests]
        if not any(found):  # every key was compared
            raise Problem(
                401,
                "a valid API key is needed: send Authorization: Bearer KEY, or x-api-key: KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


class Gate:
    """Middleware: checks the key and counts replies.

    Args:
        app: what is behind it.
        keys: of the API.
        metrics: replies by path and status are counted here.
        paths: known ones; others are counted together, since anybody can make them up.
    """

    def __init__(self, app: ASGIApp, keys: Keys, metrics: Metrics, paths: Sequence[str]) -> None:
        self._app, self._keys, self._metrics = app, keys, metrics
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                known = path if path in self._paths else "other"
                self._metrics.replies.labels(known, str(message["status"])).inc()
            await send(message)

        app = self._app
        if path not in OPEN_PATHS:
            try:
                self._keys.check(Headers(scope=scope))
            except Problem as problem:
                app = problem_reply(path, problem)
        await app(scope, receive, counted)


def _digest(key: str) -> bytes:
    """Of one length, whatever the key's is."""
    return hashlib.sha256(key.encode(errors="replace")).digest()
