"""Hostile clients in a process of their own: python -m server.chaos PORT SEED SECONDS.

It prepares its bodies and says `ready`. After a line it does its worst for so many seconds, or
until its stdin has more; kinds of which nothing came yet may then go on until something does. It
writes what came of it as JSON: `outcomes`, how often which kind of client saw what; `offences`,
what no server may do; `last`, the latest requests. All clients are asyncio tasks; each draws from a
generator of its own, so that a seed repeats what they do, if not when.
"""

import asyncio
import contextlib
import json
import random
import socket
import struct
import sys
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from server.values import LIKELY, MESSAGES, WORDS, junk
from soloist.bench.bodies import KINDS
from soloist.bench.text import python_characters

MODEL = "etude-draft"
CONTEXT_TOKENS = 1024
# A whole request has its answer in this time, however busy the server is; a huge one may be read
# for four times the seconds of a processor that its bytes are given.
PATIENCE_S, HUGE_PATIENCE_S = 60, 300
# Bodies up to this many bytes are taken.
LIMIT_BYTES = 32 * 2**20
# Longer bodies are read by processes of their own, two at a time, behind all others.
HUGE_BYTES = 256 * 2**10
GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
JSON_PATHS = (*GENERATING, "/v1/messages/count_tokens", "/tokenize", "/detokenize")
# Refusals that are answers: too many requests, or too much of one. Not one of them is a mistake.
BUSY = frozenset({429, 503})
REFUSED = frozenset({400, 401, 403, 404, 405, 408, 411, 413, 415, 421, 422, 431}) | BUSY


@dataclass
class Scene:
    """What all clients share."""

    port: int
    seed: str
    bodies: dict[str, bytes]
    outcomes: Counter[str] = field(default_factory=Counter)
    offences: list[str] = field(default_factory=list)
    last: deque[str] = field(default_factory=lambda: deque(maxlen=40))
    start: float = field(default_factory=time.monotonic)

    def has_seen(self, kind: str) -> bool:
        """Whether anything came of a client of this kind."""
        return any(outcome.startswith(f"{kind} ") for outcome in self.outcomes)


@dataclass
class Reply:
    """status 0: the connection was closed without one; None: it did not come in time."""

    status: int | None
    body: bytes
    is_whole: bool


