"""Loading, keys, queues, failures and the end."""

import logging
import signal
import threading
import time
from contextlib import suppress
from dataclasses import replace

import httpx2
import openai
import pytest

from server.running import (
    CONFIG,
    KEY,
    Scripted,
    etude,
    is_idle,
    running,
    scripted,
    serve_in_a_process,
    wait_for,
    wait_until_ready,
)
from soloist.errors import LaunchError, ModelNotFound, SettingError
from soloist.model.weights import LoadProgress
from soloist.server.config import ServerConfig
from soloist.server.serve import Server, serve

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
        never = http.post("/v1/completions", json=TEXT | {"n": 10})
        assert (never.status_code, never.json()["error"]["param"]) == (400, "n")
        for stream in streams:
            stream.close()
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


def test_logs_have_figures_and_no_text(client, caplog) -> None:
    with caplog.at_level(logging.INFO, "soloist"):
        client.completions.create(model="gpt", prompt="SECRET_WORD =", max_tokens=3)
    (line,) = [r.getMessage() for r in caplog.records if "new tokens" in r.getMessage()]
    assert "TTFT" in line
    assert "SECRET" not in caplog.text


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
