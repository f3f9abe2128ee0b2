"""The thread that owns the device: it runs what the scheduler says and hands out what comes.

Everything public may be called from any thread. Requests join, leave and are cancelled between two
rounds; the executor is only touched here, and never under the lock: who asks from outside does not
wait for the device.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial

from soloist.engine.answer import Answer
from soloist.engine.events import Event, Failure, Scored
from soloist.engine.executor import (
    CachedTokens,
    Executor,
    Outcome,
    Running,
    is_lost,
    own_failure,
)
from soloist.engine.scheduler import Decode, Join, Read, Scheduler, Step
from soloist.engine.ticket import Ticket
from soloist.engine.traffic import Burst, Traffic
from soloist.errors import (
    EngineStopped,
    MemoryNotFreed,
    QueueFull,
    RequestError,
    ShuttingDown,
    SoloistError,
    StepFailed,
)
from soloist.kv.prefix import Divergence
from soloist.sampling import Sampler, SamplingParams
from soloist.sampling.constraint import Constraint
from soloist.sampling.params import Scores
from soloist.text import Tokenizer

log = logging.getLogger(__name__)

# Prompts that differ earlier have little in common but their template.
_LONG_PREFIX = 256
# On either side of where they differ.
_SHOWN_TOKENS = 12

# How much of the mean duration of requests the latest one decides.
_NEWEST_SHARE = 0.2

# What the engine's thread does, for people.
_WAITING, _BEGINNING = "waiting for a request", "starting a request"
_READING, _DECODING = "reading a prompt", "decoding"
_PREEMPTING, _HANDING_OUT = "preempting a request", "delivering an answer"


@dataclass(eq=False, slots=True)
class _Job:
    """A request inside the loop."""

    ticket: Ticket
    sampler: Sampler
    answer: Answer
    accepted: float
    running: Running | None = None
    is_over: bool = False
    tells_scores: bool = False  # they are still to be told


@dataclass(frozen=True, slots=True)
class Load:
    """How many requests there are.

    Attributes:
        num_running: reading their prompt or decoding.
        num_waiting: in the queue.
        num_columns: how many may run.
        most_waiting: how many may wait.
        num_preemptions: how often one was preempted for those before it.
    """

    num_running: int
    num_waiting: int
    num_columns: int
    most_waiting: int
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """Whether the engine gets on.

    Attributes:
        age_s: since the last thing that moved: a round, a chunk of a prompt, a request that joined
            or left; 0 where there is no request.
        step: what the engine's thread does, for people.
    """

    age_s: float
    step: str


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages of the KV cache, 64 positions each.

    Attributes:
        total: all of them.
        free: those that a sequence could have now; pages of cached prompts that no running request
            uses count, since they make place.
    """

    total: int
    free: int


@dataclass(slots=True)
class _State:
    """What other threads may change; guarded by the loop's condition."""

    jobs: dict[_Job, None] = field(default_factory=dict)  # in the order they came
    is_closing: bool = False
    failure: SoloistError | None = None
    mean_s: float = 1.0
    num_preemptions: int = 0


