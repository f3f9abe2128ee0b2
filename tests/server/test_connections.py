"""What clients may leave undone on a connection, and that each ends within its bounds."""

import gc
import json
import socket
import time
from contextlib import ExitStack, contextmanager, suppress

import httpx2
import psutil
import pytest

from server.running import KEY, Scripted, is_idle, running, scripted, wait_for, wait_until_ready
from soloist.server import bounds, protocol, serve
from soloist.server.bounds import MOST_HEAD_BYTES, MOST_HEADERS
from soloist.server.protocol import Connection

HOST = b"Host: localhost\r\n"
HEALTH = b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n"
BODY = json.dumps({"prompt": "def f", "max_tokens": 2, "ignore_eos": True}).encode()
ENDLESS = {"prompt": "def f", "max_tokens": 4000, "ignore_eos": True, "stream": True}


def post(body: bytes, *headers: bytes, path: bytes = b"/v1/completions") -> bytes:
    length = b"Content-Length: %d\r\n" % len(body)
    lines = b"".join(header + b"\r\n" for header in headers)
    return b"POST " + path + b" HTTP/1.1\r\n" + HOST + lines + length + b"\r\n" + body


def chunked(*parts: bytes) -> bytes:
    head = b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(parts)


def chunk(part: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(part), part)


@pytest.fixture(scope="module")
def server():
    """One that has any bound as it is."""
    with running(lambda _: scripted(Scripted())) as made:
        yield wait_until_ready(made)


@pytest.fixture
def hurried(monkeypatch):
    """One whose bounds are short, and its executor; 2,000 tokens a second."""
    short = {"HEADER_S": 0.4, "BODY_S": 0.8, "IDLE_S": 0.4, "READING_S": 0.6, "CLOSING_S": 0.4}
    for name, value in short.items():
        monkeypatch.setattr(bounds, name, value)
    monkeypatch.setattr(protocol, "_LOOK_S", 0.05)
    monkeypatch.setattr(protocol, "_YOUNG_S", 0.1)
    executor = Scripted(tokens_per_s=2000)
    with running(lambda _: scripted(executor)) as made:
        yield wait_until_ready(made), executor
        wait_for(lambda: is_idle(made) and executor.num_open == 0)
        wait_for(lambda: not made.server_state.tasks, 5)


