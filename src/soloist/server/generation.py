"""One HTTP request's answers, from the engine's thread to the event loop.

Whatever ends the HTTP side (a client that goes, DELETE, a time limit, shutdown) ends the engine's
side at the next token.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

from starlette.requests import Request as HttpRequest
from starlette.types import Receive

from soloist.engine import Chunk, Completion, Event, Failure, Request, Scored
from soloist.errors import SoloistError
from soloist.sampling.logprobs import TokenLogprobs
from soloist.server.bell import Bell
from soloist.server.host import Host, Ready
from soloist.server.preparation.prepared import PreparedPrompt
from soloist.server.problems import Problem, invalid, problem_of
from soloist.server.tracing import RequestTrace
from soloist.text.grammar import Grammar

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Delta:
    """What came of one answer since the last time it was looked at.

    Attributes:
        index: which answer.
        text: new text, possibly none.
        token_ids: new tokens.
        logprobs: where they were asked for, one for each token that is shown.
        num_made: tokens so far.
        num_forced, num_drafted: of these; see `Chunk`.
        end: set with the last delta.
        scored: set once, before tokens or with the first ones, where the prompt is scored.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    num_made: int
    num_forced: int
    num_drafted: int
    end: Completion | None
    scored: Scored | None = None


class Generation:
    """Running answers; leaving the context ends those that still run.

    Args:
        host: of the engine.
        request_id: by which DELETE finds it.
        asked: one for each answer.
        accepted: when the HTTP request came, by `time.perf_counter`.
        trace: of the request.
        grammar: that every answer keeps to.

    Attributes:
        ends: of the answers that have theirs, also of those that were cancelled.

    Raises:
        SoloistError: one of them is not taken; then none is.
        Problem: there are more of them than can ever be taken.
    """

    def __init__(
        self,
        host: Host,
        ready: Ready,
        request_id: str,
        asked: Sequence[PreparedPrompt],
        accepted: float,
        trace: RequestTrace,
        grammar: Grammar | None = None,
    ) -> None:
        self._host, self._request_id, self._trace = host, request_id, trace
        self._loop, self._woken = asyncio.get_running_loop(), asyncio.Event()
        self._cut: Problem | None = None
        self._ends_early = False
        self._bandwidth_gb_per_s = ready.engine.report.bandwidth_gb_per_s
        self.requests: list[Request] = []
        self.ends: dict[int, Completion] = {}
        # Knows nothing of the generation: a circle would keep grammars until it is looked for.
        listen = partial(_ring, host.bell, self._woken, request_id)
        trace.asked(request_id, [one.prompt_ids for one in asked], [one.params for one in asked])
        try:
            load, count = ready.loop.load, len(asked)
            if count > (most := load.max_running + load.most_waiting):
                # Coming back later would not help: there will never be so many places.
                raise invalid("n", f"{count} answers in all (allowed: at most {most}, see --queue)")
            for one in asked:
                self.requests.append(
                    ready.loop.submit(
                        one.prompt_ids,
                        one.params,
                        top_logprobs=one.top_logprobs,
                        shown_ids=one.shown_ids,
                        listen=listen,
                        accepted=accepted,
                        constraint=None if grammar is None else grammar.start(),
                        scores=one.scores,
                        prediction_ids=one.prediction_ids,
                    )
                )
        except (Problem, SoloistError) as error:
            self._cancel()
            trace.close(problem_of(error).word)
            raise

    async def __aenter__(self) -> Self:
        self._host.running[self._request_id] = self
        left_s = self._host.config.request_s
        told = f"the request took longer than {left_s:.0f} s and was aborted"
        problem = Problem(504, told, code="time_limit")
        self._timer = self._loop.call_later(left_s, self.cut, problem)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        del self._host.running[self._request_id]
        self._cancel()
        failed = None if error is None else type(error).__name__
        self._trace.close(failed if self._cut is None else self._cut.word)
        self._cut = None  # its traceback leads back to here

    def cut(self, problem: Problem) -> None:
        """End all answers; the client is told why."""
        self._cut = self._cut or problem
        self._cancel()

    def end_early(self) -> None:
        """End all answers at the next token, as complete ones."""
        self._ends_early = True
        self._cancel()

    async def deltas(self) -> AsyncIterator[Delta]:
        """What comes, as it comes, until every answer has its end.

        Raises:
            Problem: an answer failed or was cut.
        """
        running = dict(enumerate(self.requests))
        counts = dict.fromkeys(running, (0, 0, 0))
        while running:
            await self._woken.wait()
            self._woken.clear()
            for index, one in list(running.items()):
                if not (events := one.take()):
                    continue
                if isinstance(last := events[-1], Failure):
                    self._cut = problem_of(last.error)
                    raise self._cut
                delta = _merged(index, events, *counts[index])
                counts[index] = delta.num_made, delta.num_forced, delta.num_drafted
                if delta.end is not None:
                    del running[index]
                    self.ends[index] = delta.end
                    self._count(delta.end)
                yield delta

    def num_cached(self, prompts: int = 1) -> int:
        """Cached tokens of all prompts that were read so far; answers to one lie side by side."""
        return sum(one.num_cached for one in self.requests[:: len(self.requests) // prompts])

    def _count(self, completion: Completion) -> None:
        self._host.metrics.count(completion, self._bandwidth_gb_per_s)
        self._trace.ended(completion)
        t = completion.timings
        speed = t.decode_tokens_per_s
        log.info(
            "%s · %d prompt (%d cached) + %d new tokens · queue %.1f ms · TTFT %.1f ms · "
            "decode %s tokens/s · %s",
            self._request_id, t.prompt_tokens, t.cached_tokens, t.new_tokens, t.queue_s * 1e3,
            t.ttft_s * 1e3, "–" if speed is None else f"{speed:.1f}", completion.finish_reason,
        )  # fmt: skip
        if completion.finish_reason == "cancelled" and (self._cut or not self._ends_early):
            raise self._cut or Problem(503, "the server is shutting down; the answer was cut short")

    def _cancel(self) -> None:
        for one in self.requests:
            one.cancel()


def _ring(bell: Bell, woken: asyncio.Event, request_id: str) -> None:
    """Say in the engine's thread that there is something to take."""
    try:
        bell.ring(woken.set)
    except RuntimeError:  # the event loop has ended, and nobody listens
        log.debug("%s: the event loop has ended", request_id)


def _merged(
    index: int, events: Sequence[Event], num_made: int, num_forced: int, num_drafted: int
) -> Delta:
    last = events[-1]
    end = last if isinstance(last, Completion) else None
    chunks = [event for event in events if isinstance(event, Chunk)]
    ids = tuple([token_id for chunk in chunks for token_id in chunk.token_ids])
    logprobs = tuple([one for chunk in chunks for one in chunk.logprobs])
    text = "".join([chunk.text for chunk in chunks])
    scored = next((event for event in events if isinstance(event, Scored)), None)
    num_made += len(ids)
    num_forced += sum(chunk.num_forced for chunk in chunks)
    num_drafted += sum(chunk.num_drafted for chunk in chunks)
    return Delta(index, text, ids, logprobs, num_made, num_forced, num_drafted, end, scored)


@dataclass(slots=True)
class Whole:
    """One answer at its end."""

    text: str
    logprobs: tuple[TokenLogprobs, ...]
    end: Completion
    scored: Scored | None = None


async def collect(request: HttpRequest, generation: Generation) -> list[Whole]:
    """All answers at their end; a client that goes away ends them.

    Raises:
        Problem: 499 where the client went away, or why an answer failed.
    """
    watcher = watch(request.receive, generation)
    shown: dict[int, list[TokenLogprobs]] = {}
    ends: dict[int, Completion] = {}
    scored: dict[int, Scored | None] = {}
    try:
        async with generation:
            async for delta in generation.deltas():
                shown.setdefault(delta.index, []).extend(delta.logprobs)
                scored[delta.index] = delta.scored or scored.get(delta.index)
                if delta.end is not None:
                    ends[delta.index] = delta.end
    finally:
        watcher.cancel()
    return [Whole(ends[i].text, tuple(shown[i]), ends[i], scored[i]) for i in sorted(ends)]


def watch(receive: Receive, generation: Generation) -> asyncio.Task[None]:
    """Cut the generation as soon as the client goes away; the caller cancels the task."""

    async def look() -> None:
        # The server tells nobody by itself who is not writing.
        while (await receive())["type"] != "http.disconnect":
            pass
        generation.cut(Problem(499, "the client went away"))

    return asyncio.create_task(look())
