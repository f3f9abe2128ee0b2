"""Streamed requests to an OpenAI-compatible server, and when each event arrived.

Events are read after the stream has ended, so that reading them delays none.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import httpx2

from soloist.bench.stream import Answer, ServerSaid, read_answer
from soloist.errors import ServerFailed, SettingError

Api = Literal["chat", "completions"]
# A text, or the messages of a conversation: role and content.
Prompt = str | Sequence[Mapping[str, str]]
_PATHS: dict[Api, str] = {"chat": "/chat/completions", "completions": "/completions"}
_TIMEOUT = httpx2.Timeout(600, connect=10)


class Refused(Exception):
    """The server does not take the request as it is."""

    def __init__(self, status: int, told: str) -> None:
        super().__init__(f"status {status}: {told[:500]}")
        self.told = told


@dataclass(frozen=True, slots=True)
class Target:
    """A server that is to be measured.

    Attributes:
        url: with or without /v1.
        api: which route to use.
        model: as the server calls it; None for the first that it lists.
        key: API key, or None.
        name: of the engine in rows; None for the URL.
    """

    url: str
    api: Api = "chat"
    model: str | None = None
    key: str | None = None
    name: str | None = None


class Client:
    """One connection to one server, kept open.

    Raises:
        SettingError: the target has no URL of a server.
    """

    def __init__(self, target: Target) -> None:
        url, self.target, self.api = target.url, target, target.api
        try:
            whole = httpx2.URL(url)
        except httpx2.InvalidURL as error:
            raise SettingError("URL", url, "an address such as http://localhost:8000") from error
        if whole.scheme not in ("http", "https"):
            raise SettingError("URL", url, "an address such as http://localhost:8000")
        self.url = str(whole).rstrip("/") + ("/v1" if whole.path in ("", "/") else "")
        self.name = target.name or self.url
        headers = {"Authorization": f"Bearer {target.key}"} if target.key else {}
        self._http = httpx2.Client(
            headers={**headers, "Accept-Encoding": "identity"}, timeout=_TIMEOUT
        )

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def only_model(self) -> str:
        """The first model that the server lists.

        Raises:
            ServerFailed: it cannot be reached or lists none.
        """
        try:
            reply = self._http.get(f"{self.url}/models")
            reply.raise_for_status()
            return str(reply.json()["data"][0]["id"])
        except httpx2.TransportError as error:
            raise ServerFailed(self.url, _reason(error)) from error
        except (httpx2.HTTPError, ValueError, LookupError, TypeError) as error:
            raise ServerFailed(
                self.url, f"it lists no model ({_reason(error)})", "name one with --model"
            ) from error

    def context_tokens(self, model: str) -> int | None:
        """How many tokens a model takes at most, as the server lists it; None where it does not.

        Raises:
            ServerFailed: it cannot be reached.
        """
        try:
            listed = self._http.get(f"{self.url}/models").json()["data"]
            found = [one.get("max_model_len") for one in listed if one["id"] == model]
        except httpx2.TransportError as error:
            raise ServerFailed(self.url, _reason(error)) from error
        except (httpx2.HTTPError, ValueError, LookupError, TypeError, AttributeError):
            return None
        return int(found[0]) if found and isinstance(found[0], int) else None

    def ask(self, prompt: Prompt, max_tokens: int, model: str, extra: Mapping[str, Any]) -> Answer:
        """Send one greedy request and read its stream to the end.

        Args:
            prompt: what to answer; messages for the route of conversations only.
            max_tokens: most new tokens.
            model: as the server calls it.
            extra: further fields.

        Raises:
            Refused: status 400 or 422.
            ServerFailed: anything else went wrong.
        """
        body: dict[str, Any] = {
            "model": model, "max_tokens": max_tokens, "temperature": 0, "stream": True, **extra,
        }  # fmt: skip
        if self.api == "chat":
            told = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            body["messages"] = list(told)
        else:
            assert isinstance(prompt, str), "this route takes texts"
            body["prompt"] = prompt
        request = self._http.build_request("POST", self.url + _PATHS[self.api], json=body)
        try:
            return read_answer(self._events(request))
        except httpx2.HTTPError as error:
            raise ServerFailed(self.url, _reason(error)) from error
        except ServerSaid as error:
            raise ServerFailed(self.url, f"it reports an error: {error}") from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ServerFailed(self.url, f"its stream cannot be read: {error}") from error

    def _events(self, request: httpx2.Request) -> list[tuple[float, str]]:
        events: list[tuple[float, bytes]] = []
        start, rest = time.perf_counter(), b""
        response = self._http.send(request, stream=True)
        try:
            if response.status_code != httpx2.codes.OK:
                told = response.read().decode(errors="replace")
                if response.status_code in (400, 422):
                    raise Refused(response.status_code, told)
                raise ServerFailed(self.url, f"status {response.status_code}: {told[:500]}")
            for part in response.iter_raw():
                at_s = time.perf_counter() - start
                *lines, rest = (rest + part).split(b"\n")
                events += [(at_s, line) for line in lines if line.startswith(b"data:")]
        finally:
            response.close()
        return [(at_s, line[5:].strip().decode()) for at_s, line in events]


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