@contextmanager
def connected(server, start: bytes = b""):
    port = int(server.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(start)
        yield client


def to_its_end(client: socket.socket) -> bytes:
    """What comes until the server closes."""
    found = b""
    with suppress(ConnectionError):
        while part := client.recv(65_536):
            found += part
    return found


def reply_to(server, request: bytes) -> bytes:
    with connected(server) as client:
        with suppress(ConnectionError):
            client.sendall(request)
        return to_its_end(client)


def one_reply(client: socket.socket) -> bytes:
    """The next whole reply with a length."""
    found = b""
    while b"\r\n\r\n" not in found:
        found += client.recv(65_536)
    head, _, body = found.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    while len(body) < length:
        body += client.recv(65_536)
    return head + b"\r\n\r\n" + body


def error_of(reply: bytes) -> dict:
    head, _, body = reply.partition(b"\r\n\r\n")
    assert b"\r\nconnection: close" in head.lower()
    assert b"application/json" in head
    return json.loads(body)["error"]


def counted(server, path: str, status: int) -> float:
    labels = {"path": path, "status": str(status)}
    return server.host.metrics.registry.get_sample_value("soloist_http_replies_total", labels) or 0


def test_half_sent_requests_end_and_leave_nothing(hurried) -> None:
    server, _ = hurried
    process, state = psutil.Process(), server.server_state
    gc.collect()
    files, before = process.num_fds(), num_connections()
    starts = {
        b"GET /health HTTP/1.1\r\nHo": "headers", b"G": "headers",
        post(BODY)[:-3]: "body", post(BODY, path=b"/nowhere")[:-3]: None,
    }  # fmt: skip
    gc.disable()
    try:
        with ExitStack() as stack:
            clients = {
                start: [stack.enter_context(connected(server, start)) for _ in range(number)]
                for start, number in zip(starts, (200, 100, 50, 50), strict=True)
            }
            wait_for(lambda: len(state.connections) == 400)
            began = time.monotonic()
            for start, told in starts.items():
                replies = [to_its_end(client) for client in clients[start]]
                for reply in replies if told else ():
                    assert reply.startswith(b"HTTP/1.1 408 ")
                    error = error_of(reply)
                    assert told in error["message"]
                    assert error["type"] == "timeout_error"
            assert time.monotonic() - began < 10
        wait_for(lambda: not state.connections and not state.tasks)
        wait_for(lambda: process.num_fds() <= files)
        # Not even for the collector: it may come late.
        assert num_connections() == before
    finally:
        gc.enable()
    assert counted(server, "other", 408) == 100
    assert counted(server, "/health", 408) == 200
    assert counted(server, "/v1/completions", 408) == 50
    assert counted(server, "other", 404) == 50
    assert counted(server, "/v1/completions", 499) == 0, "each is counted once"


def num_connections() -> int:
    return sum(issubclass(type(one), Connection) for one in gc.get_objects())


@pytest.mark.parametrize(
    ("start", "drop"),
    [
        (b"GET /health HTTP/1.1\r\nA: ", b"a"),
        (b"", b"\r\n"),
        (HEALTH, b"\r\n"),
        (post(b"x" * 1000)[:-1000], b" "),
        (post(b"x" * 1000, path=b"/nowhere")[:-1000], b" "),
        (chunked(), b"1\r\n \r\n"),
    ],
    ids=["head", "nothing", "between", "body", "body that nobody reads", "chunks"],
)
def test_a_drop_now_and_then_wins_no_time(hurried, start, drop) -> None:
    server, _ = hurried
    with connected(server, start) as client:
        client.settimeout(0.05)
        until = time.monotonic() + 10
        is_open = True
        while is_open:
            assert time.monotonic() < until, "it is never closed"
            with suppress(TimeoutError):
                try:
                    client.sendall(drop)
                    is_open = bool(client.recv(65_536))
                except ConnectionError:
                    is_open = False


def test_silence_ends_without_a_word(hurried) -> None:
    server, _ = hurried
    assert reply_to(server, b"") == b""
    reply = reply_to(server, HEALTH)
    assert reply.startswith(b"HTTP/1.1 200")
    assert reply.count(b"HTTP/1.1") == 1
    assert b"connection: close" not in reply.lower()


def test_a_connection_goes_on_after_a_body_that_nobody_read(server) -> None:
    body = b"x" * 200_000
    with connected(server) as client:
        for path in (b"/nowhere", b"/health"):
            request = post(body, path=path)
            client.sendall(request[:300])
            assert one_reply(client).startswith(b"HTTP/1.1 40")
            client.sendall(request[300:])
            client.sendall(HEALTH)
            assert one_reply(client).startswith(b"HTTP/1.1 200")


def test_keys_are_asked_for_before_bodies(hurried) -> None:  # noqa: ARG001 - short bounds
    with running(lambda _: scripted(Scripted()), api_keys=(KEY,)) as server:
        wait_until_ready(server)
        reply = reply_to(server, post(BODY)[:-3])
        assert reply.startswith(b"HTTP/1.1 401")
        assert reply.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /" + b"a" * MOST_HEAD_BYTES + b" HTTP/1.1\r\n" + HOST + b"\r\n",
        b"GET /x HTTP/1.1\r\n" + HOST + b"A: " + b"a" * MOST_HEAD_BYTES + b"\r\n\r\n",
        b"GET /x HTTP/1.1\r\n" + b"A: b\r\n" * (MOST_HEADERS + 1) + b"\r\n",
        b"GET /x HTTP/1.1\r\n" + b"A: bbbbbbbbbbbbbbb\r\n" * 500_000,
        b"GET /" + b"a" * 10_000_000,
        b"GET /x HTTP/1.1\r\nA: " + b"a" * 10_000_000,
        b"\r\n" * 5_000_000,
    ],
    ids=["line", "header", "headers", "endless headers", "endless line", "endless one", "empty"],
)
def test_heads_have_a_bound(server, request_) -> None:
    before = counted(server, "other", 431)
    reply = reply_to(server, request_)
    assert reply.startswith(b"HTTP/1.1 431 ")
    assert "65,536 bytes in 128 headers" in error_of(reply)["message"]
    assert counted(server, "other", 431) == before + 1


