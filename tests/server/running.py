"""A server in this process, on a real port; and an executor that says what it is told to."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from soloist.engine import Engine, EngineConfig
from soloist.engine.executor import Executor, Outcome, Picked
from soloist.engine.request import Request
from soloist.errors import RequestError
from soloist.sampling.constraint import has_bit
from soloist.server.config import ServerConfig
from soloist.server.serve import Server

KEY = "sk-test"
CONFIG = ServerConfig(names=("etude-draft", "gpt"), port=0, shutdown_s=1)


@cache
def etude() -> Engine:
    """What the server of most tests runs; its executor is the server's alone."""
    return load_etude()


@cache
def oracle() -> Engine:
    """The same model, for answers to compare with."""
    return load_etude()


def load_etude() -> Engine:
    asked = EngineConfig(
        "etude-draft", device="cpu", context_tokens=2048, sequences=4, keeps_prefixes=True,
        measures_bandwidth=True,
    )  # fmt: skip
    return Engine.load(asked)


def scripted(
    executor: "Scripted", context_tokens: int = 4096, template: str | None = None
) -> Engine:
    """The same tokenizer before an executor without a model; its template, or another one."""
    real = etude()
    roomy = replace(real.resolved, context_tokens=context_tokens)
    templates = None if template is None else {"default": template}
    return Engine(real.config, executor, roomy, real.report.folder, real.report, templates)


TOOLS_TEMPLATE = (
    "{% for t in tools or [] %}<tool_call> {{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }} {{ m.reasoning_content }} "
    "{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}\n{% endfor %}"
    "{% if think %}<think>\n{% endif %}"
)


def with_tools(
    executor: "Scripted", context_tokens: int = 4096, template: str = TOOLS_TEMPLATE
) -> Engine:
    """An engine whose template knows tools and reasoning."""
    return scripted(executor, context_tokens, template)


class Scripted(Executor):
    """Makes the tokens of a text again and again, at a pace.

    Attributes:
        asked, first: when the latest request was to be read, and when its first token was known.
        num_open: sequences.
    """

    max_running = 8

    def __init__(
        self,
        text: str = "def f(x):\n    return x\n",
        tokens_per_s: float = 1e9,
        read_s: float = 0,
        *,
        ends: bool = False,
    ):
        self.script = etude().tokenizer.encode(text)
        if ends:
            self.script += sorted(etude().tokenizer.eos_ids)[:1]
        self.pace_s, self.read_s = 1 / tokens_per_s, read_s
        self.num_open = 0
        self.asked = self.first = 0.0
        self.fault: Exception | None = None
        self._stop = False

    def open(self, request: Request) -> bool:
        assert request.prompt_scores is None, "the script has no scores"
        self.num_open += 1
        return True

    def read(self, running: Request) -> Picked | None:
        self.asked = time.perf_counter()
        self._check()
        if self.read_s:
            time.sleep(self.read_s)
        self.first = time.perf_counter()
        running.num_read = running.num_to_read
        return self._next(running)

    def rounds(self, running: Sequence[Request], most: int) -> Generator[list[Outcome], None, None]:
        self._stop = False
        due = time.perf_counter()
        for _ in range(min(most, *(r.num_wanted for r in running))):
            due += self.pace_s
            if (left := due - time.perf_counter()) > 0:
                time.sleep(left)
            self._check()
            yield [self._outcome(r) for r in running]
            if self._stop:
                return

    def _outcome(self, running: Request) -> Outcome:
        try:
            return self._next(running)
        except RequestError as error:
            return error

    def _next(self, running: Request) -> Picked:
        token_id = self.script[len(running.sampler.output_ids) % len(self.script)]
        allowed = running.sampler.allowed()
        if allowed is not None and not has_bit(allowed, token_id):
            word = int(np.flatnonzero(allowed)[0])
            lowest = int(allowed[word]) & -int(allowed[word])
            token_id = 32 * word + lowest.bit_length() - 1
        running.sampler.observe(token_id)
        return Picked(token_id)

    def _check(self) -> None:
        if self.fault is not None:
            raise self.fault

    def stop(self) -> None:
        self._stop = True

    def free(self, _: Request) -> None:
        self.num_open -= 1


@contextmanager
def running(
    load: Callable[..., Engine], config: ServerConfig = CONFIG, **changed: object
) -> Iterator[Server]:
    server = Server(load, replace(config, **changed))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.host.stop()
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the server ends"
        ready = server.host._ready
        assert ready is None or not ready.loop._thread.is_alive(), "and leaves no thread"


def wait_until_ready(server: Server) -> Server:
    wait_for(lambda: server.started and not server.host.is_loading)
    return server


def wait_for(what: Callable[[], bool], seconds: float = 20) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "it does not happen"
        time.sleep(0.002)


def is_idle(server: Server) -> bool:
    load = server.host.ready().loop.load
    return load.num_running == load.num_waiting == 0 and not server.host.running


def serve_in_a_process(
    model: str, *options: str, module: str = "soloist"
) -> tuple[subprocess.Popen[str], str]:
    """`soloist serve` that is ready, and its address."""
    process, url = start_in_a_process(model, *options, module=module)
    assert process.stderr is not None
    for line in process.stderr:
        if line.strip() == "ready":
            break
    return process, url


def start_in_a_process(
    model: str, *options: str, module: str = "soloist"
) -> tuple[subprocess.Popen[str], str]:
    """`soloist serve` that loads, and its address; `module` is what plays it."""
    command = [sys.executable, "-m", module, "serve", model, "--port", "0", *options]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=environment_with_tests()
    )
    assert process.stderr is not None
    url = process.stderr.readline().split(" at ")[1].split("/v1")[0]
    return process, url


def environment_with_tests() -> dict[str, str]:
    """This process's environment, for one that plays `soloist` with modules of this folder."""
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
