"""The thread that owns the device: it does the steps of an `EngineCore` for many requests.

Everything public may be called from any thread, and does not wait for the device.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from soloist.engine.core import WAITING, EngineCore
from soloist.engine.executor import Executor
from soloist.engine.request import Request
from soloist.engine.scheduler import Step
from soloist.engine.traffic import Traffic
from soloist.errors import EngineStopped, QueueFull, ShuttingDown, SoloistError
from soloist.kv.saving import SavedTokens
from soloist.kv.tiers import CachedTokens
from soloist.sampling import Sampler, SamplingParams
from soloist.sampling.constraint import Constraint
from soloist.sampling.params import Scores
from soloist.text import TextStream, Tokenizer

log = logging.getLogger(__name__)

# For prompts that wait to be saved when the loop ends.
_FLUSH_S = 1.0


@dataclass(frozen=True, slots=True)
class Load:
    """How many requests there are.

    Attributes:
        num_running: reading their prompt or decoding.
        num_waiting: in the queue.
        max_running: how many may run.
        most_waiting: how many may wait.
        num_preemptions: how often one was preempted for those before it.
    """

    num_running: int
    num_waiting: int
    max_running: int
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
        free: those that a request could have now; pages of cached prompts that no running request
            uses count, since they make place.
    """

    total: int
    free: int


class EngineLoop:
    """Runs requests side by side on one executor.

    Args:
        executor: used by this loop alone, in a thread of its own, until `close` returns.
        tokenizer: of its model.
        vocab_size: V.
        traffic: what tokens make the device read; None counts nothing.
        most_waiting: requests that may wait for others to end.
        flush_s: how often listeners are told of new tokens, all at once; 0 for each token.
        on_failure: called once, in the loop's thread, if the device fails or the loop cannot go on.

    Attributes:
        failure: why the device stopped, if it did.
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
        self._tokenizer, self._vocab_size, self._on_failure = tokenizer, vocab_size, on_failure
        self._core = EngineCore(
            executor, tokenizer, traffic=traffic, most_waiting=most_waiting, flush_s=flush_s
        )
        self._is_closing = False
        self.failure: SoloistError | None = None
        self._thread = threading.Thread(target=self._run, name="soloist-engine", daemon=True)
        self._thread.start()

    @property
    def load(self) -> Load:
        """How busy it is."""
        s = self._core.scheduler
        return Load(
            s.num_running, s.num_waiting, s.max_running, s.most_waiting, self._core.num_preemptions
        )

    @property
    def cached(self) -> CachedTokens:
        """What the prefix cache holds."""
        return self._core.executor.cached

    @property
    def saved(self) -> SavedTokens | None:
        """What became of saved prompts; None where none are."""
        return self._core.executor.saved

    @property
    def pages(self) -> Pages:
        """How many pages there are, and how many are free."""
        return Pages(self._core.executor.num_pages, self._core.executor.num_pages_free)

    @property
    def progress(self) -> Progress:
        """Whether it gets on; takes no lock."""
        # In this order: what comes into an idle loop is new before it is seen.
        is_idle = not self._core.requests
        age_s = 0.0 if is_idle else max(0.0, time.perf_counter() - self._core.moved_at)
        return Progress(age_s, WAITING if is_idle else self._core.doing)

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
        prediction_ids: Sequence[int] | None = None,
    ) -> Request:
        """Queue a request; arguments that are not named here are those of `Request`.

        Args:
            prompt_ids: checked by `Processor.check_prompt`.
            params: how to sample and when to stop; with scores 'prompt' `max_tokens` is 0.
            top_logprobs: see `Request`.
            shown_ids: special tokens that are part of the text.
            listen: see `Request`.
            accepted: see `Request`.
            constraint: the form that the answer must have; taken over.
            scores: see `Request`.
            prediction_ids: of a text that the answer will mostly repeat.

        Raises:
            QueueFull: as many wait as may.
            ShuttingDown, EngineStopped: nothing more is taken.
            RequestError: token ids outside the vocabulary.
        """
        eos_ids = self._tokenizer.eos_ids
        request = Request(
            tuple(prompt_ids),
            Sampler(params, self._vocab_size, prompt_ids, eos_ids, constraint),
            TextStream(self._tokenizer, params.stop, shown_ids=shown_ids),
            top_logprobs=top_logprobs,
            scores=scores,
            accepted=accepted,
            listen=listen,
            drafter=self._core.executor.drafter(prompt_ids, prediction_ids, self._core.archive),
        )
        with self._core.changed:
            self.require_open()
            self._core.submit(request)
        return request

    def refuse(self) -> None:
        """Take no further requests."""
        with self._core.changed:
            self._is_closing = True
            self._core.changed.notify()

    def cancel_all(self) -> None:
        """Cancel every request there is."""
        with self._core.changed:
            for request in self._core.requests:
                request.cancel()
            self._core.wake()

    def abandon(self, error: SoloistError) -> None:
        """Fail every request and take no more, where the engine's thread does not get on.

        Should it get on after all, it ends.
        """
        failure = error if isinstance(error, EngineStopped) else EngineStopped(error)
        with self._core.changed:
            self.failure = self.failure or failure
            requests = list(self._core.requests)
            self._core.requests.clear()
            self._core.wake()
        for request in requests:
            request.fail(failure)

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
        if self.failure is not None:
            raise EngineStopped(self.failure)
        if self._is_closing:
            raise ShuttingDown
        if self._core.scheduler.is_full:
            load = self.load
            retry_s = max(1.0, (load.num_waiting + 1) * self._core.mean_s / load.max_running)
            raise QueueFull(load.max_running, load.most_waiting, retry_s)

    # --- in the loop's thread ---------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._core.executor.bind()
            while (step := self._next()) is not None:
                for _ in self._core.do(step):
                    pass
            self._core.executor.flush(_FLUSH_S)
        except BaseException as error:  # noqa: BLE001 - who waits for an answer has to get one
            self._fail(error)

    def _next(self) -> Step[Request] | None:
        """The next step, waiting for one; None when everything is over."""
        while not self._is_over:
            if (step := self._core.next()) is not None:
                return None if self.failure is not None else step
            with self._core.changed:
                if not (self._core.has_news or self._is_over):
                    self._core.doing = WAITING
                    self._core.changed.wait()
        return None

    @property
    def _is_over(self) -> bool:
        return self.failure is not None or (self._is_closing and not self._core.requests)

    def _fail(self, error: BaseException) -> None:
        """Tell every request; the device is not touched any more."""
        log.critical("the engine stops after an error", exc_info=error)
        is_first, failure = self.failure is None, EngineStopped(error)
        self.abandon(failure)
        if is_first:
            try:
                self._on_failure(failure)
            except Exception:
                log.exception("the callback for engine failures failed")
