"""Loading, keys, queues, failures and the end."""

import gc
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from subprocess import PIPE, Popen
from threading import Thread
from urllib.parse import urlsplit

import httpx2
import openai
import orjson
import psutil
import pytest

from server.running import (
    CONFIG,
    KEY,
    Scripted,
    environment_with_tests,
    etude,
    is_idle,
    running,
    scripted,
    serve_in_a_process,
    start_in_a_process,
    wait_for,
    wait_until_ready,
)
from soloist.errors import DeviceError, LaunchError, ModelNotFound, SettingError
from soloist.server.config import ServerConfig
from soloist.server.generation import Generation
from soloist.server.metrics import Metrics
from soloist.server.serve import Server, serve
from soloist.weights.reading import LoadProgress

TEXT = {"prompt": "def f", "max_tokens": 4}
ENDLESS = {"prompt": "def f", "max_tokens": 2000, "ignore_eos": True}


@pytest.fixture
def slow():
    """A server whose model makes 200 tokens a second for ever."""
    executor = Scripted(tokens_per_s=200)
    with running(lambda _: scripted(executor), most_waiting=1) as server:
        wait_until_ready(server)
        with httpx2.Client(base_url=server.url, timeout=20) as http:
            yield server, http, executor


def test_the_port_is_open_while_the_model_loads() -> None:
    go = threading.Event()

    def load(progress):
        progress(LoadProgress(25, 100, 1.0))
        go.wait(20)
        return etude()

    with running(load) as server, httpx2.Client(base_url=server.url, timeout=20) as http:
        wait_for(lambda: server.host.loaded_share > 0)
        health = http.get("/health")
        assert health.status_code == 503
        assert health.json() == {"status": "loading", "progress": 0.25}
        reply = http.post("/v1/completions", json=TEXT)
        assert reply.status_code == 503
        assert reply.headers["Retry-After"] == "1"
        assert "25%" in reply.json()["error"]["message"]
        assert http.get("/v1/models").status_code == 503
        go.set()
        wait_until_ready(server)
        assert http.get("/health").status_code == 200


def test_a_model_that_cannot_be_loaded_ends_the_server() -> None:
    def load(_):
        raise ModelNotFound("nothing", ["etude"])

    with pytest.raises(ModelNotFound):
        serve(load, ServerConfig(names=("x",), port=0), lambda _: None, lambda _: None)


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ({"most_waiting": -1}, r"--queue is -1 \(allowed: 0 … 100,000\)"),
        ({"most_body_bytes": 0}, r"--max-body-mb is 0.0 \(allowed: 0.000977 … 2,048\)"),
        ({"request_s": float("nan")}, "--request-timeout is nan"),
        ({"api_keys": (" ",)}, "--api-key"),
        ({"cors_origins": ("localhost:3000",)}, r"--cors-origin is 'localhost:3000' .*http://"),
        ({"cors_origins": ("http://a.example/",)}, "--cors-origin"),
    ],
)
def test_settings_are_refused_as_they_were_typed(setting, told) -> None:
    with pytest.raises(SettingError, match=told):
        replace(CONFIG, **setting)


def test_a_port_that_is_taken_is_refused(server) -> None:
    port = int(server.url.rpartition(":")[2])
    with pytest.raises(SettingError, match="free address"):
        Server(lambda _: etude(), ServerConfig(names=("x",), port=port))


def test_keys_of_both_kinds() -> None:
    with running(lambda _: scripted(Scripted()), api_keys=("other", KEY)) as server:
        wait_until_ready(server)
        with httpx2.Client(base_url=server.url) as http:
            assert http.get("/health").status_code == 200
            assert http.get("/docs").status_code == 200
            for path in ("/v1/models", "/metrics"):
                reply = http.get(path)
                assert reply.status_code == 401
                assert reply.json()["error"]["code"] == "invalid_api_key"
            # As Anthropic's clients read it.
            kind = http.post("/v1/messages", json={}).json()["error"]["type"]
            assert kind == "authentication_error"
            for bad in ("", "Bearer", f"Bearer {KEY}x", f"Basic {KEY}", "Bearer ü"):
                headers = {"Authorization": bad.encode()}
                assert http.get("/v1/models", headers=headers).status_code == 401
            assert http.get("/v1/models", headers={"x-api-key": KEY}).status_code == 200
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY) as client:
            assert client.models.list().data
        with (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="sk", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError, match="valid API key"),
        ):
            client.models.list()


