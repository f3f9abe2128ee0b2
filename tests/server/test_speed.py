"""With an engine that says tokens faster than any model, the server loses none and costs little."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from server.running import Scripted, etude, running, scripted, wait_until_ready
from soloist.engine.executor import Picked
from soloist.engine.request import Request
from timing import judged, slowness

pytestmark = pytest.mark.timed

TEXT = "def add(first, second):\n    total = first + second\n    return total\n\n"

TRIES = 15
MOST_SHARE = 0.25  # of a core, for a server's streams


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
    executor = Scripted(TEXT, tokens_per_s)
    script = executor.script
    ids = [script[i % len(script)] for i in range(num_tokens)]
    wanted = etude().tokenizer.decode(ids)
    bound = min(0.9, MOST_SHARE * slowness())
    with served(executor, num_tokens) as (read, http):

        def share() -> float:
            before = cpu_s(http)
            answers = read(count)
            assert all(answer["text"] == wanted for answer in answers), "nothing is lost"
            # Written by time, not by token: about one piece a millisecond.
            assert all(answer["pieces"] <= num_tokens / 2 for answer in answers)
            # Of the time that the streams should take; where they took longer it counts as well.
            return (cpu_s(http) - before) / (num_tokens / tokens_per_s)

        def check(share: float) -> None:
            assert share < bound

        judged(share, check, TRIES)


def test_one_stream_of_10_000_tokens_a_second() -> None:
    require_small_share(1, 10_000, 8000)


def test_eight_streams_of_2_000_tokens_a_second() -> None:
    require_small_share(8, 2000, 2000)


def test_the_server_adds_less_than_a_millisecond_to_the_first_token() -> None:
    """Beside the engine: parsing, template, tokens, threads and sockets."""
    executor = Watched(TEXT, 1000, read_s=0.005)
    with running(lambda _: scripted(executor, 103)) as server:
        wait_until_ready(server)

        def delay_s() -> float:
            executor.read_took.clear()
            waited = ask("waiter.py", server.url.rpartition(":")[2], "40")
            took = zip(waited, executor.read_took, strict=True)
            return min(first_s - read_s for first_s, read_s in took)

        def check(delay_s: float) -> None:
            assert delay_s < 0.001

        judged(delay_s, check, TRIES)