def test_heads_may_be_large(server) -> None:
    room = MOST_HEAD_BYTES - 200
    for lines in (b"A: " + b"a" * room + b"\r\n", b"A: b\r\n" * (MOST_HEADERS - 1)):
        with connected(server) as client:
            for _ in range(2):
                request = HEALTH.replace(b"\r\n\r\n", b"\r\n" + lines + b"\r\n")
                for start in range(0, len(request), 10_000):
                    client.sendall(request[start : start + 10_000])
                assert one_reply(client).startswith(b"HTTP/1.1 200")
    large = json.dumps({"prompt": "x", "max_tokens": 1, "user": "u" * 60}).encode() + b" " * 500_000
    assert reply_to(server, post(large, b"Connection: close")).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "parts",
    [
        chunk(b" ") * 1_000_000,
        chunk(b" ") + b"0\r\n" + b"A: b\r\n" * 1_000_000,
        chunk(b" ") + b"0\r\nA: " + b"a" * 6_000_000,
        b"1;a=" + b"a" * 6_000_000,
    ],
    ids=["tiny chunks", "trailers", "a long trailer", "an extension"],
)
def test_what_is_around_a_body_has_a_bound(server, parts) -> None:
    start = time.process_time()
    reply = reply_to(server, chunked(parts))
    assert reply.startswith(b"HTTP/1.1 400 ")
    assert "larger chunks" in error_of(reply)["message"]
    assert time.process_time() - start < 1.5, "all of it took 3 s and more"


def test_small_chunks_are_taken(server) -> None:
    parts = [chunk(BODY[n : n + 1]) for n in range(len(BODY))]
    reply = reply_to(
        server, chunked(*parts, chunk(b" " * 50) * 20_000, b"0\r\nA: b\r\n\r\n" + HEALTH)
    )
    assert reply.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "request_",
    [
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /health HTTP/2.7\r\n" + HOST + b"\r\n",
        b"CONNECT evil:80 HTTP/1.1\r\n" + HOST + b"\r\n",
        b"GET /\xff HTTP/1.1\r\n" + HOST + b"\r\n",
        b"GET /health HTTP/1.1\nHost: localhost\n\n",
        b"GET /health HTTP/1.1\r\n" + HOST + b"A\xff: b\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + HOST + b"A b: c\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost : localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + HOST + b"A: b\r\n c\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + HOST + b"A: b\x00c\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + HOST + b"A: b\rc\r\n\r\n",
        chunked()[:-2] + b"Content-Length: 5\r\n\r\n0\r\n\r\n",
        post(BODY, b"Content-Length: 1"),
        post(BODY, b"Transfer-Encoding: gzip"),
        chunked(b"z\r\n"),
        chunked(b"-1\r\n"),
        chunked(b"ffffffffffffffffff\r\n"),
        chunked(b"1\nx\n0\n\n"),
        chunked(chunk(b"x")[:-2] + b"yy"),
    ],
)  # fmt: skip
def test_malformed_requests_are_refused_in_the_apis_shape(server, request_, caplog) -> None:
    reply = reply_to(server, request_)
    assert reply.startswith(b"HTTP/1.1 400 ")
    error = error_of(reply)
    assert "well-formed HTTP/1.1" in error["message"]
    assert error["type"] == "invalid_request_error"
    assert not caplog.records, "nobody fills the log"


def test_a_request_behind_another_is_not_answered(server) -> None:
    reply = reply_to(server, HEALTH * 20_000)
    assert reply.count(b"HTTP/1.1 200") == 1
    assert b"connection: close" in reply
    reply = reply_to(server, post(BODY) + b"nonsense")
    assert reply.startswith(b"HTTP/1.1 200"), "what comes behind a request spoils no reply"
    assert reply.count(b"HTTP/1.1") == 1