@dataclass
class Client:
    """One hostile client, which goes on after each request."""

    scene: Scene
    kind: str
    rng: random.Random

    def note(self, told: str) -> None:
        """Keep what is about to be done."""
        at_s = time.monotonic() - self.scene.start
        self.scene.last.append(f"{at_s:7.2f} s {self.kind}: {told[:300]}")

    def saw(self, what: object) -> None:
        self.scene.outcomes[f"{self.kind} {what}"] += 1

    def judge(self, reply: Reply, told: str, allowed: frozenset[int]) -> None:
        """Count a reply, and keep it as an offence where it is none of those allowed."""
        if reply.status is None:
            self.saw("no answer")
            self.scene.offences.append(f"{self.kind}: no answer in time for {told[:400]}")
            return
        self.saw(reply.status or "closed")
        if reply.status not in allowed:
            answer = reply.body[:300].decode(errors="replace")
            self.scene.offences.append(f"{self.kind}: {reply.status} {answer} for {told[:400]}")
        elif reply.status and not reply.is_whole:
            self.scene.offences.append(f"{self.kind}: half a reply for {told[:400]}")

    def head(self, method: str, path: str, length: int | None = None, **headers: str) -> bytes:
        """Of a request, with its end; `headers` replace those that are right."""
        right = {"Host": f"127.0.0.1:{self.scene.port}", "Connection": "close"}
        if length is not None:
            right |= {"Content-Type": "application/json", "Content-Length": str(length)}
        right |= {name.replace("_", "-"): value for name, value in headers.items()}
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {v}" for name, v in right.items() if v)]
        return "\r\n".join([*lines, "", ""]).encode()

    async def opened(self, **options: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection."""
        return await asyncio.open_connection("127.0.0.1", self.scene.port, **options)

    async def send(
        self, method: str, path: str, body: object = None, told: str = "", **headers: str
    ) -> Reply:
        """One whole request, and its reply."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        if body is None:
            content = b""
        self.note(f"{method} {path} {headers or ''} {told or content[:240].decode()}")
        head = self.head(method, path, None if body is None else len(content), **headers)
        patience_s = PATIENCE_S if len(content) < HUGE_BYTES else HUGE_PATIENCE_S
        reader, writer = await self.opened(limit=2**18)
        try:
            async with asyncio.timeout(patience_s):
                sending = asyncio.create_task(_written(writer, head + content))
                reply = await read_reply(reader)
                sending.cancel()
                return reply
        except TimeoutError:
            return Reply(None, b"", is_whole=False)
        finally:
            writer.transport.abort()


async def _written(writer: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(OSError):
        writer.write(data)
        await writer.drain()


async def read_reply(reader: asyncio.StreamReader) -> Reply:
    """A reply up to the end of the connection; an early reply may be cut by a reset."""
    parts = []
    with contextlib.suppress(OSError):
        while part := await reader.read(2**18):
            parts.append(part)
    head, _, body = b"".join(parts).partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    if len(words) < 3 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
        return Reply(0, head, is_whole=not head)
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    if lengths:
        is_whole = len(body) == int(lengths[0].partition(b":")[2])
    else:
        is_whole = body.endswith(b"0\r\n\r\n") or not body
    return Reply(int(words[1]), body, is_whole)


def prepared() -> dict[str, bytes]:
    """Large values of fields, each with what it is the field of."""
    return {name: kind.body(MODEL) for name, kind in KINDS.items()}


# One function a kind of client; each call is one request, or one connection.


async def huge(c: Client) -> None:
    """Bodies of every kind, up to the limit and beyond."""
    scale = c.rng.choice([0.001, 0.01, 0.1, 0.3, 1])
    if c.rng.random() < 0.6:
        name = c.rng.choice(list(KINDS))
        count = max(1, round(KINDS[name].count * scale))
        body = c.scene.bodies[name] if scale == 1 else KINDS[name].body(MODEL, count)
        path, told = "/v1/completions", f"{name} × {count}"
    else:
        path, front, unit, back, most = c.rng.choice(LARGE)
        count = max(1, round(most * scale))
        units = b",".join([unit] * count) if front.endswith(b"[") else unit * count
        body = b'{"model":"%s",%s%s%s}' % (MODEL.encode(), front, units, back)
        told = f"{front[:60]!r} {unit[:60]!r} × {count}"
    if c.rng.random() < 0.1:
        told += ", filled up beyond the limit"
        body += b" " * (LIMIT_BYTES + 1 - len(body))
    reply = await c.send("POST", path, body, told)
    allowed = REFUSED | {200}
    if len(body) > LIMIT_BYTES:
        # The reply comes before all is sent; the reset behind it may overtake it.
        allowed |= {0}
        reply.is_whole = True
    c.judge(reply, f"{path} {told}", allowed)


LARGE: tuple[tuple[str, bytes, bytes, bytes, int], ...] = (
    ("/v1/chat/completions", b'"messages":[{"role":"user","content":"', b"a b ", b'"}]', 7_000_000),
    ("/v1/chat/completions", b'"messages":[', b'{"role":"user","content":"x"}', b"]", 900_000),
    ("/v1/chat/completions", b'"messages":[', b'{"a":1}', b"]", 3_500_000),
    ("/v1/chat/completions", b'"messages":[{"role":"user","content":"x"}],"tools":[',
     b'{"type":"function","function":{"name":"f","parameters":{}}}', b"]", 500_000),
    ("/v1/responses", b'"input":"', b"def f(x):", b'"', 3_500_000),
    ("/v1/responses", b'"input":[', b'{"role":"user","content":"x"}', b"]", 900_000),
    ("/v1/messages", b'"max_tokens":1,"messages":[{"role":"user","content":"x"}],"system":"',
     b"x y ", b'"', 7_000_000),
    ("/v1/messages/count_tokens", b'"messages":[{"role":"user","content":"', b"a b ", b'"}]',
     7_000_000),
    ("/tokenize", b'"prompt":"', b"a b ", b'"', 7_000_000),
    ("/detokenize", b'"tokens":[', b"5", b"]", 15_000_000),
    ("/v1/completions", b'"prompt":[', b'"x"', b"]", 7_000_000),
    ("/v1/completions", b'"prompt":"x","max_tokens":1,"guided_regex":"', b"(a|b)", b'"', 6_000_000),
    ("/v1/completions", b'"prompt":"x","max_tokens":1,"guided_json":{"type":"object","required":[',
     b'"a"', b"]}", 7_000_000),
)  # fmt: skip


async def slow(c: Client) -> None:
    """Half-sent headers and bodies, byte by byte, and readers that do not read."""
    body = json.dumps({"model": MODEL, "prompt": "def", "max_tokens": 2}).encode()
    whole = c.head("POST", "/v1/completions", len(body)) + body
    way = c.rng.randrange(4)
    if way == 3:
        await reads_nothing(c)
        return
    c.note(["headers that do not end", "a body that does not end", "byte by byte"][way])
    reader, writer = await c.opened()
    try:
        end = c.rng.randrange(1, len(whole) - len(body) - 4) if way == 0 else len(whole) - 3
        for byte in whole if way == 2 else whole[:end]:
            writer.write(bytes([byte]))
            await asyncio.sleep(0.002)
        if way == 2:
            async with asyncio.timeout(PATIENCE_S):
                c.judge(await read_reply(reader), "byte by byte", REFUSED | {200})
        else:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(c.rng.uniform(0.1, 4)):
                    reply = await read_reply(reader)
                    c.judge(reply, "half a request", REFUSED | {0})
                    return
            c.saw("held open")
    finally:
        writer.transport.abort()


async def reads_nothing(c: Client) -> None:
    """Asks for a long stream and leaves it in the socket."""
    c.note("a stream that nobody reads")
    body = {"model": MODEL, "prompt": "def", "max_tokens": 300, "ignore_eos": True, "stream": True}
    content = json.dumps(body).encode()
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(raw, ("127.0.0.1", c.scene.port))
        await loop.sock_sendall(raw, c.head("POST", "/v1/completions", len(content)) + content)
        await asyncio.sleep(c.rng.uniform(0.5, 4))
    c.saw("not read")


async def cut(c: Client) -> None:
    """Disconnects at any moment of a request or its reply."""
    path, body = generation(c.rng)
    content = json.dumps(body).encode()
    whole = c.head("POST", path, len(content)) + content
    sent = c.rng.choice([c.rng.randrange(len(whole)), len(whole), len(whole)])
    c.note(f"{path}, {sent} of {len(whole)} bytes, then gone; {content[:200].decode()}")
    reader, writer = await c.opened()
    writer.write(whole[:sent])
    with contextlib.suppress(TimeoutError, OSError):
        async with asyncio.timeout(c.rng.choice([0, 0.001, 0.05, 0.5])):
            for _ in range(c.rng.randrange(1, 30)):
                await reader.read(c.rng.choice([1, 100, 10_000]))
    if c.rng.random() < 0.5:
        # The other side sees a reset instead of an end.
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()
    c.saw("gone")


async def malformed(c: Client) -> None:
    """Bytes that are not HTTP, or nearly."""
    post = c.head("POST", "/v1/completions", Transfer_Encoding="chunked")
    right, body = f"127.0.0.1:{c.scene.port}", b'{"prompt":"x","max_tokens":1}'
    host = right.encode()
    data = c.rng.choice([
        c.rng.randbytes(c.rng.choice([1, 50, 5000])),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + c.rng.randbytes(500),
        b"GET / HTTP/9.9\r\n\r\n", b"GET\r\n\r\n", b"\r\n" * 1000, b"\0" * 1000,
        b"GET /%s HTTP/1.1\r\nHost: %s\r\n\r\n" % (b"a" * 200_000, host),
        b"GET / HTTP/1.1\r\nHost: %s\r\nX: %s\r\n\r\n" % (host, b"a" * 200_000),
        b"GET / HTTP/1.1\r\n%s\r\n" % b"".join(b"X%d: 1\r\n" % i for i in range(20_000)),
        b"GET /health HTTP/1.1\r\nHost: %s\r\nHost: %s\r\n\r\n" % (host, host),
        b"GET /health HTTP/1.1\r\n\r\n",
        c.head("POST", "/v1/completions", Content_Length="-5") + body,
        c.head("POST", "/v1/completions", Content_Length="1e3") + body,
        c.head("POST", "/v1/completions", len(body), Transfer_Encoding="chunked") + body,
        post + b"zz\r\n" + body, post + b"5\r\n" + body, post + b"ffffffffffffffff\r\n" + body,
        post + b"1d\r\n" + body + b"\r\n0\r\n\r\n", post + b"-1\r\n",
        c.head("POST", "/v1/completions", len(body), Content_Encoding="gzip") + body,
        c.head("POST", "/v1/completions", len(body), Expect="100-continue"),
        c.head("GET", "/health", Upgrade="websocket", Connection="Upgrade"),
        *(c.head("POST", "/v1/completions", len(bad)) + bad for bad in BAD_JSON),
    ])  # fmt: skip
    c.note(f"{data[:200]!r}")
    reader, writer = await c.opened(limit=2**18)
    try:
        async with asyncio.timeout(5):
            sending = asyncio.create_task(_written(writer, data))
            reply = await read_reply(reader)
            sending.cancel()
            # What follows a reply to half a request is not known.
            reply.is_whole = True
            c.judge(reply, f"{data[:300]!r}", REFUSED | {0, 200, 501, 505})
    except TimeoutError:
        c.saw("waits for more")
    finally:
        writer.transport.abort()


BAD_JSON = (
    b"", b"{", b"null", b"[]", b'"x"', b"\xff\xfe", b"{'prompt': 1}", b'{"prompt":"\\ud800"}',
    b'{"prompt":NaN}', b'{"prompt":1e999}', b'{"prompt":"x","prompt":"y"}', b'{"a":' * 5000,
    b'{"prompt":"x","max_tokens":99999999999999999999999999}', b'{"prompt":"x"}{"prompt":"x"}',
    b'{"prompt":"\xc3"}', b'{"__class__":{"__init__":1},"prompt":[]}', b'{"prompt":' + b"9" * 5000,
)  # fmt: skip


async def junky(c: Client) -> None:
    """JSON whose fields have likely, wrong and strange values."""
    path = c.rng.choice(JSON_PATHS)
    names = c.rng.sample(sorted(LIKELY), c.rng.randrange(1, 9))
    body = {name: c.rng.choice([*LIKELY[name], junk(c.rng)]) for name in names}
    if c.rng.random() < 0.7:
        body |= {"model": MODEL}
        body |= {"/v1/completions": {"prompt": "x"}, "/v1/responses": {"input": "x"}}.get(
            path, {"messages": MESSAGES[1:]}
        )
    body[c.rng.choice(["max_tokens", "max_output_tokens", c.rng.choice(WORDS)])] = 3
    c.judge(await c.send("POST", path, body), f"{path} {json.dumps(body)}", REFUSED | {200})


async def cancelling(c: Client) -> None:
    """Ends its own requests from another connection; and such that are not there."""
    path = c.rng.choice(GENERATING)
    if c.rng.random() < 0.3:
        strange = c.rng.choice(["nothing", "%00", "a" * 5000, "../x", "cmpl-0"])
        reply = await c.send("DELETE", f"{path}/{strange}")
        c.judge(reply, f"DELETE {path}/{strange[:20]}", REFUSED)
        return
    body = shaped(path, {"prompt": "def", "max_tokens": 400, "stream": True, "ignore_eos": True})
    content = json.dumps(body).encode()
    c.note(f"{path}, to be cancelled")
    reader, writer = await c.opened(limit=2**18)
    try:
        async with asyncio.timeout(PATIENCE_S):
            writer.write(c.head("POST", path, len(content)) + content)
            seen = b""
            while b'"id":"' not in seen and (part := await reader.read(2**16)):
                seen += part
            request_id = seen.partition(b'"id":"')[2].partition(b'"')[0].decode()
            if not request_id:
                c.judge(Reply(int(seen[9:12] or 0), seen, is_whole=True), path, REFUSED)
                return
            method, ending = "DELETE", ""
            if path == "/v1/responses" and c.rng.random() < 0.5:
                method, ending = "POST", "/cancel"
            reply = await c.send(method, f"{path}/{request_id}{ending}")
            c.judge(reply, f"{method} {path}/ID{ending}", frozenset({200, 404}))
            while await reader.read(2**16):
                pass
    finally:
        writer.transport.abort()


async def probing(c: Client) -> None:
    """Health, metrics, paths that are not there, keys that are wrong."""
    path = c.rng.choice([
        "/health", "/health/live", "/health/ready", "/metrics", "/v1/models", "/docs", "/",
        "/openapi.json", "/v1/models/no", "/playground/page.js", "/playground/../x", "//",
        "/%2e%2e", "/v1/completions", "/.git/config", "/health?x=" + "y" * 1000,
    ])  # fmt: skip
    method = c.rng.choice(["GET", "GET", "GET", "HEAD", "OPTIONS", "PUT", "PATCH", "BREW"])
    key = c.rng.choice(["", "Bearer x", "Bearer " + "k" * 5000, "Basic eDp5", "\xe9"])
    reply = await c.send(method, path, Authorization=key)
    if method == "HEAD":
        reply.is_whole = True
    allowed = REFUSED - BUSY | {200, 204, 307}
    if path == "/health" and method == "GET":
        allowed = frozenset({200})
    c.judge(reply, f"{method} {path[:40]}", allowed)


async def rebinding(c: Client) -> None:
    """What a foreign web page can send through a browser on this machine."""
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
    right = f"127.0.0.1:{c.scene.port}"
    headers = c.rng.choice([
        {"Host": "evil.example"}, {"Host": f"evil.example:{c.scene.port}"},
        {"Host": f"127.0.0.1.evil.example:{c.scene.port}"}, {"Host": ""},
        {"Host": right, "Origin": "http://evil.example", "Content_Type": "text/plain"},
        {"Host": right, "Origin": "null"}, {"Host": right, "Sec_Fetch_Site": "cross-site"},
        {"Host": right, "Sec_Fetch_Site": "same-site", "Origin": "http://127.0.0.1:1"},
    ])  # fmt: skip
    method, path = c.rng.choice([("POST", "/v1/completions"), ("POST", "/tokenize")])
    if headers["Host"] != right and c.rng.random() < 0.5:
        method, path, body = "GET", c.rng.choice(["/metrics", "/v1/models", "/"]), None
    reply = await c.send(method, path, body, **headers)
    c.judge(reply, f"{method} {path} {headers}", REFUSED - BUSY | {0})


async def generating(c: Client) -> None:
    """Valid requests of all APIs, short and long, plain and held to heavy forms."""
    path, body = generation(c.rng)
    reply = await c.send("POST", path, body)
    c.judge(reply, f"{path} {json.dumps(body)}", BUSY | {200, 400})
    if reply.status == 200 and body.get("stream"):
        ends = (
            b"[DONE]", b"response.completed", b"response.incomplete", b"message_stop",
            b"the answer can no longer match the schema or grammar",
        )  # fmt: skip
        # Anywhere: the last event of /v1/responses holds all of the answer.
        if not any(end in reply.body for end in ends):
            c.scene.offences.append(f"generating: {path} ends with {reply.body[-300:]!r}")


def generation(rng: random.Random) -> tuple[str, dict[str, object]]:
    """A path and a request that is right, or asks for more than is allowed."""
    path = rng.choice(GENERATING)
    body: dict[str, object] = {
        "prompt": python_characters(rng.choice([20, 200, 2500])), "stream": rng.random() < 0.5,
        "max_tokens": rng.choice([1, 8, 40]), "temperature": rng.choice([0, 1]),
    }  # fmt: skip
    if path == "/v1/completions" and rng.random() < 0.3:
        # As long as the context lets it be, and begun differently each time.
        length = rng.choice([300, CONTEXT_TOKENS - 50])
        body["prompt"] = [rng.randrange(10, 200) for _ in range(length)]
    if path in GENERATING[:2]:
        body |= rng.choice([{}, {}, {}, {"n": 3}, {"logprobs": path == GENERATING[1] or 3}])
        body |= rng.choice([{}, {}, *HEAVY])
        if path == GENERATING[1] and rng.random() < 0.3:
            body["chat_template_kwargs"] = rng.choice(
                [{"self": 1}, {"x": "y" * 10_000}, {"a": [[1] * 1000] * 10}, {"messages": []}]
            )
    return path, shaped(path, body)


# Answers held to forms that cost much to prepare or to follow.
HEAVY: tuple[dict[str, object], ...] = (
    {"guided_regex": "(a|b|c|d){1,400}x?(e|f){1,300}"},
    {"guided_regex": "((a{1,50}){1,50}){1,50}"},
    {"guided_choice": ["x" * 800 + str(i) for i in range(60)]},
    {"guided_json": {"const": "y" * 20_000}},
    {"guided_json": {"const": "y" * 4000}},
    {"guided_regex": "(x|y)(ab){60000}"},
    {"guided_json": {"type": "object", "required": [f"k{i}" for i in range(150)],
                     "properties": {f"k{i}": {"enum": list(range(20))} for i in range(150)}}},
    {"guided_json": {"type": "array", "minItems": 5000, "items": {"type": "integer"}}},
    {"guided_grammar": 'start: ("a" | "b" start) start?'},
    {"response_format": {"type": "json_object"}},
)  # fmt: skip


def shaped(path: str, body: dict[str, object]) -> dict[str, object]:
    """A completion's body as another API has it."""
    body = {"model": MODEL, **body}
    if path == "/v1/completions":
        return body
    prompt = body.pop("prompt")
    told = [{"role": "user", "content": prompt}]
    if path == "/v1/responses":
        more = {"max_output_tokens": body.pop("max_tokens"), "input": prompt}
        body.pop("ignore_eos", None)
        return body | more
    if path == "/v1/messages":
        body.pop("ignore_eos", None)
    return body | {"messages": told}


CLIENTS: tuple[tuple[Callable[[Client], Awaitable[None]], int], ...] = (
    (huge, 2), (slow, 12), (cut, 4), (malformed, 3), (junky, 2), (cancelling, 2), (probing, 2),
    (rebinding, 1), (generating, 3),
)  # fmt: skip


async def go_on(client: Client, once: Callable[[Client], Awaitable[None]]) -> None:
    """One client, again and again, in no hurry."""
    while True:
        try:
            async with asyncio.timeout(2 * HUGE_PATIENCE_S):
                await once(client)
        except OSError as error:
            client.saw(type(error).__name__)
            await asyncio.sleep(0.05)
        except TimeoutError:
            client.scene.offences.append(
                f"{client.kind}: no end; the last: {client.scene.last[-1]}"
            )
        await asyncio.sleep(client.rng.uniform(0, 0.05))


async def run(scene: Scene, seconds: float) -> None:
    """Let all clients in for so long, or until stdin has more."""
    is_over = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, is_over.set)
    tasks = {
        kind: [
            asyncio.create_task(
                go_on(Client(scene, kind, random.Random(f"{scene.seed} {kind} {i}")), once)
            )
            for i in range(count)
        ]
        for kind, once, count in ((once.__name__, once, count) for once, count in CLIENTS)
    }
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(is_over.wait(), seconds)
    await stopped([one for kind in tasks if scene.has_seen(kind) for one in tasks[kind]])
    # The server reads huge bodies behind all others: on a slow machine the first of them is not
    # answered before the others are gone.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(HUGE_PATIENCE_S):
            while not all(scene.has_seen(kind) for kind in tasks):
                await asyncio.sleep(0.05)
    await stopped([one for those in tasks.values() for one in those])


async def stopped(tasks: list[asyncio.Task[None]]) -> None:
    """End clients, which must not have ended by a mistake of their own."""
    for task in tasks:
        task.cancel()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    faults = [end for end in ends if isinstance(end, Exception)]
    assert not faults, faults


def main() -> None:
    port, seed, seconds = sys.argv[1:]
    bodies = prepared()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    scene = Scene(int(port), seed, bodies)
    asyncio.run(run(scene, float(seconds)))
    told = {"outcomes": scene.outcomes, "offences": scene.offences, "last": list(scene.last)}
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main()
