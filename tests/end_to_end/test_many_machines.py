"""Replicas on real Ray, on several nodes of this machine; étude on the CPU, official clients."""

import json
import logging
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import anthropic
import httpx2
import openai
import pytest

with warnings.catch_warnings():  # Ray's own, while it is imported
    warnings.simplefilter("ignore")
    pytest.importorskip("ray.serve", reason="Ray is not installed: pip install 'soloist[ray]'")

from end_to_end.replicas import (
    URL,
    Machines,
    deployment,
    machines,
    replicas,
    start,
    wait_for,
)
from server.running import oracle
from soloist.errors import NotDeployable
from soloist.sampling import SamplingParams

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timed]

log = logging.getLogger(__name__)

KEY = "sk-test"
QUESTION = [{"role": "user", "content": "A function that adds two numbers"}]


def told(prompt: str, tokens: int) -> str:
    """What one engine alone says."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return "".join(c.text for c in oracle().generate(prompt, params) if hasattr(c, "logprobs"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[None]:
    with machines(head_cpus=2):
        file = tmp_path_factory.mktemp("keys") / "keys"
        file.write_text(f"{KEY}\n")
        start(deployment({"replicas": 2, "names": ["draft", "gpt"]}, api_key_file=file))
        yield


@pytest.fixture
def http() -> Iterator[httpx2.Client]:
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx2.Client(base_url=URL, headers=headers, timeout=60) as client:
        yield client


@pytest.mark.usefixtures("cluster")
def test_the_address_is_that_of_one_server(http) -> None:
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY)
    assert [one.id for one in client.models.list()] == ["draft", "gpt"]
    reply = client.chat.completions.create(model="gpt", messages=QUESTION, max_tokens=5)
    assert reply.usage.completion_tokens == 5
    assert reply.timings["replica"] in replicas(http)
    prompt = "def add(a, b):"
    stream = client.completions.create(
        model="draft", prompt=prompt, max_tokens=60, temperature=0, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert "".join(chunk.choices[0].text for chunk in stream) == told(prompt, 60)
    claude = anthropic.Anthropic(base_url=URL, api_key=KEY)
    with claude.messages.stream(model="gpt", messages=QUESTION, max_tokens=5) as events:
        assert events.get_final_message().usage.output_tokens == 5
    lines = http.post("/api/chat", json={"model": "gpt:latest", "messages": QUESTION}).text
    assert json.loads(lines.splitlines()[-1])["done"]
    # Keys, names, fields, paths and sizes are refused as one server refuses them.
    wrong = httpx2.post(f"{URL}/v1/completions", json={"prompt": "x"})
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (401, "invalid_api_key")
    with pytest.raises(openai.NotFoundError, match="available: draft, gpt"):
        client.chat.completions.create(model="other", messages=QUESTION)
    with pytest.raises(openai.BadRequestError, match="nonsense"):
        client.chat.completions.create(
            model="gpt", messages=QUESTION, extra_body={"nonsense": 1}
        )  # fmt: skip
    assert http.get("/nowhere").status_code == 404
    assert http.post("/v1/completions", content=b" " * (33 << 20)).status_code == 413
    # Larger than a message of gRPC may be as Ray comes.
    large = {"model": "gpt", "prompt": "x" * 6_000_000}
    assert http.post("/v1/completions", json=large).json()["error"]["code"] == (
        "context_length_exceeded"
    )
    assert http.get("/health/live").status_code == 200
    assert http.get("/v1/models/gpt").json()["id"] == "gpt"
    assert http.get("/v1/models/other").status_code == 404
    page = http.get("/", headers={"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate"})
    assert len(page.text) > 1000
    assert http.get("/playground/page.js").status_code == 200
    asked = {"prompt": "x", "max_tokens": 1}
    ours = {"Origin": URL, "Sec-Fetch-Site": "same-origin"}
    assert http.post("/v1/completions", json=asked, headers=ours).status_code == 200
    theirs = {"Origin": "http://elsewhere.example", "Sec-Fetch-Site": "cross-site"}
    assert http.post("/v1/completions", json=asked, headers=theirs).status_code == 403


@pytest.mark.usefixtures("cluster")
def test_one_view_over_all_replicas(http) -> None:
    names = set(replicas(http))
    assert len(names) == 2
    text = http.get("/metrics").text
    for name in names:
        assert (
            f'vllm:num_requests_running{{model="draft",model_name="draft",replica="{name}"}}'
            in (text)
        )
    assert 'soloist_http_replies_total{path="/health",replica="ingress",status="200"}' in text


@pytest.mark.usefixtures("cluster")
def test_a_conversation_goes_where_it_is_cached_and_a_session_to_its_home(http) -> None:
    def ask(prompt: str, **headers: str) -> tuple[str, int]:
        body = {"prompt": prompt, "max_tokens": 1}
        timings = http.post("/v1/completions", json=body, headers=headers).json()["timings"]
        return timings["replica"], timings["cache_n"]

    begun = {n: ask(f"# {n}\n" + f"x{n} = {n}\n" * 150) for n in range(12)}
    assert len({replica for replica, _ in begun.values()}) == 2
    for n, (replica, _) in begun.items():
        again, cached = ask(f"# {n}\n" + f"x{n} = {n}\n" * 150 + "y = 1\n")
        assert again == replica
        assert cached >= 256
    homes = {n: {ask(f"{n}", **{"x-session-id": f"s{n}"})[0] for _ in range(2)} for n in range(16)}
    assert all(len(home) == 1 for home in homes.values())
    assert len(set().union(*homes.values())) == 2


@pytest.mark.usefixtures("cluster")
def test_a_request_that_is_given_up_ends_in_its_replica(http) -> None:
    endless = {"prompt": "def f", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=endless) as reply:
        parts = reply.iter_raw()
        next(parts)
        assert in_hand(http) == 1
    wait_for(lambda: in_hand(http) == 0, 10)
    with http.stream("POST", "/v1/completions", json=endless) as reply:
        lines = reply.iter_lines()
        first = json.loads(next(lines).removeprefix("data: "))
        assert http.delete(f"/v1/completions/{first['id']}").json()["deleted"] is True
        rest = "".join(lines)
    assert '"code":"cancelled"' in rest
    assert http.delete("/v1/completions/cmpl-0").status_code == 404


@pytest.mark.usefixtures("cluster")
def test_what_the_cluster_cannot_hold_is_refused_before_anything_is_started(http) -> None:
    before = replicas(http)
    for model, words in (
        ({"gpus": 1}, "needs 1 GPUs of one node for a replica, and no node has more than 0"),
        ({"cpus": 3}, "needs 3 CPU cores of one node"),
        ({"replicas": 3}, "together need 3 CPU cores, and the cluster has 2 on 1 node"),
    ):
        with pytest.raises(NotDeployable, match=words):
            start(deployment(model))
    assert replicas(http) == before


def stream_of(client: httpx2.Client, prompt: str, tokens: int) -> tuple[str, dict, dict]:
    """The text, the timings and the error of one stream, whatever of them there is."""
    body = {
        "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0,
        "stream": True,
    }  # fmt: skip
    text, timings, error = "", {}, {}
    with client.stream("POST", "/v1/completions", json=body) as reply:
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                error = event["error"]
                continue
            text += event["choices"][0]["text"]
            timings = event.get("timings", timings)
    return text, timings, error


@pytest.fixture(scope="module")
def four() -> Iterator[Machines]:
    """Four replicas on two nodes."""
    with machines(2, 2) as found:
        start(deployment({"replicas": 4}), seconds=300)
        yield found


@pytest.mark.slow
def test_a_thousand_mixed_requests(four) -> None:
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=120)
    claude = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0, timeout=120)
    prompts = [f"def f{n}(x):\n" for n in range(10)]
    wanted = {prompt: told(prompt, 8) for prompt in prompts}
    seen: Counter[str] = Counter()

    def ask(number: int) -> None:
        prompt = prompts[number % 10]
        common = {"model": "etude-draft", "max_tokens": 8}
        more = {"temperature": 0, "extra_body": {"ignore_eos": True}}
        match number % 5:
            case 0:
                reply = client.completions.create(prompt=prompt, **common, **more)
                assert reply.choices[0].text == wanted[prompt]
                seen[reply.timings["replica"]] += 1
            case 1:
                stream = client.completions.create(prompt=prompt, stream=True, **common, **more)
                assert "".join(c.choices[0].text for c in stream) == wanted[prompt]
            case 2:
                reply = client.chat.completions.create(messages=QUESTION, **common)
                assert reply.usage.completion_tokens <= 8
            case 3:
                assert claude.messages.create(messages=QUESTION, **common).content
            case 4:
                reply = client.responses.create(
                    model="etude-draft", input=prompt, max_output_tokens=16
                )
                assert reply.usage.output_tokens <= 16

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(ask, range(1000)))
    assert len(seen) == 4
    assert four.nodes


def in_hand(http: httpx2.Client) -> float:
    """Requests that run, in all replicas."""
    lines = http.get("/metrics").text.splitlines()
    return sum(float(x.split()[1]) for x in lines if x.startswith("soloist_requests_running{"))


def ask_on(http: httpx2.Client, seconds: float) -> tuple[float, float]:
    """Short requests, one after the other: the longest, and when the last one was refused."""
    began, slowest, last_failure = time.monotonic(), 0.0, 0.0
    while (sent := time.monotonic()) - began < seconds:
        reply = http.post("/v1/completions", json={"prompt": "x = ", "max_tokens": 2})
        now = time.monotonic()
        slowest = max(slowest, now - sent)
        if reply.status_code != 200:
            assert reply.json()["error"]["code"] == "replica_lost"
            last_failure = now - began
    return slowest, last_failure


@pytest.mark.slow
def test_a_node_dies_while_streams_run_and_comes_back(four) -> None:
    with httpx2.Client(base_url=URL, timeout=120) as http, ThreadPoolExecutor(8) as pool:
        wait_for(lambda: len(replicas(http)) == 4, 60)
        before = replicas(http)
        wanted = {prompt: told(prompt, 600) for prompt in (f"class C{n}:\n" for n in range(8))}
        running = {prompt: pool.submit(stream_of, http, prompt, 600) for prompt in wanted}
        wait_for(lambda: in_hand(http) >= 6, 30)
        four.kill(four.nodes[0])
        slowest, last_failure = ask_on(http, 15)
        log.info("slowest %.2f s, last failure after %.2f s", slowest, last_failure)
        assert max(slowest, last_failure) < 5
        found = {prompt: one.result(120) for prompt, one in running.items()}
        lost = [prompt for prompt, (_, _, error) in found.items() if error]
        assert 0 < len(lost) < len(wanted), "streams were on both nodes"
        for prompt, (text, timings, error) in found.items():
            if error:
                assert error["code"] == "replica_lost"
                assert wanted[prompt].startswith(text)
            else:
                assert text == wanted[prompt]
                assert timings["replica"] in before
        # Who was told to try again gets the whole answer.
        text, timings, error = stream_of(http, lost[0], 600)
        assert (text, error) == (wanted[lost[0]], {})
        assert timings["replica"] in replicas(http)
        four.add(2)
        wait_for(lambda: len(replicas(http)) == 4, 120)
        new, used = set(replicas(http)) - set(before), set()

        def is_used() -> bool:
            asked = [pool.submit(stream_of, http, f"# {n}", 30) for n in range(8)]
            used.update(one.result(60)[1]["replica"] for one in asked)
            return bool(used & new)

        wait_for(is_used, 60)


@pytest.mark.slow
@pytest.mark.usefixtures("four")
def test_a_rolling_update_fails_no_request() -> None:
    is_over, failures, served = threading.Event(), [], Counter()

    def ask() -> None:
        with httpx2.Client(base_url=URL, timeout=120) as http:
            while not is_over.is_set():
                try:
                    text, timings, error = stream_of(http, "def f(x):\n", 40)
                except httpx2.HTTPError as problem:
                    failures.append(repr(problem))
                    continue
                if error or not timings:
                    failures.append(error or text)
                else:
                    served[timings["replica"]] += 1

    with httpx2.Client(base_url=URL, timeout=60) as http, ThreadPoolExecutor(4) as pool:
        before = set(replicas(http))
        asking = [pool.submit(ask) for _ in range(3)]
        try:
            start(deployment({"replicas": 4, "context": 1024}), seconds=400)
        finally:
            is_over.set()
        for one in asking:
            one.result(120)
        assert not failures
        assert set(served) & before
        assert not set(replicas(http)) & before
        assert http.get("/v1/models").json()["data"][0]["max_model_len"] == 1024


@pytest.mark.slow
@pytest.mark.usefixtures("four")
def test_affinity_finds_more_cached_tokens() -> None:
    def cached() -> tuple[int, int]:
        total = hits = 0
        with httpx2.Client(base_url=URL, timeout=60) as http:
            for turn in range(4):
                for n in range(6):
                    prompt = f"# {n}\n" + f"x{n} = {n}\n" * (60 + 20 * turn)
                    body = {"prompt": prompt, "max_tokens": 1}
                    usage = http.post("/v1/completions", json=body).json()["usage"]
                    total += usage["prompt_tokens"]
                    hits += usage["prompt_tokens_details"]["cached_tokens"]
        return hits, total

    start(deployment({"replicas": 4, "queue": 63}), seconds=400)
    with_affinity = cached()
    start(deployment({"replicas": 4, "affinity": False}), seconds=400)
    without = cached()
    log.info("cached of all prompt tokens: %s, without affinity %s", with_affinity, without)
    assert with_affinity[0] > 1.5 * without[0]


@pytest.mark.slow
@pytest.mark.usefixtures("four")
def test_replicas_come_with_requests_and_go_with_them() -> None:
    wanted = {"least": 1, "most": 3, "requests": 1, "grow_after_s": 2, "shrink_after_s": 4}
    start(deployment({"autoscaling": wanted}), seconds=400)
    prompt, is_over, slow_down = "class C:\n", threading.Event(), threading.Event()
    text_alone, served = told(prompt, 300), Counter()

    def ask() -> None:
        with httpx2.Client(base_url=URL, timeout=120) as http:
            while not is_over.is_set():
                text, timings, error = stream_of(http, prompt, 300)
                assert (text, error) == (text_alone, {})
                served[timings["replica"]] += 1
                is_over.wait(1 if slow_down.is_set() else 0)

    with httpx2.Client(base_url=URL, timeout=60) as http, ThreadPoolExecutor(4) as pool:
        wait_for(lambda: len(replicas(http)) == 1, 180)
        before = set(replicas(http))
        asking = [pool.submit(ask) for _ in range(4)]
        try:
            took_s = wait_for(lambda: len(replicas(http)) == 3, 180)
            log.info("three replicas after %.0f s of requests", took_s)
            wait_for(lambda: len(served) == 3, 60)
            # One client that pauses is work for one replica; it goes on asking while others go.
            is_over.set()
            for one in asking:
                one.result(120)
            is_over.clear()
            slow_down.set()
            last = pool.submit(ask)
            took_s = wait_for(lambda: len(replicas(http)) == 1, 300)
            log.info("one replica after %.0f s with less", took_s)
            few = sum(served.values())
            wait_for(lambda: sum(served.values()) > few + 2, 60)
        finally:
            is_over.set()
        last.result(120)
        assert before & set(served)
