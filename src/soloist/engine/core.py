"""What drives requests: every step of the scheduler, done on an executor, and what comes of it.

There is no other way from a request to its tokens. `EngineLoop` does the steps in a thread of its
own; `EngineCore.run` does those of one request in the thread that waits for the answer.

Requests join, leave and are cancelled between two steps. The executor is only touched by the thread
that does the steps, and never under the lock: who asks from outside does not wait for the device.
"""

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing

from soloist.engine.events import Chunk, Event, Failure
from soloist.engine.executor import Executor, Outcome, Picked, Verified, is_lost, own_failure
from soloist.engine.request import Request
from soloist.engine.scheduler import Decode, Join, Read, Scheduler, Step
from soloist.engine.traffic import Burst, Traffic
from soloist.errors import MemoryNotFreed, RequestError, SoloistError, StepFailed
from soloist.kv.prefix import Divergence
from soloist.speculation import Archive
from soloist.text import Tokenizer

log = logging.getLogger(__name__)

# Prompts that differ earlier have little in common but their template.
_LONG_PREFIX = 256
# On either side of where they differ.
_SHOWN_TOKENS = 12

# How much of the mean duration of requests the latest one decides.
_NEWEST_SHARE = 0.2

# What is being done, for people.
WAITING = "waiting for a request"
_BEGINNING, _READING, _DECODING = "starting a request", "reading a prompt", "decoding"
_PREEMPTING, _HANDING_OUT = "preempting a request", "delivering an answer"