def test_other_origins_only_where_the_operator_says_so(slow) -> None:
    _, http, _ = slow
    ask = {"Origin": "http://there", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in http.get("/health", headers=ask).headers
    assert "access-control-allow-origin" not in http.options("/v1/models", headers=ask).headers
    config = {"cors_origins": ("http://there",), "api_keys": (KEY,)}
    with running(lambda _: scripted(Scripted()), **config) as server:
        reply = httpx2.options(f"{server.url}/v1/completions", headers=ask)
        assert reply.headers["access-control-allow-origin"] == "http://there"
        other = httpx2.options(
            f"{server.url}/v1/completions", headers=ask | {"Origin": "http://elsewhere"}
        )
        assert "access-control-allow-origin" not in other.headers


def test_a_full_queue_is_a_429_that_says_when_to_come_back(slow) -> None:
    server, http, executor = slow
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        streams = [
            client.completions.create(
                model="gpt", prompt="x", max_tokens=2000, stream=True,
                extra_body={"ignore_eos": True},
            )
            for _ in range(9)
        ]  # fmt: skip
        wait_for(lambda: executor.num_open == 8)
        health = http.get("/health").json()
        assert (health["requests_running"], health["requests_waiting"]) == (8, 1)
        reply = http.post("/v1/completions", json=TEXT)
        assert reply.status_code == 429
        assert int(reply.headers["Retry-After"]) >= 1
        several = http.post("/v1/completions", json=TEXT | {"n": 3})
        assert several.status_code == 429
        assert server.host.ready().loop.load.num_waiting == 1, "of several, none stays"
        for stream in streams:
            stream.close()
        wait_for(lambda: is_idle(server))
        never = http.post("/v1/completions", json=TEXT | {"n": 10})
        assert (never.status_code, never.json()["error"]["param"]) == (400, "n")
    wait_for(lambda: is_idle(server))
    assert executor.num_open == 0


def test_a_request_that_takes_too_long_is_cut() -> None:
    with running(lambda _: scripted(Scripted(tokens_per_s=200)), request_s=0.3) as server:
        wait_until_ready(server)
        reply = httpx2.post(f"{server.url}/v1/completions", json=ENDLESS)
        assert reply.status_code == 504
        assert reply.json()["error"]["code"] == "time_limit"
        text = httpx2.post(f"{server.url}/v1/completions", json=ENDLESS | {"stream": True}).text
        assert '"code":"time_limit"' in text
        assert "[DONE]" not in text
        wait_for(lambda: is_idle(server))


def test_a_silent_stream_hears_of_its_client_going_away() -> None:
    executor = Scripted(read_s=0.5)
    with running(lambda _: scripted(executor)) as server:
        wait_until_ready(server)
        with pytest.raises(httpx2.ReadTimeout):
            httpx2.post(
                f"{server.url}/v1/completions", json=ENDLESS | {"stream": True}, timeout=0.1
            )
        wait_for(lambda: is_idle(server), 2)


def test_a_device_that_fails_fails_requests_and_ends_the_server(slow) -> None:
    server, _, executor = slow
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        stream = client.completions.create(model="gpt", prompt="x", max_tokens=2000, stream=True)
        next(iter(stream))
        executor.fault = LaunchError("the decode kernel", "it broke")
        with pytest.raises(openai.APIError, match="it broke"):
            list(stream)
    wait_for(lambda: server.should_exit)
    assert "it broke" in str(server.host.failure)


def test_random_disconnects_leave_nothing(slow) -> None:
    server, http, executor = slow
    executor.pace_s = 0.0005
    for number in range(100):
        with suppress(httpx2.TimeoutException):
            http.post("/v1/completions", json=ENDLESS, timeout=0.0005 * (1 + number % 20))
        ask = ENDLESS | {"stream": True}
        with http.stream("POST", "/v1/completions", json=ask) as reply:
            for _, _ in zip(range(number % 5), reply.iter_raw(), strict=False):
                pass
    wait_for(lambda: is_idle(server))
    assert executor.num_open == 0


def test_an_answer_that_ended_is_forgotten_without_a_search_for_circles(slow) -> None:
    # The collector runs seldom while streams run; a grammar in a circle keeps megabytes until then.
    server, http, _ = slow

    def kept() -> int:
        return sum(type(one) is Generation for one in gc.get_objects())

    gc.collect()
    before = kept()
    gc.disable()
    try:
        for ask in (TEXT, TEXT | {"stream": True}):
            http.post("/v1/completions", json=ask)
        with http.stream("POST", "/v1/completions", json=ENDLESS | {"stream": True}) as reply:
            next(reply.iter_raw())
        with suppress(httpx2.TimeoutException):
            http.post("/v1/completions", json=ENDLESS, timeout=0.1)
        wait_for(lambda: is_idle(server))
        wait_for(lambda: kept() <= before, 5)
    finally:
        gc.enable()


def test_logs_have_figures_and_no_text(client, caplog) -> None:
    with caplog.at_level(logging.INFO, "soloist"):
        client.completions.create(model="gpt", prompt="SECRET_WORD =", max_tokens=3)
    (line,) = [r.getMessage() for r in caplog.records if "new tokens" in r.getMessage()]
    assert "TTFT" in line
    assert "SECRET" not in caplog.text


def broken(_: object) -> None:
    raise ZeroDivisionError


def test_what_fails_once_the_model_is_loaded_ends_the_server(monkeypatch) -> None:
    def load(_):
        return scripted(Scripted())

    config = ServerConfig(names=("x",), port=0, shutdown_s=1)
    with pytest.raises(DeviceError, match="ZeroDivisionError"):
        serve(load, config, lambda _: None, broken)
    monkeypatch.setattr(Metrics, "watch", lambda *_: broken(None))
    with pytest.raises(DeviceError, match="ZeroDivisionError"):
        serve(load, config, lambda _: None, lambda _: None)
    with pytest.raises(DeviceError, match="SystemExit"):
        serve(lambda _: sys.exit(7), config, lambda _: None, lambda _: None)


@contextmanager
def troubled(name: str, *options: str, is_ready: bool = True) -> Iterator[tuple[Popen[str], str]]:
    """A server in a process that is in the trouble of this name, and its address."""
    start = serve_in_a_process if is_ready else start_in_a_process
    process, url = start(name, "--shutdown-timeout", "0.5", *options, module="server.troubled")
    try:
        yield process, url
    finally:
        process.kill()
        process.communicate()


def end(process: Popen[str], number: int = signal.SIGTERM, *, within_s: float) -> tuple[int, str]:
    """Status and what was said, of a server that is told to end; nothing that it started stays."""
    family = psutil.Process(process.pid).children(recursive=True)
    began = time.monotonic()
    process.send_signal(number)
    _, told = process.communicate(timeout=30)
    assert time.monotonic() - began < within_s
    wait_for(lambda: not any(is_alive(one) for one in family), 3)
    return process.returncode, told


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def streamed(url: str, **more: object) -> Iterator[bytes]:
    """A stream that has begun."""
    with httpx2.stream(
        "POST", f"{url}/v1/completions", json=ENDLESS | {"stream": True} | more, timeout=20
    ) as reply:
        yield from reply.iter_raw()


# Half a second for requests, two for their last words, three for closing, and a busy machine.
BOUND_S = 0.5 + 2 + 3 + 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_end_comes_while_the_model_loads(number: int) -> None:
    with troubled("loading", is_ready=False) as (process, url):
        wait_for(lambda: httpx2.get(f"{url}/health").json()["status"] == "loading")
        status, told = end(process, number, within_s=3)
        assert (status, told) == (0, "stopped\n")


# One handler takes both signals, which the tests of loading and of running requests send.
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_the_end_comes_while_a_step_never_returns(number: int) -> None:
    with troubled("hanging") as (process, url):
        stream = streamed(url)
        text = next(stream)
        time.sleep(0.5)  # the ten tokens are over
        heard: list[bytes] = []
        reader = Thread(target=lambda: heard.extend(stream))
        reader.start()
        status, told = end(process, number, within_s=BOUND_S)
        reader.join(5)
        assert status == 5
        assert "ended by force" in told
        assert "in rounds" in told, "the stack of the thread that hung"
        assert b"shutting down" in b"".join([text, *heard]), "the client was told"


def test_the_end_comes_while_the_event_loop_is_held_up() -> None:
    with troubled("spinning") as (process, url):
        with suppress(httpx2.TimeoutException):
            httpx2.get(f"{url}/metrics", timeout=0.5)
        status, told = end(process, within_s=BOUND_S)
        assert status == 5
        assert "in spin" in told


def test_the_end_comes_beside_clients_that_hold_on() -> None:
    """Half a head, half a body, a stream that nobody reads, and one that is read."""
    with troubled("quick") as (process, url):
        address = urlsplit(url)
        clients = []
        whole = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        typed = b"Content-Type: application/json\r\nContent-Length: "
        unread = orjson.dumps(ENDLESS | {"stream": True, "n": 8})
        for data in (
            b"", whole, whole + typed + b'90\r\n\r\n{"prompt"', whole + typed + b"5000000\r\n\r\n",
            whole + typed + b"%d\r\n\r\n" % len(unread) + unread,
        ):  # fmt: skip
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((address.hostname, address.port))
            client.sendall(data)
            clients.append(client)
        time.sleep(0.3)
        stream = streamed(url)
        next(stream)
        process.send_signal(signal.SIGTERM)  # a second one changes nothing
        time.sleep(0.05)
        status, told = end(process, within_s=BOUND_S)
        assert status == 0, told
        for client in clients:
            client.close()


def test_a_second_ctrl_c_ends_at_once() -> None:
    with troubled("slow", "--shutdown-timeout", "60") as (process, url):
        stream = streamed(url)
        next(stream)
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert process.poll() is None
        status, told = end(process, signal.SIGINT, within_s=4)
        assert status == 0, told


def test_a_step_that_never_returns_ends_the_server() -> None:
    with troubled("hanging", "--stall-timeout", "1.5") as (process, url):
        text = b"".join(streamed(url))
        assert b"the engine is stuck: no progress for" in text
        assert b"while decoding" in text
        _, told = process.communicate(timeout=10)
        assert process.returncode == 4
        assert "the engine is stuck" in told
        assert "in rounds" in told


def test_a_server_that_was_stopped_for_a_while_goes_on() -> None:
    with troubled("slow", "--stall-timeout", "1.5") as (process, url):
        stream = streamed(url, max_tokens=800)  # four seconds
        next(stream)
        process.send_signal(signal.SIGSTOP)
        time.sleep(2.5)
        process.send_signal(signal.SIGCONT)
        assert b"[DONE]" in b"".join(stream)
        assert end(process, within_s=BOUND_S)[0] == 0


# As README has it.
SUPERVISOR = """
while :; do
  "$@"; status=$?
  echo "status $status" >&2
  case $status in 0|2|5|130|143) exit $status;; esac
  sleep 0.2
done
"""


@pytest.mark.parametrize(
    "trouble", ["stuck-once", pytest.param("stuck-kernel-once", marks=pytest.mark.gpu)]
)
def test_a_supervisor_brings_back_what_got_stuck(trouble: str, tmp_path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [
        "sh", "-c", SUPERVISOR, "sh", sys.executable, "-m", "server.troubled", "serve",
        f"{trouble}:{tmp_path / 'life'}", "--port", str(port), "--no-logs",
    ]  # fmt: skip
    supervisor = Popen(command, stderr=PIPE, text=True, env=environment_with_tests())

    def is_ready() -> bool:
        with suppress(httpx2.TransportError):
            return httpx2.get(f"{url}/health").status_code == 200
        return False

    try:
        wait_for(is_ready, 120)
        reply = httpx2.post(f"{url}/v1/completions", json=TEXT, timeout=60)
        assert reply.status_code == 503
        assert "the decode kernel is stuck: block " in reply.json()["error"]["message"]
        wait_for(lambda: not is_ready())
        wait_for(is_ready, 120)
        assert httpx2.post(f"{url}/v1/completions", json=TEXT, timeout=60).status_code == 200
        (server,) = psutil.Process(supervisor.pid).children()
        server.terminate()
        _, told = supervisor.communicate(timeout=20)
        lives = [line for line in told.splitlines() if line.startswith("status ")]
        assert lives == ["status 3", "status 0"], told
        assert "the decode kernel is stuck" in told
    finally:
        if supervisor.poll() is None:
            family = psutil.Process(supervisor.pid).children(recursive=True)
            supervisor.kill()
            for one in family:
                one.kill()
        supervisor.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_requests_finish_or_cuts_them(number: int) -> None:
    process, url = serve_in_a_process("etude-draft", "--shutdown-timeout", "2", "--sequences", "2")
    try:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
            ask = {"model": "etude-draft", "prompt": "def f", "stream": True}
            more = {"ignore_eos": True}
            short = client.completions.create(**ask, max_tokens=10, extra_body=more)
            long = client.completions.create(**ask, max_tokens=8000, extra_body=more)
            next(iter(long))
            next(iter(short))
            process.send_signal(number)
            assert list(short)[-1].choices[0].finish_reason == "length"
            with pytest.raises(openai.APIError, match="shutting down"):
                list(long)
        start = time.monotonic()
        assert process.wait(5) == 0
        assert time.monotonic() - start < 4
    finally:
        process.kill()
        process.communicate()