def test_a_client_that_goes_ends_its_request_whatever_it_sent_behind(hurried) -> None:
    server, executor = hurried
    executor.pace_s = 0.05
    whole = post(json.dumps(ENDLESS | {"stream": False}).encode())
    with connected(server, whole + HEALTH + b"GET /hea"):
        wait_for(lambda: executor.num_open == 1)
    wait_for(lambda: is_idle(server), 3)


def test_a_stream_is_whole_whatever_its_client_sends_behind(hurried) -> None:
    server, _ = hurried
    ask = ENDLESS | {"max_tokens": 1000}
    with connected(server, post(json.dumps(ask).encode())) as client:
        found = client.recv(200)
        client.sendall(HEALTH + b"x" * 10_000)
        found += to_its_end(client)
    assert found.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert found.count(b"HTTP/1.1") == 1


def test_a_flood_behind_a_request_ends_it(hurried) -> None:
    server, executor = hurried
    executor.pace_s = 0.05
    with connected(server, post(json.dumps(ENDLESS).encode())) as client:
        with pytest.raises(ConnectionError):
            client.sendall(bytes(2**26))
        wait_for(lambda: is_idle(server), 3)


def test_a_reply_that_nobody_reads_ends_its_request(hurried) -> None:
    server, executor = hurried
    server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    port = int(server.url.rpartition(":")[2])
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", port))
        client.sendall(post(json.dumps(ENDLESS | {"n": 8}).encode()))
        wait_for(lambda: executor.num_open == 8)
        wait_for(lambda: is_idle(server), 10)
        wait_for(lambda: not server.server_state.connections, 5)
        wait_for(lambda: not server.server_state.tasks, 1)


