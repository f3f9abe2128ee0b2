"""With an engine that says tokens faster than any model, the server loses none and costs little."""

import email
import json
import shlex
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import pytest

from server.running import Scripted, etude, running, scripted, wait_until_ready
from soloist.engine.executor import Picked
from soloist.engine.request import Request

pytestmark = pytest.mark.timed

TEXT = "def add(first, second):\n    total = first + second\n    return total\n\n"

# Whatever else the machine does makes a try slower, never quicker.
TRIES = 15
# A millisecond can be judged only where a fixed piece of Python takes no longer than this, and a
# varied one after a pause at most so many times as long as over and over: elsewhere others use the
# cores or the caches, and the first token took 1.0 to 1.5 ms more than the engine.
JUDGED_WORK_S = 0.0014
JUDGED_COLD = 2.5
MOST_SHARE = 0.25  # of a core, for a server's streams
MAIL = "From: a@b.c\nTo: d@e.f\nContent-Type: text/plain; charset=utf-8\n\nbody\n"


def work_s() -> float:
    """How long this machine takes now for a fixed piece of Python."""
    took = []
    for _ in range(8):
        start, words = time.perf_counter(), {}
        for i in range(20_000):
            words[i % 97] = str(i)
        took.append(time.perf_counter() - start)
    return min(took)


def varied_s() -> float:
    """For one that touches much code once."""
    start = time.perf_counter()
    email.message_from_string(MAIL).get_content_type()
    textwrap.wrap("some words to be wrapped " * 4, 30)
    shlex.split("a 'b c' d --e=f")
    json.dumps(json.loads('{"a": [1, 2, {"b": null}], "c": "d"}'), indent=1)
    return time.perf_counter() - start


def is_quiet() -> bool:
    """Whether a millisecond can be judged now."""
    hot, cold = min(varied_s() for _ in range(100)), []
    for _ in range(20):
        time.sleep(0.005)
        cold.append(varied_s())
    return work_s() <= JUDGED_WORK_S and median(cold) <= JUDGED_COLD * hot


class Watched(Scripted):
    """Keeps how long it takes for each first token."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)
        self.read_took: list[float] = []

    def read(self, running: Request) -> Picked:
        picked = super().read(running)
        self.read_took.append(self.first - self.asked)
        return picked


def ask(script: str, *arguments: str) -> list:
    """What a client in another process found."""
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as client:
        assert client.stdout.readline() == "ready\n"
        out, _ = client.communicate("go\n", timeout=60)
    return json.loads(out)


@contextmanager
def served(executor: Scripted, num_tokens: int) -> Iterator[tuple[Callable, threading.Thread]]:
    """A way to read streams with a client in another process, and the HTTP thread."""
    known = set(threading.enumerate())
    with running(lambda _: scripted(executor, num_tokens + 100)) as server:
        wait_until_ready(server)
        new = [t for t in threading.enumerate() if t not in known]
        (http,) = [t for t in new if t.name.startswith("Thread")]
        port = server.url.rpartition(":")[2]

        def read(streams: int) -> list[dict]:
            return ask("reader.py", port, str(streams), str(num_tokens), "1")

        yield read, http


def cpu_s(thread: threading.Thread) -> float:
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def require_small_share(count: int, tokens_per_s: float, num_tokens: int) -> None:
    """The HTTP thread takes less than a quarter of a core, or as many cycles of a slower one."""
    bound = min(0.9, MOST_SHARE * max(1.0, work_s() / JUDGED_WORK_S))
    assert least_share(count, tokens_per_s, num_tokens, bound) < bound


def least_share(count: int, tokens_per_s: float, num_tokens: int, bound: float) -> float:
    """CPU share of the HTTP thread while streams run: of several tries, the least."""
    executor = Scripted(TEXT, tokens_per_s)
    script = executor.script
    ids = [script[i % len(script)] for i in range(num_tokens)]
    wanted = etude().tokenizer.decode(ids)
    least = 1.0
    with served(executor, num_tokens) as (read, http):
        for _ in range(TRIES):
            before = cpu_s(http)
            answers = read(count)
            # Of the time that the streams should take; where they took longer it counts as well.
            share = (cpu_s(http) - before) / (num_tokens / tokens_per_s)
            assert all(answer["text"] == wanted for answer in answers), "nothing is lost"
            # Written by time, not by token: about one piece a millisecond.
            assert all(answer["pieces"] <= num_tokens / 2 for answer in answers)
            least = min(least, share)
            if least < bound:
                break
    return least


def test_one_stream_of_10_000_tokens_a_second() -> None:
    require_small_share(1, 10_000, 8000)


def test_eight_streams_of_2_000_tokens_a_second() -> None:
    require_small_share(8, 2000, 2000)


def test_the_server_adds_less_than_a_millisecond_to_the_first_token() -> None:
    """Beside the engine: parsing, template, tokens, threads and sockets."""
    executor, judged = Watched(TEXT, 1000, read_s=0.005), list[float]()
    with running(lambda _: scripted(executor, 103)) as server:
        wait_until_ready(server)
        for _ in range(TRIES):
            was_quiet = is_quiet()
            executor.read_took.clear()
            waited = ask("waiter.py", server.url.rpartition(":")[2], "40")
            took = zip(waited, executor.read_took, strict=True)
            delay = min(first_s - read_s for first_s, read_s in took)
            if delay < 0.001:
                return
            if was_quiet and is_quiet():
                judged.append(delay)
    if not judged:
        pytest.skip(f"{delay * 1e3:.2f} ms on a machine that was never quiet enough to tell")
    pytest.fail(f"at best {min(judged) * 1e3:.2f} ms")
