"""Health is progress: who asks for it waits for nobody, and is told what is so."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx2
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from server.running import Scripted, running, scripted, wait_for, wait_until_ready
from soloist.engine.loop import Progress
from soloist.errors import LaunchError
from soloist.server import status
from soloist.server.serve import Server
from soloist.server.watchdog import Watchdog
from timing import judged

TEXT = {"prompt": "def f", "max_tokens": 4}
ENDLESS = {"prompt": "def f", "max_tokens": 2000, "ignore_eos": True}
PATHS = ("/health", "/health/ready", "/health/live", "/metrics")


class Gated(Scripted):
    """Reads a prompt once it may; makes tokens as long as it may."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.may_read, self.may_go_on = threading.Event(), threading.Event()
        self.may_read.set()
        self.may_go_on.set()

    def read(self, one):
        assert self.may_read.wait(20)
        return super().read(one)

    def rounds(self, those, most):
        for outcomes in super().rounds(those, most):
            assert self.may_go_on.wait(20)
            yield outcomes

    @property
    def num_pages(self) -> int:
        return 40

    @property
    def num_pages_free(self) -> int:
        return 40 - self.num_open


@contextmanager
def serving(executor: Scripted, **changed) -> Iterator[tuple[Server, httpx2.Client]]:
    with running(lambda _: scripted(executor), **changed) as server:
        wait_until_ready(server)
        with httpx2.Client(base_url=server.url, timeout=20) as http:
            yield server, http


@pytest.fixture
def soon(monkeypatch) -> None:
    """What takes ten seconds and sixty takes a second and two."""
    monkeypatch.setattr(status, "READY_S", 1.0)
    monkeypatch.setattr(status, "LIVE_S", 2.0)


def gauge(http: httpx2.Client, name: str) -> float:
    lines = http.get("/metrics").text.splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(f"soloist_{name} ")))


@pytest.mark.usefixtures("soon")
def test_a_probe_that_gives_up_leaves_the_engine_alone() -> None:
    executor = Gated()
    with serving(executor) as (server, http):
        executor.may_read.clear()
        replies = []
        request = threading.Thread(
            target=lambda: replies.append(httpx2.post(f"{server.url}/v1/completions", json=TEXT))
        )
        request.start()
        wait_for(lambda: executor.num_open == 1)
        until = time.monotonic() + 2.5  # longer than any bound of a probe
        while time.monotonic() < until:
            for path in PATHS:
                with suppress(httpx2.TimeoutException):
                    httpx2.get(server.url + path, timeout=0.05)
        executor.may_read.set()
        request.join(20)
        assert replies[0].status_code == 200
        assert http.get("/health").status_code == 200
        assert server.host.failure is None


@pytest.mark.usefixtures("soon")
def test_health_tells_what_moves_and_waits_for_nothing() -> None:
    executor = Gated(tokens_per_s=100)
    with serving(executor) as (_, http):
        assert [http.get(path).status_code for path in PATHS] == [200] * 4
        assert http.get("/health/live").json() == {"status": "live"}
        assert gauge(http, "last_step_age_seconds") == 0
        assert (gauge(http, "kv_pages"), gauge(http, "kv_pages_free")) == (40, 40)
        with http.stream("POST", "/v1/completions", json=ENDLESS | {"stream": True}) as reply:
            parts = reply.iter_raw()
            next(parts)
            until = time.monotonic() + 1.5  # no request is that short, and every token is progress
            while time.monotonic() < until:
                assert http.get("/health/ready").status_code == 200
                assert gauge(http, "last_step_age_seconds") < 0.5
                assert gauge(http, "kv_pages_free") == 39
            executor.may_go_on.clear()
            wait_for(lambda: http.get("/health").status_code == 503)
            asked = time.perf_counter()
            told = http.get("/health/ready").json()
            assert time.perf_counter() - asked < 0.5
            assert told["status"] == "stuck"
            assert "decoding" in told["reason"]
            assert 1 < told["last_step_age_s"] < 10
            assert gauge(http, "last_step_age_seconds") >= told["last_step_age_s"]
            assert http.get("/health/live").status_code == 200, "it may still come round"
            wait_for(lambda: http.get("/health/live").status_code == 503)
            assert http.get("/health/live").json()["status"] == "stuck"
            executor.may_go_on.set()
            wait_for(lambda: http.get("/health").status_code == 200)
            assert http.get("/health/live").status_code == 200
        wait_for(lambda: gauge(http, "kv_pages_free") == 40)