class EngineCore:
    """Runs requests side by side on one executor, a step at a time.

    `submit` and `wake` may be called from any thread, all else from the one that does the steps.

    Args:
        executor: used by this alone until the last step is done.
        tokenizer: shows where prompts differ, in the log; None shows nothing.
        traffic: what tokens make the device read; None counts nothing.
        most_waiting: requests that may wait for others to end.
        flush_s: how often listeners are told of new tokens, all at once; 0 for each token.

    Attributes:
        archive: earlier answers, for drafts; None where the executor looks nothing up.
        scheduler: says which step is next.
        changed: guards it, `requests` and `has_news`; notified where there may be a step.
        requests: that are not over, in the order in which they came.
        has_news: whether rounds should end. Read without the lock once a round. Any thread may set
            it; only `next` clears it, before it looks at everything.
        moved_at: the last thing that moved, by `time.perf_counter`; written without the lock.
        doing: the step that is being done, for people.
        mean_s: that a request takes, from acceptance.
        num_preemptions: how often one was preempted for those before it.
    """

    def __init__(
        self,
        executor: Executor,
        tokenizer: Tokenizer | None = None,
        *,
        traffic: Traffic | None = None,
        most_waiting: int = 0,
        flush_s: float = 0.0,
    ) -> None:
        self.executor, self._tokenizer, self._flush_s = executor, tokenizer, flush_s
        self._traffic, self._burst = traffic, Burst(None, ())
        looks_up = executor.drafting is not None and executor.drafting.looks_up
        self.archive = Archive() if looks_up else None
        self.scheduler: Scheduler[Request] = Scheduler(executor.max_running, most_waiting)
        self.changed = threading.Condition()
        self.requests: dict[Request, None] = {}
        self.has_news = False
        self.moved_at, self.doing = time.perf_counter(), WAITING
        self.mean_s, self.num_preemptions = 1.0, 0

    def submit(self, request: Request) -> None:
        """Queue a request; the caller asked whether the scheduler is full."""
        with self.changed:
            if not self.requests:
                self.moved_at = time.perf_counter()
            self.scheduler.submit(request)
            self.requests[request] = None
            request.on_cancel = self.wake
            if self.scheduler.can_join:
                self.has_news = True
            self.changed.notify()

    def wake(self) -> None:
        """End the rounds that run, and look at everything anew."""
        with self.changed:
            self.has_news = True
            self.changed.notify()

    def run(
        self, request: Request, is_cancelled: Callable[[], bool] = lambda: False
    ) -> Generator[Event, None, None]:
        """One request alone: its events as they come, the completion last.

        Closing the iterator ends device work before it returns, so the next request may start.

        Args:
            request: no other is there.
            is_cancelled: asked before every chunk of the prompt and after every round.

        Raises:
            RequestError, DeviceError: the request, or the device, failed.
        """
        self.submit(request)
        try:
            while not request.is_finished:
                if is_cancelled():
                    self.release(request)
                elif (step := self.next()) is not None:
                    with closing(self.do(step)) as rounds:
                        for _ in rounds:
                            yield from _events_of(request)
                            if request.is_finished or is_cancelled():
                                break
                yield from _events_of(request)
        finally:
            if request in self.requests:
                self.release(request)

    def next(self) -> Step[Request] | None:
        """The next step; None where there is nothing to do. Cancelled requests leave.

        Raises:
            MemoryNotFreed: what one of them had cannot be freed.
        """
        with self.changed:
            self.has_news = False
            gone = [request for request in self.requests if request.is_cancelled]
        for request in gone:
            self.release(request)
        with self.changed:
            step = self.scheduler.next()
            if step is not None:
                self.moved_at = time.perf_counter()
            return step

    def do(self, step: Step[Request]) -> Generator[None, None, None]:
        """Do a step; stops after every round. Closing it ends the device's work on rounds.

        Raises:
            Exception: the device is lost, or memory cannot be freed.
        """
        try:
            match step:
                case Join(request):
                    requests, self.doing = (request,), _BEGINNING
                    self._join(request)
                case Read(request):
                    requests, self.doing = (request,), _READING
                    self._read(request)
                case Decode(requests, most):
                    self.doing = _DECODING
                    yield from self._decode(requests, most)
        except Exception as error:  # noqa: BLE001 - a mistake in one step must not end all requests
            self._give_up(requests, error)

    def _give_up(self, requests: Sequence[Request], error: Exception) -> None:
        """A step failed: fail the requests it concerns, and go on.

        Raises:
            Exception: the device is lost, or what they had cannot be freed.
        """
        if is_lost(error):
            raise error
        log.error("%s failed: %d requests are aborted", self.doing, len(requests), exc_info=error)
        self._burst = Burst(None, ())
        for request in requests:
            if request in self.requests:
                self.release(request, StepFailed(self.doing, error))
        try:
            self.executor.check()
        except AssertionError as unbalanced:
            raise MemoryNotFreed(unbalanced) from error

    def _join(self, request: Request) -> None:
        has_joined, is_resumed = self.executor.open(request), request.has_begun
        request.has_begun |= has_joined
        with self.changed:
            if not has_joined:
                self.scheduler.blocked()
                return
            self.scheduler.joined(request)
        if is_resumed:
            return
        if request.num_offloaded:
            log.info(
                "a prompt of %d tokens: %d are fetched from the host's prefix cache",
                len(request.prompt_ids), request.num_offloaded,
            )  # fmt: skip
        if request.divergence is not None:
            self._show(request.prompt_ids, request.divergence)
        request.answer.start(time.perf_counter())

    def _show(self, ids: Sequence[int], divergence: Divergence) -> None:
        """Say where a prompt could have been cached for longer; text only where it is asked for."""
        if (at := divergence.position) < _LONG_PREFIX:
            return
        log.info("a prompt of %d tokens differs from a cached one at token %d", len(ids), at)
        if log.isEnabledFor(logging.DEBUG) and self._tokenizer is not None:
            before, cached = ids[max(0, at - _SHOWN_TOKENS) : at], divergence.cached[:_SHOWN_TOKENS]
            ours = ids[at : at + _SHOWN_TOKENS]
            log.debug("cached: %r", self._tokenizer.decode([*before, *cached]))
            log.debug("now:    %r", self._tokenizer.decode([*before, *ours]))

    def _reserve(self, requests: Sequence[Request]) -> bool:
        """Whether the next step has its pages; if not, one request is preempted."""
        if self.executor.reserve(requests):
            return True
        with self.changed:
            request = self.scheduler.exhausted()
        request.flush()
        try:
            self.executor.preempt(request)
        except Exception as error:  # noqa: BLE001 - it concerns the request that has to wait
            self.doing = _PREEMPTING
            self._give_up([request], error)
            return False
        self.num_preemptions += 1
        log.info("a request is preempted at %d tokens: the KV cache is full", request.position)
        return False

    def _read(self, request: Request) -> None:
        if not self._reserve([request]):
            return
        try:
            picked = self.executor.read(request)
        except RequestError as error:
            self.release(request, error)
            return
        if picked is None and not request.is_read:
            return
        with self.changed:
            self.scheduler.was_read(request)
        now = time.perf_counter()
        request.was_read(now)
        if picked is not None:
            self._take(request, picked, now)
        elif request.answer.finish_reason is not None:
            self._finish(request, now)
        if request.is_finished:
            self.release(request)

    def _decode(self, requests: Sequence[Request], most: int | None) -> Iterator[None]:
        if not self._reserve(requests):
            return
        most = max(r.num_wanted for r in requests) if most is None else most
        told_at = time.perf_counter()
        self._burst = Burst(self._traffic, [r.position + 1 for r in requests])
        with closing(self.executor.rounds(requests, most)) as rounds:
            for outcomes in rounds:
                now = self.moved_at = time.perf_counter()
                self._burst.add_round([_num_columns(outcome) for outcome in outcomes])
                for request, outcome in zip(requests, outcomes, strict=True):
                    if not request.is_finished:
                        self._take(request, outcome, now)
                if now - told_at >= self._flush_s:
                    told_at = now
                    for request in requests:
                        request.flush()
                yield
                if self.has_news:
                    self.executor.stop()
        read_bytes, self._burst = self._burst.num_bytes, Burst(None, ())
        for request in requests:
            request.flush()
            if request.is_finished:
                self.release(request)
            else:
                request.answer.decode_bytes += read_bytes

    def _take(self, request: Request, outcome: Outcome, now: float) -> None:
        """Hand out what a round brought; the pages stay until the rounds are over."""
        try:
            self._hand_out(request, outcome, now)
        except Exception as error:  # noqa: BLE001 - others in this round go on
            request.fail(own_failure(_HANDING_OUT, error))
        if request.is_finished:
            self.has_news = True

    def _hand_out(self, request: Request, outcome: Outcome, now: float) -> None:
        if isinstance(outcome, RequestError):
            request.fail(outcome)
            return
        if outcome is None:
            return
        if isinstance(outcome, Verified):
            num_told = self._put_tokens(request, outcome.picks, outcome.num_accepted, now)
            num_accepted = min(num_told, outcome.num_accepted)
            request.answer.count_draft(outcome.draft, num_accepted)
        else:
            self._put_tokens(request, (outcome,), 0, now)
        if request.answer.finish_reason is not None:
            self._finish(request, now)

    def _put_tokens(
        self, request: Request, picks: Sequence[Picked], num_accepted: int, now: float
    ) -> int:
        """Tell of tokens, as far as the answer goes; of how many picks."""
        for place, picked in enumerate(picks):
            for i, token_id in enumerate(picked.token_ids):
                is_drafted = i == 0 and place < num_accepted
                request.put_token(
                    token_id, picked.logprobs, now, is_forced=i > 0, is_drafted=is_drafted
                )
                if request.answer.finish_reason is not None:
                    return place + 1
        return len(picks)

    def _finish(self, request: Request, now: float) -> None:
        request.answer.decode_bytes += self._burst.num_bytes
        request.finish(now)
        if self.archive is not None:
            self.archive.add(request.sampler.output_ids[: request.answer.num_made])

    def release(self, request: Request, error: SoloistError | None = None) -> None:
        """A request leaves, and what it has is freed; if not finished, it fails or was cancelled.

        Raises:
            MemoryNotFreed: it cannot be freed.
        """
        if request.has_begun:
            try:
                self.executor.free(request)
            except Exception as lost:
                raise (lost if is_lost(lost) else MemoryNotFreed(lost)) from lost
        now = self.moved_at = time.perf_counter()
        with self.changed:
            self.scheduler.leave(request)
            self.requests.pop(request, None)  # `EngineLoop.abandon` may have been here
            if request.has_begun:
                self.mean_s += _NEWEST_SHARE * (now - request.accepted - self.mean_s)
        if request.is_finished:
            return
        if error is None:
            try:
                self._finish(request, now)
            except Exception as mistake:  # noqa: BLE001 - it concerns this request alone
                error = own_failure(_HANDING_OUT, mistake)
        if error is not None:
            request.fail(error)


def tokens_of(
    executor: Executor, request: Request, is_cancelled: Callable[[], bool] = lambda: False
) -> Generator[int, None, None]:
    """The tokens of one request alone; see `EngineCore.run`."""
    with closing(EngineCore(executor).run(request, is_cancelled)) as events:
        for event in events:
            if isinstance(event, Chunk):
                yield from event.token_ids


def _num_columns(outcome: Outcome) -> int:
    """Positions by which a round has brought a request further."""
    if outcome is None:
        return 0
    return len(outcome.picks) if isinstance(outcome, Verified) else 1


def _events_of(request: Request) -> Iterator[Event]:
    for event in request.take():
        if isinstance(event, Failure):
            raise event.error
        yield event