class EngineLoop:
    """Runs requests side by side on one executor.

    Args:
        executor: used by this loop alone, in a thread of its own, until `close` returns.
        tokenizer: of its model.
        vocab_size: V.
        traffic: what tokens make the device read; None counts nothing.
        most_waiting: requests that may wait for a column.
        flush_s: how often listeners are told of new tokens, all at once; 0 for each token.
        on_failure: called once, in the loop's thread, if the device fails or the loop cannot go on.
    """

    def __init__(
        self,
        executor: Executor,
        tokenizer: Tokenizer,
        vocab_size: int,
        *,
        traffic: Traffic | None = None,
        most_waiting: int = 64,
        flush_s: float = 0.001,
        on_failure: Callable[[SoloistError], None] = lambda _: None,
    ) -> None:
        self._executor, self._tokenizer, self._vocab_size = executor, tokenizer, vocab_size
        self._flush_s, self._on_failure = flush_s, on_failure
        self._traffic, self._burst = traffic, Burst(None, ())
        self._scheduler: Scheduler[_Job] = Scheduler(executor.num_columns, most_waiting)
        self._condition = threading.Condition()
        self._state = _State()
        # Whether rounds should end: read without the lock once a round. Anybody may set it; only
        # `_next` clears it, before it looks at everything.
        self._has_news = False
        # Written once a round, without the lock; read by `progress`.
        self._moved_at, self._step = time.perf_counter(), _WAITING
        self._thread = threading.Thread(target=self._run, name="soloist-engine", daemon=True)
        self._thread.start()

    @property
    def load(self) -> Load:
        """How busy it is."""
        s = self._scheduler
        return Load(
            s.num_running, s.num_waiting, s.num_columns, s.most_waiting, self._state.num_preemptions
        )

    @property
    def cached(self) -> CachedTokens:
        """What the prefix cache holds."""
        return self._executor.cached

    @property
    def pages(self) -> Pages:
        """How many pages there are, and how many are free."""
        return Pages(self._executor.num_pages, self._executor.num_pages_free)

    @property
    def progress(self) -> Progress:
        """Whether it gets on; takes no lock and does not wait for the device."""
        # In this order: what comes into an idle loop is new before it is seen.
        is_idle = not self._state.jobs
        age_s = 0.0 if is_idle else max(0.0, time.perf_counter() - self._moved_at)
        return Progress(age_s, _WAITING if is_idle else self._step)

    @property
    def failure(self) -> SoloistError | None:
        """Why the device stopped, if it did."""
        return self._state.failure

    def submit(  # noqa: PLR0913 - what requests may differ in
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        top_logprobs: int | None = None,
        shown_ids: AbstractSet[int] = frozenset(),
        listen: Callable[[], None] = lambda: None,
        accepted: float | None = None,
        constraint: Constraint | None = None,
        scores: Scores = "answer",
    ) -> Ticket:
        """Queue a request.

        Args:
            prompt_ids: checked by `Processor.check_prompt`.
            params: how to sample and when to stop.
            top_logprobs: None for no log probabilities, else how many alternatives to name.
            shown_ids: special tokens that are part of the text.
            listen: called in the loop's thread when `take` has something; must not block.
            accepted: when the request came, by `time.perf_counter`; default: now.
            constraint: the form that the answer must have; taken over.
            scores: what log probabilities are for; `params.max_tokens` counts unless there is no
                answer.

        Raises:
            QueueFull: as many wait as may.
            ShuttingDown, EngineStopped: nothing more is taken.
            RequestError: token ids outside the vocabulary.
        """
        accepted = time.perf_counter() if accepted is None else accepted
        eos_ids = self._tokenizer.eos_ids
        sampler = Sampler(params, self._vocab_size, prompt_ids, eos_ids, constraint)
        if scores == "prompt":
            sampler.stop_test = replace(sampler.stop_test, max_tokens=0)
        answer = Answer(
            self._tokenizer, sampler, len(prompt_ids), accepted, shown_ids,
            scores_end=scores != "answer",
        )  # fmt: skip
        ticket = Ticket(tuple(prompt_ids), top_logprobs, listen, self._news)
        job = _Job(ticket, sampler, answer, accepted, tells_scores=scores != "answer")
        with self._condition:
            self.require_open()
            if not self._state.jobs:
                self._moved_at = time.perf_counter()
            self._scheduler.submit(job)
            self._state.jobs[job] = None
            if self._scheduler.can_join:
                self._has_news = True
            self._condition.notify()
        return ticket

    def refuse(self) -> None:
        """Take no further requests."""
        with self._condition:
            self._state.is_closing = True
            self._condition.notify()

    def cancel_all(self) -> None:
        """Cancel every request there is."""
        with self._condition:
            for job in self._state.jobs:
                job.ticket.is_cancelled = True
            self._has_news = True
            self._condition.notify()

    def abandon(self, error: SoloistError) -> None:
        """Fail every request and take no more, where the engine's thread does not get on.

        Should it get on after all, it ends.
        """
        failure = error if isinstance(error, EngineStopped) else EngineStopped(error)
        with self._condition:
            self._state.failure = self._state.failure or failure
            jobs = list(self._state.jobs)
            self._state.jobs.clear()
            self._has_news = True
            self._condition.notify()
        for job in jobs:
            _end(job, failure)

    def close(self, grace_s: float = 0.0, within_s: float | None = None) -> bool:
        """Refuse what comes, let requests finish for so long, cancel the rest, end the thread.

        Args:
            grace_s: for requests that run.
            within_s: for the thread to end, after that; None waits as long as it takes.

        Returns:
            Whether the thread has ended.
        """
        self.refuse()
        self._thread.join(grace_s)
        self.cancel_all()
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def require_open(self) -> None:
        """Refuse what `submit` would refuse now, whatever it asks for.

        Raises:
            QueueFull, ShuttingDown, EngineStopped: as `submit`.
        """
        state, load = self._state, self.load
        if state.failure is not None:
            raise EngineStopped(state.failure)
        if state.is_closing:
            raise ShuttingDown
        if self._scheduler.is_full:
            ahead = load.num_waiting + 1
            retry_s = max(1.0, ahead * state.mean_s / load.num_columns)
            raise QueueFull(load.num_columns, load.most_waiting, retry_s)

    def _news(self) -> None:
        with self._condition:
            self._has_news = True
            self._condition.notify()

    # --- in the loop's thread ---------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._executor.bind()
            while (step := self._next()) is not None:
                self._do(step)
        except BaseException as error:  # noqa: BLE001 - who waits for an answer has to get one
            self._fail(error)

    def _next(self) -> Step[_Job] | None:
        """The next step, waiting for one; None when everything is over."""
        while True:
            with self._condition:
                self._has_news = False
                gone = [job for job in self._state.jobs if job.ticket.is_cancelled]
            for job in gone:
                self._leave(job, None)
            with self._condition:
                state = self._state
                if state.failure is not None or (state.is_closing and not state.jobs):
                    return None
                if (step := self._scheduler.next()) is not None:
                    self._moved_at = time.perf_counter()
                    return step
                if not self._has_news:
                    self._step = _WAITING
                    self._condition.wait()

    def _do(self, step: Step[_Job]) -> None:
        match step:
            case Join(job):
                jobs, self._step, do = (job,), _BEGINNING, self._join
            case Read(job):
                jobs, self._step, do = (job,), _READING, self._read
            case Decode(jobs, most):
                self._step, do = _DECODING, partial(self._decode, most=most)
        try:
            do(*jobs)
        except Exception as error:  # noqa: BLE001 - a mistake in one step must not end all requests
            self._give_up(jobs, error)

    def _give_up(self, jobs: Sequence[_Job], error: Exception) -> None:
        """A step failed: fail the requests it concerns, and go on.

        Raises:
            Exception: the device is lost, or what they had cannot be freed.
        """
        if is_lost(error):
            raise error
        log.error("%s failed: %d requests are aborted", self._step, len(jobs), exc_info=error)
        self._burst = Burst(None, ())
        for job in jobs:
            if job in self._state.jobs:
                self._leave(job, StepFailed(self._step, error))
        try:
            self._executor.check()
        except AssertionError as unbalanced:
            raise MemoryNotFreed(unbalanced) from error

    def _join(self, job: _Job) -> None:
        was_preempted = job.running is not None
        has_joined = self._resume(job) if was_preempted else self._open(job)
        with self._condition:
            if not has_joined:
                self._scheduler.blocked()
                return
            self._scheduler.joined(job)
        if not was_preempted:
            self._start(job)

    def _open(self, job: _Job) -> bool:
        ids, wanted = job.ticket.prompt_ids, job.ticket.top_logprobs
        scores = job.tells_scores
        job.running = self._executor.open(ids, job.sampler, wanted, scores_prompt=scores)
        return job.running is not None

    def _resume(self, job: _Job) -> bool:
        assert job.running is not None, "it was preempted"
        return self._executor.resume(job.running)

    def _start(self, job: _Job) -> None:
        """Say what is known of a request that has just begun."""
        assert job.running is not None, "it joined"
        if job.running.num_offloaded:
            log.info(
                "a prompt of %d tokens: %d are fetched from the host's prefix cache",
                len(job.ticket.prompt_ids), job.running.num_offloaded,
            )  # fmt: skip
        if job.running.divergence is not None:
            self._tell(job.ticket, job.running.divergence)
        job.answer.start(time.perf_counter())

    def _tell(self, ticket: Ticket, divergence: Divergence) -> None:
        """Say where a prompt could have been cached for longer; text only where it is asked for."""
        ids, at = ticket.prompt_ids, divergence.position
        if at < _LONG_PREFIX:
            return
        log.info("a prompt of %d tokens differs from a cached one at token %d", len(ids), at)
        if log.isEnabledFor(logging.DEBUG):
            before, cached = ids[max(0, at - _SHOWN_TOKENS) : at], divergence.cached[:_SHOWN_TOKENS]
            ours = ids[at : at + _SHOWN_TOKENS]
            log.debug("cached: %r", self._tokenizer.decode([*before, *cached]))
            log.debug("now:    %r", self._tokenizer.decode([*before, *ours]))

    def _reserve(self, running: Sequence[Running]) -> bool:
        """Whether the next step has its pages; if not, one request is preempted."""
        if self._executor.reserve(running):
            return True
        with self._condition:
            job = self._scheduler.exhausted()
        assert job.running is not None, "it joined"
        job.ticket.flush()
        try:
            self._executor.preempt(job.running)
        except Exception as error:  # noqa: BLE001 - it concerns the request that has to wait
            self._step = _PREEMPTING
            self._give_up([job], error)
            return False
        self._state.num_preemptions += 1
        log.info("a request is preempted at %d tokens: the KV cache is full", job.running.position)
        return False

    def _read(self, job: _Job) -> None:
        assert job.running is not None, "it joined"
        if not self._reserve([job.running]):
            return
        try:
            picked = self._executor.read(job.running)
        except RequestError as error:
            self._leave(job, error)
            return
        if picked is None and not job.running.is_read:
            return
        with self._condition:
            self._scheduler.was_read(job)
        if job.tells_scores:
            self._tell_scores(job, job.running)
        if picked is not None:
            job.ticket.num_cached = job.answer.num_cached = job.running.num_cached
            self._take(job, picked, time.perf_counter())
        if job.is_over:
            self._leave(job, None)

    def _tell_scores(self, job: _Job, running: Running) -> None:
        """The prompt is read and scored; where no token is wanted, that was all."""
        job.tells_scores = False
        job.ticket.put(Scored(tuple(running.prompt_scores or ())), is_urgent=False)
        if running.is_over and not running.sampler.output_ids:
            now = time.perf_counter()
            job.answer.take_none(now)
            self._finish(job, now)

    def _decode(self, *jobs: _Job, most: int | None) -> None:
        running = [job.running for job in jobs if job.running is not None]
        if not self._reserve(running):
            return
        most = max(r.num_wanted for r in running) if most is None else most
        told_at = time.perf_counter()
        self._burst = Burst(self._traffic, [r.position + 1 for r in running])
        with closing(self._executor.rounds(running, most)) as rounds:
            for outcomes in rounds:
                now = self._moved_at = time.perf_counter()
                self._burst.num_rounds += 1
                for job, outcome in zip(jobs, outcomes, strict=True):
                    if not job.is_over:
                        self._take(job, outcome, now)
                if now - told_at >= self._flush_s:
                    told_at = now
                    _flush(jobs)
                if self._has_news:
                    self._executor.stop()
        _flush(jobs)
        read_bytes, self._burst = self._burst.num_bytes, Burst(None, ())
        for job in jobs:
            if job.is_over:
                self._leave(job, None)
            else:
                job.answer.decode_bytes += read_bytes

    def _take(self, job: _Job, outcome: Outcome, now: float) -> None:
        """Hand out what a round brought; the pages stay until the rounds are over."""
        try:
            self._hand_out(job, outcome, now)
        except Exception as error:  # noqa: BLE001 - others in this round go on
            _end(job, own_failure(_HANDING_OUT, error))
        if job.is_over:
            self._has_news = True

    def _hand_out(self, job: _Job, outcome: Outcome, now: float) -> None:
        if isinstance(outcome, RequestError):
            _end(job, outcome)
            return
        if outcome is None:
            return
        for token_id in outcome.token_ids:
            is_first = not job.answer.num_made
            chunk = job.answer.take(token_id, outcome.logprobs, now)
            job.ticket.put(chunk, is_urgent=is_first)
            if job.answer.finish_reason is not None:
                self._finish(job, now)
                return

    def _finish(self, job: _Job, now: float) -> None:
        job.answer.decode_bytes += self._burst.num_bytes
        rest, completion = job.answer.finish(now)
        events: list[Event] = [completion] if rest is None else [rest, completion]
        job.is_over = True
        for event in events:
            job.ticket.put(event, is_urgent=event is completion)

    def _leave(self, job: _Job, error: SoloistError | None) -> None:
        """Free a request's pages; one that is not over yet fails or was cancelled.

        Raises:
            MemoryNotFreed: they cannot be freed.
        """
        if job.running is not None:
            try:
                self._executor.close(job.running)
            except Exception as lost:
                raise (lost if is_lost(lost) else MemoryNotFreed(lost)) from lost
        now = self._moved_at = time.perf_counter()
        with self._condition:
            self._scheduler.leave(job)
            self._state.jobs.pop(job, None)  # `abandon` may have been here
            if job.running is not None:
                mean_s, took_s = self._state.mean_s, now - job.accepted
                self._state.mean_s += _NEWEST_SHARE * (took_s - mean_s)
        if job.is_over:
            return
        if error is None:
            try:
                self._finish(job, now)
            except Exception as mistake:  # noqa: BLE001 - it concerns this request alone
                error = own_failure(_HANDING_OUT, mistake)
        if error is not None:
            _end(job, error)

    def _fail(self, error: BaseException) -> None:
        """Tell everybody; the device is not touched any more."""
        log.critical("the engine stops after an error", exc_info=error)
        is_first, failure = self._state.failure is None, EngineStopped(error)
        self.abandon(failure)
        if is_first:
            try:
                self._on_failure(failure)
            except Exception:
                log.exception("the callback for engine failures failed")


def _end(job: _Job, error: SoloistError) -> None:
    """Fail a request, unless it is over."""
    if not job.is_over:
        job.is_over = True
        job.ticket.put(Failure(error), is_urgent=True)


def _flush(jobs: Sequence[_Job]) -> None:
    for job in jobs:
        job.ticket.flush()