def test_an_endpoint_picker_reads_the_gauges_under_the_names_of_vllm() -> None:
    executor = Gated()

    def vllm(http: httpx2.Client, name: str, **labels: str) -> float:
        families = {f.name: f for f in text_string_to_metric_families(http.get("/metrics").text)}
        family = families[f"vllm:{name}"]
        assert family.type == "gauge"
        (sample,) = family.samples
        assert sample.labels == {"model_name": "etude-draft"} | labels
        return sample.value

    with serving(executor) as (server, http):
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        assert [vllm(http, name) for name in names] == [0, 0, 0]
        assert vllm(http, "cache_config_info", block_size="64", num_gpu_blocks="40") == 1
        executor.may_go_on.clear()
        threads = [
            threading.Thread(target=httpx2.post, args=[f"{server.url}/v1/completions"], kwargs=one)
            for one in [{"json": TEXT, "timeout": 20}] * 3
        ]
        threads[0].start()
        wait_for(lambda: executor.num_open == 1)
        for thread in threads[1:]:  # while no round ends, none of them joins
            thread.start()
        wait_for(lambda: [vllm(http, name) for name in names] == [1, 2, 1 / 40])
        executor.may_go_on.set()
        for thread in threads:
            thread.join(20)
        wait_for(lambda: [vllm(http, name) for name in names] == [0, 0, 0])


def test_alive_while_loading_and_not_after_a_failure() -> None:
    go, executor = threading.Event(), Scripted()

    def load(_):
        go.wait(20)
        return scripted(executor)

    with running(load) as server, httpx2.Client(base_url=server.url, timeout=20) as http:
        wait_for(lambda: server.started)
        assert http.get("/health/live").status_code == 200
        assert http.get("/health/ready").json()["status"] == "loading"
        go.set()
        wait_until_ready(server)
        server.host.stop()
        assert http.get("/health/live").status_code == 200
        told = http.get("/health/ready")
        assert (told.status_code, told.json()["status"]) == (503, "stopped")
        assert "shutting down" in told.json()["reason"]
        server.host.failure = LaunchError("the decode kernel", "it broke")
        told = http.get("/health/live")
        assert (told.status_code, told.json()["status"]) == (503, "failed")
        assert "it broke" in told.json()["reason"]


def test_a_step_that_fails_is_told_by_name_and_the_next_one_works() -> None:
    executor = Scripted()
    with serving(executor) as (server, http):
        executor.fault = ZeroDivisionError("SECRET_WORD")
        reply = http.post("/v1/completions", json=TEXT)
        assert reply.status_code == 500
        error = reply.json()["error"]
        assert error["code"] == "step_failed"
        assert "reading a prompt failed: ZeroDivisionError" in error["message"]
        assert "SECRET" not in error["message"]
        with http.stream("POST", "/v1/completions", json=TEXT | {"stream": True}) as reply:
            assert '"code":"step_failed"' in "".join(reply.iter_text())
        executor.fault = None
        assert http.post("/v1/completions", json=TEXT).status_code == 200
        assert http.get("/health").status_code == 200
        wait_for(lambda: executor.num_open == 0)
        assert server.host.failure is None


def test_no_request_asks_the_device(http: httpx2.Client, monkeypatch) -> None:
    asked = []
    for name in dir(torch.cuda):
        value = getattr(torch.cuda, name)
        if callable(value) and not isinstance(value, type) and not name.startswith("_"):
            monkeypatch.setattr(torch.cuda, name, lambda *_, name=name, **__: asked.append(name))
    monkeypatch.setitem(sys.modules, "pynvml", None)  # importing it fails
    for path in (*PATHS, "/v1/models"):
        assert http.get(path).status_code == 200
    assert http.post("/v1/completions", json=TEXT).status_code == 200
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    assert http.post("/v1/chat/completions", json=chat).status_code == 200
    assert not asked


class Clock:
    """A loop of which one can say when something moved."""

    def __init__(self) -> None:
        self.moved_at, self.is_idle = time.perf_counter(), False

    @property
    def progress(self) -> Progress:
        return Progress(0.0 if self.is_idle else time.perf_counter() - self.moved_at, "decoding")


@pytest.mark.timed
def test_the_watchdog_bites_once_nothing_moves() -> None:
    def bitten() -> tuple[bool, float]:
        clock, bites = Clock(), []
        dog = Watchdog(clock, 0.4, bites.append)
        for _ in range(20):
            time.sleep(0.04)
            clock.moved_at = time.perf_counter()
        clock.is_idle = True
        time.sleep(0.8)
        too_soon = bool(bites)
        clock.is_idle = False
        clock.moved_at = time.perf_counter()
        wait_for(lambda: bool(bites))
        dog._thread.join(1)
        assert not dog._thread.is_alive()
        return too_soon, bites[-1].age_s

    def check(bitten: tuple[bool, float]) -> None:
        too_soon, age_s = bitten
        assert not too_soon
        assert 0.3 < age_s < 0.8

    judged(bitten, check, 5)


def test_the_watchdog_does_not_count_what_it_slept_through(monkeypatch) -> None:
    clock, bites = Clock(), []
    now, jump_s = time.perf_counter, [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now() + jump_s[0])
    clock.moved_at = time.perf_counter()
    dog = Watchdog(clock, 2.0, bites.append)
    time.sleep(0.4)
    jump_s[0] = 3600.0  # as if the process had been stopped for an hour
    time.sleep(0.6)
    assert not bites
    wait_for(lambda: bool(bites))
    dog.close()
