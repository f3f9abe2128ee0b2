"""`bench neighbours`: what other clients' requests do to a stream of any OpenAI-compatible server.

One greedy stream is read alone, and then beside one neighbour of each kind. Neighbours send from a
process of their own, and another one asks for /health and reads the server's memory, so that the
client that measures does nothing but read its stream.
"""

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from threading import Thread
from time import sleep
from typing import Any

from soloist.bench import record, rows
from soloist.bench.client import Client, Refused, Target
from soloist.bench.dialect import Server, meet
from soloist.bench.observer import Sight, Task
from soloist.bench.process_memory import TreeMemory
from soloist.bench.sender import NEIGHBOURS, Order, Outcome
from soloist.bench.sizes import require_at_least
from soloist.bench.stream import Answer, arrivals, decode_span, gaps_s
from soloist.bench.text import python_characters
from soloist.errors import ServerFailed, SettingError

ALONE = "none"
_PROMPT_CHARACTERS = 400
_LONG_PROMPT_TOKENS = 3000
# A neighbour comes when this part of the stream is there.
_COMES_AT = 0.2
# What a smaller body costs is not in proportion to its bytes.
_WEIGHED_BYTES = 1_000_000
# A server may give memory back a little later.
_SETTLE_S = 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Attributes:
        target: the server; its `api` is the stream's, neighbours use completions.
        kinds: of neighbours, names of `NEIGHBOURS`; empty for all.
        pid: of the server, where it runs on this machine and its memory is wanted; else None.
        max_tokens: of the stream.
        runs: for each kind.
        patience_s: a neighbour waits so long for its answer.
    """

    target: Target
    kinds: tuple[str, ...]
    pid: int | None
    max_tokens: int
    runs: int
    patience_s: float


@dataclass(frozen=True, slots=True)
class _Run:
    """One neighbour, or none, and the streams that were read until it had its answer.

    Attributes:
        answers: of the streams.
        error: why the last one broke; None where it did not.
        outcome: of the neighbour; None without one.
    """

    answers: tuple[Answer, ...]
    error: str | None
    outcome: Outcome | None


def measure(plan: Plan) -> list[rows.NeighboursRow]:
    """A row for the stream alone, and one for each kind of neighbour.

    The row of a neighbour that the server did not survive is the last one; `unmeasured` tells which
    kinds that leaves.

    Raises:
        SettingError: an unknown kind, a process that cannot be read, sizes that cannot be measured.
        ServerFailed: the server cannot be reached, or refuses the stream without neighbours.
    """
    _check(plan)
    process = None if plan.pid is None else TreeMemory(plan.pid).name
    with Client(plan.target) as client:
        server = meet(client)
        length = client.context_tokens(server.model)
        prompt = python_characters(_PROMPT_CHARACTERS)
        first = server.ask(prompt, plan.max_tokens)
        if not first.text:
            raise ServerFailed(client.url, "it answered without a single token")
        stage = _Stage(plan, server, prompt, first, length, process)
        made = [stage.row(ALONE, None)]
        for kind in plan.kinds or tuple(NEIGHBOURS):
            made.append(stage.row(kind, made[0]))
            if made[-1].stream_errors and not stage.is_alive():
                break
    return made


def unmeasured(plan: Plan, made: Sequence[rows.NeighboursRow]) -> tuple[str, ...]:
    """Kinds that were asked for, but not come to, because the server is gone."""
    known = {row.neighbour for row in made}
    return tuple(kind for kind in plan.kinds or NEIGHBOURS if kind not in known)


def _check(plan: Plan) -> None:
    require_at_least(("--max-tokens", plan.max_tokens, 2), ("--runs", plan.runs, 1))
    if plan.patience_s <= 0:
        raise SettingError("--patience", plan.patience_s, "above 0 seconds")
    for kind in plan.kinds:
        if kind not in NEIGHBOURS:
            raise SettingError("--only", kind, ", ".join(NEIGHBOURS))


@dataclass(frozen=True, slots=True)
class _Stage:
    """A server that was met, and the stream that is read again and again."""

    plan: Plan
    server: Server
    prompt: str
    first: Answer
    context_tokens: int | None
    process: str | None

    def row(self, kind: str, alone: rows.NeighboursRow | None) -> rows.NeighboursRow:
        """Measure beside one kind of neighbour; `alone` is None where this is the stream alone."""
        health = f"{self.server.client.url.removesuffix('/v1')}/health"
        with _observed(Task(health, self.plan.pid)) as found:
            if kind == ALONE:
                runs = [_Run(*self._stream(), None) for _ in range(self.plan.runs)]
            else:
                with _Neighbour(self._order(kind)) as neighbour:
                    runs = [self._beside(neighbour) for _ in range(self.plan.runs)]
            sleep(_SETTLE_S)
        (sight,) = found
        return _row(self, kind, runs, sight, alone)

    def is_alive(self) -> bool:
        """Whether the server still answers."""
        try:
            self.server.ask(self.prompt, 1)
        except (Refused, ServerFailed):
            return False
        return True

    def _stream(self) -> tuple[tuple[Answer, ...], str | None]:
        """One answer, or none and why."""
        try:
            return (self.server.ask(self.prompt, self.plan.max_tokens),), None
        except (Refused, ServerFailed) as error:
            return (), str(error)

    def _beside(self, neighbour: "_Neighbour") -> _Run:
        answers: tuple[Answer, ...] = ()
        error = None
        neighbour.come(_COMES_AT * self.first.end_s)
        while error is None and (not answers or not neighbour.has_ended):
            more, error = self._stream()
            answers += more
        return _Run(answers, error, neighbour.outcome())

    def _order(self, kind: str) -> Order:
        # One token is left for the answer.
        fits = (self.context_tokens or _LONG_PROMPT_TOKENS + 1) - 1
        return Order(
            url=self.server.client.url,
            model=self.server.model,
            key=self.plan.target.key,
            kind=kind,
            prompt_tokens=min(_LONG_PROMPT_TOKENS, fits),
            patience_s=self.plan.patience_s,
        )


class _Helper:
    """A process of this package that speaks in lines."""

    def __init__(self, module: str, task: Task | Order) -> None:
        self.process = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-m", f"soloist.bench.{module}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.write(json.dumps(asdict(task)))
        if self.read() != "ready\n":
            raise RuntimeError(f"soloist.bench.{module} did not start")

    def write(self, line: str) -> None:
        assert self.process.stdin is not None, "a pipe"
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def read(self) -> str:
        assert self.process.stdout is not None, "a pipe"
        return self.process.stdout.readline()

    def end(self) -> str:
        """Close its stdin, and what it writes then."""
        told, _ = self.process.communicate()
        return told

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


class _Neighbour:
    """A process that sends one kind of request, once for each `come`."""

    def __init__(self, order: Order) -> None:
        self._helper = _Helper("sender", order)
        self._waiter: Thread | None = None
        self._line = ""

    def __enter__(self) -> "_Neighbour":
        return self

    def __exit__(self, *_: object) -> None:
        self._helper.kill()

    def come(self, delay_s: float) -> None:
        """Send the request after so many seconds."""

        def wait() -> None:
            self._line = self._helper.read()

        self._helper.write(str(delay_s))
        self._waiter = Thread(target=wait, daemon=True)
        self._waiter.start()

    @property
    def has_ended(self) -> bool:
        """Whether the request has its answer, or none any more."""
        assert self._waiter is not None, "it has come"
        return not self._waiter.is_alive()

    def outcome(self) -> Outcome:
        """How the request ended, once it has."""
        assert self._waiter is not None, "it has come"
        self._waiter.join()
        if not self._line:
            raise RuntimeError("soloist.bench.sender ended early")
        told: dict[str, Any] = json.loads(self._line)
        return Outcome(**told)


@contextmanager
def _observed(task: Task) -> Iterator[list[Sight]]:
    """Look at the server meanwhile; the list has what was seen afterwards."""
    helper, found = _Helper("observer", task), list[Sight]()
    try:
        yield found
        found.append(Sight(**json.loads(helper.end())))
    finally:
        helper.kill()


def _row(
    stage: _Stage, kind: str, runs: Sequence[_Run], sight: Sight, alone: rows.NeighboursRow | None
) -> rows.NeighboursRow:
    plan, server = stage.plan, stage.server
    answers = [answer for run in runs for answer in run.answers]
    found = [arrivals(answer, server.counting) for answer in answers]
    spans = [decode_span(of_one) for of_one in found]
    speeds = [span.tokens_per_s for span in spans if span is not None]
    speed = rows.Spread.of(speeds) if speeds and len(speeds) == len(answers) else None
    gaps = [gap * 1e3 for of_one in found for gap in gaps_s(of_one)]
    outcomes = [run.outcome for run in runs if run.outcome is not None]
    num_bytes = max((outcome.num_bytes for outcome in outcomes), default=0)
    taken = None
    if (
        sight.peak_bytes is not None
        and sight.before_bytes is not None
        and num_bytes >= _WEIGHED_BYTES
    ):
        taken = round((sight.peak_bytes - sight.before_bytes) / num_bytes, 2)
    base = None if alone is None else alone.decode_tokens_per_s
    return rows.NeighboursRow(
        bench="neighbours",
        engine=server.client.name,
        url=server.client.url,
        api=server.client.api,
        shape=server.model,
        neighbour=kind,
        neighbour_bytes=num_bytes,
        prompt_tokens=stage.first.prompt_tokens,
        max_tokens=plan.max_tokens,
        runs=len(runs),
        streams=len(answers),
        counting=server.counting,
        ttft_ms=rows.Spread.of([of_one[0].at_s * 1e3 for of_one in found]) if found else None,
        decode_tokens_per_s=speed,
        share_of_alone=None
        if speed is None or base is None
        else round(median(speeds) / base.median, 3),
        gap_ms=rows.Percentiles.of(gaps) if gaps else None,
        same_text=bool(answers) and all(a.text == stage.first.text for a in answers),
        text_sha256=hashlib.sha256(stage.first.text.encode()).hexdigest()[:16],
        stream_errors=tuple(run.error for run in runs if run.error is not None),
        neighbour_statuses=tuple(outcome.status for outcome in outcomes),
        neighbour_s=rows.Spread.of([o.seconds for o in outcomes], 3) if outcomes else None,
        health_ms=rows.Percentiles.of(sight.health_ms) if sight.health_ms else None,
        health_statuses=tuple(sight.health_statuses),
        process=stage.process,
        memory_before_bytes=sight.before_bytes,
        memory_peak_bytes=sight.peak_bytes,
        memory_after_bytes=sight.after_bytes,
        memory_per_body_byte=taken,
        fields=tuple(sorted(server.fields)),
        **record.origin("httpx2", "psutil"),
    )
