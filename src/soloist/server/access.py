"""Who may use the API, and what every reply has in common."""

import hashlib
import hmac
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from soloist.server import playground
from soloist.server.config import ServerConfig
from soloist.server.origin import Senders
from soloist.server.problems import Problem
from soloist.server.replies import problem_reply

# Counts a reply by its path and status.
CountReply = Callable[[str, int], None]

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


class Gate:
    """Middleware, the outermost: refuses what a foreign web page may have sent, counts replies.

    Args:
        app: what is behind it.
        senders: whose requests are taken.
        count_reply: counts them.
    """

    def __init__(self, app: ASGIApp, senders: Senders, count_reply: CountReply) -> None:
        self._app, self._senders, self._count_reply = app, senders, count_reply

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
                self._count_reply(path, message["status"])
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
                self._count_reply(path, 500)
            raise


class Lock:
    """Middleware: asks for a key, and compares it in a time that tells nothing about the keys.

    Args:
        app: what is behind it.
        api_keys: any of them opens the API; none leaves it open.
    """

    def __init__(self, app: ASGIApp, api_keys: Sequence[str]) -> None:
        self._app, self._digests = app, [_digest(key) for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        app = self._app
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                self._check(Headers(scope=scope))
            except Problem as problem:
                app = problem_reply(scope["path"], problem)
        await app(scope, receive, send)

    def _check(self, headers: Headers) -> None:
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


def _digest(key: str) -> bytes:
    """Of one length, whatever the key's is."""
    return hashlib.sha256(key.encode(errors="replace")).digest()
