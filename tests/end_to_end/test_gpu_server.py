"""The server before the decode kernel: answers, figures, and requests that are given up."""

import asyncio
import json
import random
import signal
from collections.abc import Iterator
from functools import cache

import httpx2
import openai
import pytest
import torch

from server.asgi import Exchange, application
from server.asgi import is_idle as is_idle_host
from server.running import (
    CONFIG,
    is_idle,
    running,
    serve_in_a_process,
    wait_for,
    wait_until_ready,
)
from soloist.engine import Engine, EngineConfig
from soloist.engine.bandwidth import brief_bandwidth, read_bandwidth
from soloist.engine.kernel_executor import KernelExecutor
from soloist.sampling import SamplingParams
from soloist.server.serve import Server

pytestmark = pytest.mark.gpu

PROMPT = "def fibonacci(n):\n"
ASK = {"prompt": PROMPT, "max_tokens": 400, "temperature": 0, "ignore_eos": True}


@cache
def engine() -> Engine:
    asked = EngineConfig(
        "etude", device="cuda", context_tokens=4096, sequences=8, keeps_prefixes=True,
        measures_bandwidth=True,
    )  # fmt: skip
    return Engine.load(asked)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(lambda _: engine(), CONFIG, names=("etude",)) as made:
        yield wait_until_ready(made)


@pytest.fixture
def http(server) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=60) as made:
        yield made


def test_a_brief_reading_is_the_long_one() -> None:
    device = torch.device("cuda:0")
    long = read_bandwidth(device).gb_per_s
    brief = brief_bandwidth(device, torch.cuda.mem_get_info(device)[0])
    assert brief is not None
    assert brief.gb_per_s == pytest.approx(long, rel=0.1)
    assert brief_bandwidth(device, 2**30) is None, "too little is free"


def test_figures_are_the_devices(http) -> None:
    reply = http.post("/v1/completions", json=ASK).json()
    timings, usage = reply["timings"], reply["usage"]
    assert timings["executor"] == "decode kernel"
    assert timings["device"] == torch.cuda.get_device_name(0)
    assert timings["predicted_n"] == 400
    weights = engine().report.streamed_bytes
    assert timings["predicted_bytes"] > 399 * weights
    assert timings["predicted_bytes"] < 1.5 * 399 * weights
    assert 0 < timings["mbu"] < 1
    assert usage["mbu"] == timings["mbu"]


def test_streams_side_by_side_are_those_alone(server) -> None:
    prompts = [f"def function_{n}(x):\n" for n in range(8)]
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        more = {"temperature": 0, "max_tokens": 200, "extra_body": {"ignore_eos": True}}
        alone = [
            client.completions.create(model="etude", prompt=p, **more).choices[0].text
            for p in prompts
        ]
        together = client.completions.create(model="etude", prompt=prompts, **more)
    assert [choice.text for choice in together.choices] == alone
    assert together.usage.completion_tokens == 8 * params.max_tokens


def test_weights_count_once_for_requests_that_share_steps(http) -> None:
    alone = http.post("/v1/completions", json=ASK).json()["timings"]
    shared = http.post("/v1/completions", json=ASK | {"prompt": [PROMPT] * 8}).json()["timings"]
    assert shared["predicted_bytes"] < 2 * alone["predicted_bytes"]


def test_disconnects_leave_no_sequence(server) -> None:
    executor = engine().model
    assert isinstance(executor, KernelExecutor)
    rng = random.Random(5)

    async def one(app: object) -> None:
        body = ASK | {
            "prompt": PROMPT * rng.choice([1, 40, 200]), "max_tokens": 900,
            "stream": rng.random() < 0.7, "temperature": rng.choice([0, 1]),
        }  # fmt: skip
        found = Exchange(app, "POST", "/v1/completions", body)
        task = asyncio.create_task(found.run())
        await asyncio.sleep(rng.random() * 0.02)
        found.hang_up()
        await task
        assert found.status in (0, 200, 499), json.dumps(body)

    async def all_of_them() -> None:
        async with application(engine(), most_waiting=1000, names=("etude",)) as (app, host):
            for _ in range(25):
                await asyncio.gather(*(one(app) for _ in range(12)))
            while not is_idle_host(host):
                await asyncio.sleep(0.001)

    wait_for(lambda: is_idle(server))
    before = len(executor.allocator._free_rows)
    asyncio.run(all_of_them())
    assert len(executor.allocator._free_rows) == before == executor.max_running


@pytest.mark.timed  # it reads the card's free memory, which others beside it would take
def test_a_signal_in_mid_answer_leaves_no_process_and_no_memory() -> None:
    free_bytes = torch.cuda.mem_get_info()[0]
    process, url = serve_in_a_process("etude", "--device", "cuda", "--shutdown-timeout", "0.5")
    try:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
            more = {"ignore_eos": True}
            ask = {"model": "etude", "prompt": PROMPT, "stream": True, "max_tokens": 8000}
            next(iter(client.completions.create(**ask, extra_body=more)))
            assert torch.cuda.mem_get_info()[0] < free_bytes
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 0
    finally:
        process.kill()
        process.communicate()
    assert torch.cuda.mem_get_info()[0] > free_bytes - (64 << 20)
