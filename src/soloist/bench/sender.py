"""A neighbour in a process of its own: `python -m soloist.bench.sender`.

It reads an `Order` as a line of JSON from stdin, prepares the request and says `ready`. For each
further line, a delay in seconds, it waits so long, sends the request and writes an `Outcome`.
"""

import json
import sys
import time
from dataclasses import asdict, dataclass

import httpx2

from soloist.bench.bodies import KINDS


@dataclass(frozen=True, slots=True)
class Order:
    """What to send.

    Attributes:
        url: of the server, with /v1.
        model: as the server calls it.
        key: API key, or None.
        kind: a name of `NEIGHBOURS`.
        prompt_tokens: of a long prompt.
        patience_s: after so long without an answer the neighbour hangs up.
    """

    url: str
    model: str
    key: str | None
    kind: str
    prompt_tokens: int
    patience_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended.

    Attributes:
        status: of the reply; where there is none, why.
        seconds: from sending its first byte to having read all of the reply.
        num_bytes: of its body.
    """

    status: str
    seconds: float
    num_bytes: int


LONG_PROMPT, PROBES = "long-prompt", "probes"
_NUM_PROBES = 1000
NEIGHBOURS = {name: kind.told for name, kind in KINDS.items()} | {
    LONG_PROMPT: "a prompt of 3,000 tokens",
    PROBES: f"GET /health, {_NUM_PROBES:,} times without a pause",
}


def main() -> None:
    """Do what stdin says, until it ends."""
    order = Order(**json.loads(sys.stdin.readline()))
    headers = {"Authorization": f"Bearer {order.key}"} if order.key else {}
    timeout = httpx2.Timeout(order.patience_s)
    with httpx2.Client(headers=headers, timeout=timeout) as http:
        # Serving the first request of a process takes longer: its connection, and modules.
        _send(http, http.build_request("GET", _health(order.url)))
        content = _body(order, 0)
        _say("ready")
        for turn, line in enumerate(sys.stdin):
            if order.kind == LONG_PROMPT:
                content = _body(order, turn)
            time.sleep(float(line))
            _say(json.dumps(asdict(_outcome(http, order, content))))


def _outcome(http: httpx2.Client, order: Order, content: bytes) -> Outcome:
    start, status = time.perf_counter(), ""
    if order.kind == PROBES:
        for _ in range(_NUM_PROBES):
            status = _send(http, http.build_request("GET", _health(order.url)))
            if time.perf_counter() - start > order.patience_s:
                break
    else:
        headers = {"Content-Type": "application/json"}
        url = f"{order.url}/completions"
        status = _send(http, http.build_request("POST", url, headers=headers, content=content))
    return Outcome(status, time.perf_counter() - start, len(content))


def _send(http: httpx2.Client, request: httpx2.Request) -> str:
    try:
        return str(http.send(request).status_code)
    except httpx2.TimeoutException:
        return "no answer"
    except httpx2.HTTPError as error:
        return type(error).__name__


def _health(url: str) -> str:
    return f"{url.removesuffix('/v1')}/health"


def _body(order: Order, turn: int) -> bytes:
    """Long prompts begin differently each time, so that no server has cached them."""
    if order.kind == PROBES:
        return b""
    if order.kind != LONG_PROMPT:
        return KINDS[order.kind].body(order.model)
    ids = [10 + (i * (turn + 3)) % 200 for i in range(order.prompt_tokens)]
    ids[0] = 10 + turn % 200
    return json.dumps(
        {"model": order.model, "max_tokens": 1, "temperature": 0, "prompt": ids}
    ).encode()


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