@pytest.mark.parametrize("last", [b"Connection: keep-alive", b"Connection: close"])
def test_a_client_that_reads_slowly_has_all_of_its_reply(hurried, last) -> None:
    server, _ = hurried
    server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    port = int(server.url.rpartition(":")[2])
    ask = ENDLESS | {"n": 8, "max_tokens": 3000, "stream": False, "return_token_ids": True}
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(10)
        client.connect(("127.0.0.1", port))
        client.sendall(post(json.dumps(ask).encode(), last))
        found, number = client.recv(4096), 1
        length = int(found.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        assert length > 100_000
        start = time.monotonic()
        while not found.endswith(b"}}") and (part := client.recv(4096)):
            found += part
            # 200 kB a second: longer than closing alone may take, quicker than is asked for.
            number += 1
            time.sleep(max(0, start + number * 0.02 - time.monotonic()))
        assert len(found.partition(b"\r\n\r\n")[2]) == length


def test_a_reply_is_read_however_large_the_body_was() -> None:
    with running(lambda _: scripted(Scripted()), most_body_bytes=2**16) as server:
        wait_until_ready(server)
        for request in (
            post(b" " * 2**24),
            chunked(chunk(b" " * 2**16) * 256),
            post(b" " * 2**24, path=b"/nowhere"),
            post(b" " * 2**24, b"Origin: http://evil"),
        ):
            with connected(server) as client:
                client.sendall(request)  # all of it before a look at the reply
                status = to_its_end(client)[9:12]
            assert status in (b"413", b"404", b"403")


def test_connections_are_bounded_and_the_oldest_that_waits_makes_room(monkeypatch) -> None:
    monkeypatch.setattr(serve, "MOST_CONNECTIONS", 10)
    monkeypatch.setattr(protocol, "_YOUNG_S", 0.3)
    monkeypatch.setattr(bounds, "HEADER_S", 60)
    monkeypatch.setattr(bounds, "BODY_S", 60)
    executor = Scripted(tokens_per_s=200)
    with (
        running(lambda _: scripted(executor)) as server,
        ExitStack() as stack,
        httpx2.Client(base_url=server.url, timeout=20) as http,
    ):
        wait_until_ready(server)
        with http.stream("POST", "/v1/completions", json=ENDLESS | {"max_tokens": 400}) as stream:
            texts = stream.iter_text()
            next(texts)
            starts = [b"GET / HTTP/1.1\r\n", post(BODY)[:-3]] * 4 + [b"G"]
            waiting = [stack.enter_context(connected(server, start)) for start in starts]
            wait_for(lambda: len(server.server_state.connections) == 10)
            # Nobody had a fair time yet.
            with connected(server, HEALTH) as client:
                reply = to_its_end(client)
            assert reply.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after: 1" in reply.lower()
            assert error_of(reply)["code"] == "overloaded"
            time.sleep(0.5)
            for old in waiting[:2]:
                client = stack.enter_context(connected(server, HEALTH))
                assert one_reply(client).startswith(b"HTTP/1.1 200")
                told = to_its_end(old)
                assert told == b"" or told.startswith(b"HTTP/1.1 503 ")
            assert "[DONE]" in "".join(texts), "a request that runs makes no room"
    wait_for(lambda: executor.num_open == 0)


def test_the_system_is_asked_for_as_many_files_as_are_needed(monkeypatch) -> None:
    asked = []
    limits = bounds.resource
    monkeypatch.setattr(limits, "setrlimit", lambda _, both: asked.append(both))

    def given(soft: int, hard: int) -> int:
        monkeypatch.setattr(limits, "getrlimit", lambda _: (soft, hard))
        return bounds.connections_for(1000)

    assert given(1024, 4096) == 1000
    assert given(1024, limits.RLIM_INFINITY) == 1000
    assert given(256, 1024) == 768
    assert asked == [(1256, 4096), (1256, limits.RLIM_INFINITY), (1024, 1024)]
    assert given(256, 256) == 64
    asked.clear()
    assert given(20_000, 20_000) == 1000
    assert given(limits.RLIM_INFINITY, limits.RLIM_INFINITY) == 1000
    assert not asked, "nothing is lowered"


def test_bodies_that_wait_for_a_word(server) -> None:
    with connected(server, post(BODY, b"Expect: 100-continue")[: -len(BODY)]) as client:
        assert client.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(BODY)
        assert to_its_end(client).startswith(b"HTTP/1.1 200")
    # Whether its client sends the body now is unknown: what comes next must not be taken for one.
    late = post(HEALTH, b"Expect: 100-continue", path=b"/nowhere")
    reply = reply_to(server, late)
    assert reply.startswith(b"HTTP/1.1 404")
    assert b"connection: close" in reply
    assert reply.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("other", [b"websocket", b"h2c"])
def test_requests_that_offer_another_protocol_are_answered_in_this_one(
    server, other, caplog
) -> None:
    offer = b"Upgrade: " + other + b"\r\nHTTP2-Settings: AAMAAABk\r\nConnection: "
    with connected(server) as client:
        for options in (b"Upgrade, HTTP2-Settings", b"upgrade, keep-alive"):
            client.sendall(HEALTH[:-2] + offer + options + b"\r\n\r\n")
            assert one_reply(client).startswith(b"HTTP/1.1 200")
            request = post(BODY, offer + options)
            for start in range(0, len(request), 150):
                client.sendall(request[start : start + 150])
                time.sleep(0.005)
            assert one_reply(client).startswith(b"HTTP/1.1 200"), "with its body"
    assert reply_to(
        server, chunked()[:-2] + offer + b"Upgrade, close\r\n\r\n" + chunk(BODY) + b"0\r\n\r\n"
    ).startswith(b"HTTP/1.1 200")
    assert not caplog.records


def test_a_signal_does_not_wait_for_the_rest_of_requests(monkeypatch) -> None:
    for name in ("HEADER_S", "BODY_S", "IDLE_S", "READING_S", "CLOSING_S"):
        monkeypatch.setattr(bounds, name, 60)
    with ExitStack() as stack:
        with running(lambda _: scripted(Scripted()), shutdown_s=15) as server:
            wait_until_ready(server)
            starts = (b"", b"G", HEALTH, post(BODY)[:-3], post(BODY, path=b"/nowhere")[:-3])
            clients = [stack.enter_context(connected(server, start)) for start in starts * 5]
            wait_for(lambda: len(server.server_state.connections) == 25)
            start = time.monotonic()
        assert time.monotonic() - start < 5
        half = to_its_end(clients[3])
        assert half.startswith(b"HTTP/1.1 503 ")
        assert "shutting down" in error_of(half)["message"]
