"""Who may use the API, and what every reply has in common."""

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from soloist.server import playground
from soloist.server.config import ServerConfig
from soloist.server.metrics import Metrics
from soloist.server.origin import Senders
from soloist.server.problems import Problem
from soloist.server.replies import problem_reply

# What a page, a load balancer and a reader of the documentation need before they have a key.
OPEN_PATHS = frozenset(
    {"/health", "/health/ready", "/health/live", "/docs", "/openapi.json", *playground.PATHS}
)


def common_headers(config: ServerConfig) -> list[tuple[str, str]]:
    """Headers of every reply: no page elsewhere frames one, guesses its type or embeds it."""
    headers = [("X-Content-Type-Options", "nosniff"), ("X-Frame-Options", "DENY")]
    if not config.cors_origins:
        headers.append(("Cross-Origin-Resource-Policy", "same-origin"))
    return headers


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


class ReplyCount:
    """Counts replies by path and status.

    Args:
        metrics: where they are counted.
        paths: known ones; others are counted together, since anybody can make them up.
    """

    def __init__(self, metrics: Metrics, paths: Sequence[str]) -> None:
        self._metrics, self._paths = metrics, frozenset(paths)

    def add(self, path: str, status: int) -> None:
        """A reply has begun."""
        known = path if path in self._paths else "other"
        self._metrics.replies.labels(known, str(status)).inc()


class Gate:
    """Middleware, the outermost: refuses what a foreign web page may have sent, counts replies.

    Args:
        app: what is behind it.
        senders: whose requests are taken.
        replies: counts them.
    """

    def __init__(self, app: ASGIApp, senders: Senders, replies: ReplyCount) -> None:
        self._app, self._senders, self._replies = app, senders, replies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, has_begun = scope["path"], False

        async def counted(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                self._replies.add(path, message["status"])
            await send(message)

        app = self._app
        try:
            self._senders.check(scope["method"], path, scope["headers"])
        except Problem as problem:
            app = problem_reply(path, problem)
        try:
            await app(scope, receive, counted)
        except Exception:
            if not has_begun:  # what is outside of every middleware replies
                self._replies.add(path, 500)
            raise


class Lock:
    """Middleware: asks for a key.

    Args:
        app: what is behind it.
        keys: of the API.
    """

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        app = self._app
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                self._keys.check(Headers(scope=scope))
            except Problem as problem:
                app = problem_reply(scope["path"], problem)
        await app(scope, receive, send)


def _digest(key: str) -> bytes:
    """Of one length, whatever the key's is."""
    return hashlib.sha256(key.encode(errors="replace")).digest()
