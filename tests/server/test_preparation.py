"""Reading a request costs no other request anything: hostile bodies, templates, dying processes."""

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx2
import orjson
import psutil
import pytest

from server.running import Scripted, etude, running, scripted, wait_for, wait_until_ready
from soloist.errors import PreparationFailed
from soloist.server.held import MOST_LARGEST
from soloist.server.preparation import pool as pool_module
from soloist.server.preparation.bounds import BOUNDS, bound_of
from soloist.server.preparation.jobs import CHATS, COMPLETIONS, JOBS, run
from soloist.server.preparation.limits import (
    CONVERSATION_BYTES,
    LARGE_BYTES,
    cpu_s,
    memory_bytes,
)
from soloist.server.preparation.pool import Preparation
from soloist.server.problems import Problem
from soloist.server.serve import Server
from soloist.text.processor import Processor, ProcessorFiles

MB = 10**6
CHAT = {"model": "gpt", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
TEXT = {"model": "gpt", "prompt": "def f", "max_tokens": 3}

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TEMPLATE = (
    "{% if loops %}" + LOOP + "{% endif %}"
    "{% for i in range(rounds or 0) %}{% for j in range(1000) %}{% endfor %}{% endfor %}"
    "{% if times %}{{ 'a' * times }}{% endif %}"
    "{% if power %}{{ (power ** power) | string | length }}{% endif %}"
    "{% if wide %}{{ 'a' | center(wide) }}{% endif %}"
    "{% if self %}self {{ self }} {% endif %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)


def word() -> bytes:
    return b'"' + b"x" * (20 * MB) + b'"'


# By what is wrong: a path and a body that must be refused, made when its test runs.
BODIES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "objects for a prompt": (
        "completions",
        lambda: b'{"prompt": [' + b",".join([b'{"a":1}'] * (28 * MB // 8)) + b"]}",
    ),
    "empty objects": (
        "completions", lambda: b'{"prompt": [' + b",".join([b"{}"] * (4 * MB)) + b"]}"
    ),
    "long stop strings": (
        "completions",
        lambda: orjson.dumps(TEXT | {"stop": [f"{i}" + "y" * 240_000 for i in range(64)]}),
    ),
    "one word": ("completions", lambda: b'{"prompt": ' + word() + b"}"),
    "one word said": (
        "chat/completions",
        lambda: b'{"messages": [{"role": "user", "content": ' + word() + b"}]}",
    ),
    "much text": (
        "completions", lambda: orjson.dumps(TEXT | {"prompt": "def f(x):\n" * (3 * MB)})
    ),
    "unknown fields": (
        "completions", lambda: orjson.dumps(TEXT | {f"f{i}": 1 for i in range(1_600_000)})
    ),
    "biases": (
        "completions",
        lambda: orjson.dumps(TEXT | {"logit_bias": {str(i): 1 for i in range(1_600_000)}}),
    ),
    "token ids": ("completions", lambda: orjson.dumps(TEXT | {"prompt": [5] * (10 * MB)})),
    "choices": (
        "completions",
        lambda: orjson.dumps(TEXT | {"guided_choice": [f"text {i}" for i in range(100_000)]}),
    ),
    "depth": (
        "chat/completions",
        lambda: b'{"messages": ' + b"[" * 150_000 + b"]" * 150_000 + b"}",
    ),
    "a long name": (
        "completions", lambda: b'{"model": ' + word() + b', "prompt": "x"}'
    ),
    "a long field": ("completions", lambda: b'{"prompt": "x", ' + word() + b": 1}"),
    "a long role": (
        "chat/completions", lambda: b'{"messages": [{"role": ' + word() + b"}]}"
    ),
    "numbers": (
        "completions", lambda: b'{"temperature": [' + b",".join([b"1"] * (10 * MB)) + b"]}"
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def files() -> ProcessorFiles:
    return etude().processor.files


@pytest.fixture(scope="module")
def looping(files) -> ProcessorFiles:
    """With a template that may take long, so that every chat is read by a child."""
    return ProcessorFiles(files.folder, files.vocab_size, 2048, {"default": TEMPLATE})


@pytest.fixture(scope="module")
def processor(files) -> Processor:
    return Processor(files)


@pytest.fixture(scope="module")
def served() -> Iterator[Server]:
    """A server that says 200 tokens a second, with a template that may take too much."""
    engine = scripted(Scripted(tokens_per_s=200), template=TEMPLATE)
    with running(lambda _: engine) as server:
        yield wait_until_ready(server)


def told(processor: Processor, job, body: object) -> Problem:
    content = body if isinstance(body, bytes) else orjson.dumps(body)
    with pytest.raises(Problem) as problem:
        run(job, processor, ("gpt",), content)
    return problem.value


@contextmanager
def prepared(files: ProcessorFiles) -> Iterator[Preparation]:
    made = Preparation(Processor(files), ("gpt",))
    made.start()
    try:
        yield made
    finally:
        made.close()
        assert made._process.returncode is not None, "it leaves no process"


def ask(preparation: Preparation, body: bytes, job=COMPLETIONS) -> object:
    try:
        return asyncio.run(preparation.prepare(job, [body]))
    except Problem as problem:
        return problem


def children_of(preparation: Preparation) -> list[psutil.Process]:
    """Those that read requests."""
    return psutil.Process(preparation._process.pid).children()


def tree() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def used_bytes() -> int:
    """Memory that is this process's and its children's alone."""
    total = psutil.Process().memory_full_info().uss
    for child in tree():
        with suppress(psutil.Error):
            total += child.memory_full_info().uss
    return total


def busy_share() -> float:
    """Of a core, by processes that read requests."""
    before = {p.pid: sum(p.cpu_times()[:2]) for p in tree()}
    time.sleep(0.1)
    used = 0.0
    for process in tree():
        with suppress(psutil.Error):
            used += sum(process.cpu_times()[:2]) - before.get(process.pid, 0.0)
    return used / 0.1


@contextmanager
def watched() -> Iterator[list[int]]:
    """The most memory that was taken meanwhile."""
    peak, is_over = [used_bytes()], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.02):
            peak[0] = max(peak[0], used_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        is_over.set()
        thread.join()


def test_every_field_has_a_bound_that_holds(processor) -> None:
    names = {name for job in JOBS.values() for name in job.schema.model_fields}
    assert set(BOUNDS) <= names, "no bound without a field"
    for job in JOBS.values():
        for name in job.schema.model_fields:
            bound = bound_of(name)
            if bound.values < 10**6:
                many = told(processor, job, {name: [1] * (bound.values + 1)})
                assert (many.status, many.param, many.code) == (400, name, "too_large"), name
                assert f"{bound.values:,}" in many.message
            if bound.num_bytes is not None:
                long = told(processor, job, {name: "x" * (bound.num_bytes + 1)})
                assert (long.status, long.param, long.code) == (400, name, "too_large"), name
                assert f"{bound.num_bytes:,}" in long.message
                nested = told(processor, job, {name: {"a": [{"x" * (bound.num_bytes + 1): 1}]}})
                assert nested.code == "too_large"


def test_what_real_clients_send_is_within_bounds(processor) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {}}}}
    tools = [
        tool | {"function": tool["function"] | {"name": f"f{i}", "description": "does " * 50}}
        for i in range(500)
    ]
    turns = [
        {"role": role, "content": f"x{i}"} for i in range(1000) for role in ("user", "assistant")
    ]
    many = told(processor, CHATS, CHAT | {"messages": turns, "tools": tools})
    assert many.code != "too_large"
    biased = TEXT | {"logit_bias": {str(i): -100 for i in range(4096)}, "stop": ["\n\n"] * 64}
    assert run(COMPLETIONS, processor, ("gpt",), orjson.dumps(biased)).prompts


def test_texts_that_cannot_fit_are_refused_with_both_numbers(processor) -> None:
    start = time.perf_counter()
    problem = told(processor, COMPLETIONS, TEXT | {"prompt": "x" * (20 * MB)})
    assert time.perf_counter() - start < 1, "nothing was encoded"
    assert problem.code == "context_length_exceeded"
    assert "at least 235,295 tokens" in problem.message
    assert "context holds 2,048" in problem.message
    # Little enough to be encoded as far as it takes.
    problem = told(processor, COMPLETIONS, TEXT | {"prompt": "x = 1\n" * 20_000})
    assert problem.code == "context_length_exceeded"
    counted = len(processor.tokenizer.encode("x = 1\n" * 20_000))
    assert f"{counted:,}" in problem.message or "at least" in problem.message


@pytest.mark.few(6)
@pytest.mark.parametrize("kind", BODIES)
def test_a_hostile_body_is_refused_and_gives_its_memory_back(kind, served) -> None:
    path, make = BODIES[kind]
    body = make()
    url = f"{served.url}/v1"
    httpx2.post(f"{url}/chat/completions", json=CHAT)
    before = used_bytes()
    with watched() as peak:
        reply = httpx2.post(
            f"{url}/{path}", content=body, timeout=120,
            headers={"content-type": "application/json"},
        )  # fmt: skip
    assert reply.status_code in (400, 404), reply.text[:200]
    assert len(reply.content) < 10_000
    assert peak[0] - before <= 20 * len(body) + memory_bytes(0)
    if len(body) > 16 * MB:
        assert peak[0] - before <= 20 * len(body)
    wait_for(lambda: used_bytes() - before < 48 * MB)
    assert httpx2.post(f"{url}/completions", json=TEXT).status_code == 200


@pytest.mark.parametrize(
    ("variables", "word"),
    [
        ({"loops": True}, "of a processor"),
        ({"times": 10**10}, "MB"),
        ({"power": 10**7}, "of a processor"),
        ({"wide": 10**10}, "MB"),
    ],
)
def test_a_template_that_takes_too_much_is_stopped(variables, word, served) -> None:
    with httpx2.Client(base_url=served.url, timeout=40) as http:
        ask = CHAT | {"chat_template_kwargs": variables}
        start = time.monotonic()
        reply = http.post("/v1/chat/completions", json=ask)
        took = time.monotonic() - start
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["code"] == "too_costly"
        assert word in reply.json()["error"]["message"]
        assert took < 8 * cpu_s(200)
        assert http.post("/v1/chat/completions", json=CHAT).status_code == 200
    wait_for(lambda: busy_share() < 0.5)


def test_slow_requests_keep_no_other_waiting(served) -> None:
    ask = CHAT | {"chat_template_kwargs": {"loops": True}}

    def loop() -> None:
        httpx2.post(f"{served.url}/v1/chat/completions", json=ask, timeout=60)

    threads = [threading.Thread(target=loop) for _ in range(5)]  # one more than are read at once
    for thread in threads:
        thread.start()
    time.sleep(0.6)
    start = time.monotonic()
    assert httpx2.post(f"{served.url}/v1/chat/completions", json=CHAT).status_code == 200
    assert time.monotonic() - start < 1.5
    assert any(thread.is_alive() for thread in threads), "they still loop"
    for thread in threads:
        thread.join(60)


def test_any_name_of_a_variable_is_a_variable(served) -> None:
    for name in ("self", "template", "variables", "args", "documents", "environment", "__x"):
        ask = CHAT | {"chat_template_kwargs": {name: 1}}
        reply = httpx2.post(f"{served.url}/v1/chat/completions", json=ask)
        assert reply.status_code == 200, (name, reply.text)


def test_a_client_that_goes_takes_its_work_along(files) -> None:
    """A long body's child ends as soon as nobody waits for it."""
    looping = ProcessorFiles(files.folder, files.vocab_size, 2048, {"default": TEMPLATE})
    body = CHAT | {"chat_template_kwargs": {"loops": True}, "user": "y" * 1000}
    body["messages"] = [{"role": "user", "content": "x" * LARGE_BYTES}]
    with prepared(looping) as preparation:

        async def go_away() -> None:
            work = asyncio.ensure_future(preparation.prepare(CHATS, [orjson.dumps(body)]))
            await asyncio.sleep(0.5)
            assert len(children_of(preparation)) == 1
            work.cancel()
            await asyncio.wait([work])

        asyncio.run(go_away())
        wait_for(lambda: not children_of(preparation), 2)


def test_a_child_that_died_is_replaced(looping) -> None:
    body = orjson.dumps(CHAT)
    with prepared(looping) as preparation:
        assert ask(preparation, body, CHATS).prompts
        for child in children_of(preparation):
            child.kill()
        assert ask(preparation, body, CHATS).prompts
        # And all of them at once, with the process that forks them.
        preparation._process.send_signal(signal.SIGKILL)
        preparation._process.wait()
        assert ask(preparation, body, CHATS).prompts
        assert ask(preparation, body, CHATS).prompts


def test_a_short_text_is_read_at_once_and_a_grammar_elsewhere(files) -> None:
    with prepared(files) as preparation:
        assert ask(preparation, orjson.dumps(TEXT)).prompts
        assert ask(preparation, orjson.dumps(CHAT), CHATS).prompts
        assert not children_of(preparation)
        assert ask(preparation, orjson.dumps(TEXT | {"guided_regex": "[ab]+"})).grammar
        assert len(children_of(preparation)) == 1


def test_the_kept_child_stays_the_same(looping) -> None:
    with prepared(looping) as preparation:
        found = set()
        for _ in range(20):
            assert ask(preparation, orjson.dumps(CHAT), CHATS).prompts
            found |= {p.pid for p in children_of(preparation)}
        assert len(found) <= 2, "a fork costs more than a request"


def test_a_long_conversation_is_read_by_the_child_that_read_its_beginning(files) -> None:
    with prepared(files) as preparation:
        found = set()
        for step in range(4):
            # Long by its blanks: a text of that length does not fit.
            body = orjson.dumps(TEXT | {"prompt": "x = 1\n" * (1 + step)}) + b" " * LARGE_BYTES
            assert ask(preparation, body).prompts
            found |= {p.pid for p in children_of(preparation)}
        assert len(found) == 1
        assert ask(preparation, orjson.dumps(TEXT | {"guided_regex": "[ab]+"})).grammar
        assert len(children_of(preparation)) == 2, "one that gives way reads no short requests"


def test_a_slow_conversation_keeps_its_child(looping) -> None:
    """A template that takes a while stands for a long text."""
    slow = CHAT | {"chat_template_kwargs": {"rounds": 2000}}
    with prepared(looping) as preparation:
        found = set()
        for _ in range(3):
            body = orjson.dumps(slow) + b" " * CONVERSATION_BYTES
            assert ask(preparation, body, CHATS).prompts
            found |= {p.pid for p in children_of(preparation)}
        assert len(found) == 1
        assert os.getpriority(os.PRIO_PROCESS, found.pop()) > 10, "it has given way"
        assert ask(preparation, orjson.dumps(CHAT), CHATS).prompts
        assert len(children_of(preparation)) == 2, "one that gives way reads no short requests"


def test_few_children_wait_for_conversations(looping) -> None:
    """However many were read at once: each holds some memory."""
    slow = CHAT | {"chat_template_kwargs": {"rounds": 2000}}
    body = orjson.dumps(slow) + b" " * CONVERSATION_BYTES
    with prepared(looping) as preparation:

        async def ask_all() -> None:
            # Those that have taken a while leave their places to the next ones.
            await asyncio.gather(*(preparation.prepare(CHATS, [body]) for _ in range(8)))

        asyncio.run(ask_all())
        wait_for(lambda: 1 <= len(children_of(preparation)) <= 4, 5)


def test_processes_end_with_the_server_however_it_ends(tmp_path: Path, files) -> None:
    script = tmp_path / "server.py"
    script.write_text(
        "import asyncio, sys, time\n"
        "from pathlib import Path\n"
        "from soloist.server.preparation.pool import Preparation\n"
        "from soloist.server.preparation.jobs import CHATS\n"
        "from soloist.text.processor import Processor, ProcessorFiles\n"
        "folder, template, body = sys.argv[1:]\n"
        "files = ProcessorFiles(Path(folder), 8192, 2048, {'default': template})\n"
        "made = Preparation(Processor(files), ('gpt',))\n"
        "made.start()\n"
        "print('ready', flush=True)\n"
        "asyncio.run(made.prepare(CHATS, [body.encode()]))\n"
    )
    looping = CHAT | {"chat_template_kwargs": {"loops": True}}
    import subprocess
    import sys

    command = [sys.executable, str(script), str(files.folder), TEMPLATE, orjson.dumps(looping)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ) as server:
        assert server.stdout.readline() == b"ready\n"
        process = psutil.Process(server.pid)
        wait_for(lambda: len(process.children(recursive=True)) == 2)
        left = process.children(recursive=True)
        server.kill()
    _, alive = psutil.wait_procs(left, timeout=5)
    assert not alive, "a loop does not outlive the server"


def test_a_request_is_forgotten_after_its_time_even_where_the_machine_is_busy(
    files, monkeypatch
) -> None:
    monkeypatch.setattr(pool_module, "wall_s", lambda _: 0.3)
    looping = ProcessorFiles(files.folder, files.vocab_size, 2048, {"default": TEMPLATE})
    body = orjson.dumps(CHAT | {"chat_template_kwargs": {"loops": True}})
    with prepared(looping) as preparation:
        start = time.monotonic()
        problem = ask(preparation, body, CHATS)
        assert isinstance(problem, Problem)
        assert problem.code == "too_costly"
        assert time.monotonic() - start < 2


def test_tools_for_a_template_without_calls_are_refused(files) -> None:
    without = ProcessorFiles(files.folder, files.vocab_size, 2048, {"default": "{{ messages }}"})
    tools = [{"type": "function", "function": {"name": "f"}}]
    problem = told(Processor(without), CHATS, CHAT | {"tools": tools})
    assert (problem.status, problem.param) == (400, "tools")
    assert "no tool calls that Soloist can read" in problem.message


def test_bodies_on_their_way_take_no_more_than_told() -> None:
    size = 2**20
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {size}\r\n\r\n"
    ).encode()
    with running(lambda _: scripted(Scripted()), most_body_bytes=size) as server:
        wait_until_ready(server)
        port = int(server.url.rpartition(":")[2])
        halves = [socket.create_connection(("127.0.0.1", port)) for _ in range(MOST_LARGEST)]
        for half in halves:
            half.sendall(head + b" " * (size - 100))
        wait_for(lambda: server.host.bodies.num_bytes == MOST_LARGEST * (size - 100))
        reply = httpx2.post(f"{server.url}/v1/completions", json=TEXT | {"prompt": "x" * 2000})
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "busy"
        for half in halves:
            half.close()
        wait_for(lambda: not server.host.bodies.num_bytes)
        assert httpx2.post(f"{server.url}/v1/completions", json=TEXT).status_code == 200


def test_a_full_queue_is_told_before_any_work_is_done() -> None:
    looping = scripted(Scripted(tokens_per_s=100), template=TEMPLATE)
    with running(lambda _: looping, most_waiting=0) as server:
        wait_until_ready(server)
        ask = TEXT | {"max_tokens": 2000, "ignore_eos": True, "stream": True}
        with ExitStack() as streams:
            for _ in range(8):
                opened = httpx2.stream("POST", f"{server.url}/v1/completions", json=ask)
                streams.enter_context(opened)
            start = time.monotonic()
            body = CHAT | {"chat_template_kwargs": {"loops": True}}
            reply = httpx2.post(f"{server.url}/v1/chat/completions", json=body)
            assert reply.status_code == 429
            assert time.monotonic() - start < 1


def test_the_end_does_not_wait_for_the_beginning(files) -> None:
    preparation = Preparation(Processor(files), ("gpt",))
    errors: list[Exception] = []

    def start() -> None:
        try:
            preparation.start()
        except PreparationFailed as error:
            errors.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    wait_for(lambda: preparation._process is not None)
    began = time.monotonic()
    preparation.close()
    assert time.monotonic() - began < 1.5
    thread.join(5)
    assert not thread.is_alive()
    assert preparation._process.returncode is not None
