"""One request from its acceptance to its completion: what the loop, executors and readers share."""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from soloist.engine.answer import Answer
from soloist.engine.events import Event, Failure, Scored
from soloist.errors import SoloistError
from soloist.kv.prefix import Divergence
from soloist.sampling import Sampler
from soloist.sampling.logprobs import TokenLogprobs, logprobs_of_rows
from soloist.sampling.params import Scores
from soloist.speculation import Draft, Drafter
from soloist.text import TextStream

log = logging.getLogger(__name__)


class Request:
    """A prompt, how it is to be answered, how far it has come, and who is told.

    Any thread may `take` events and `cancel`; all else is the engine's thread's. What an executor
    holds for a request, such as pages, stays with the executor.

    Args:
        prompt_ids: at least one token.
        sampler: how tokens are chosen, and when the answer ends.
        text: takes the tokens; without one there is no text, and no stop string.
        top_logprobs: None for no log probabilities, else how many of the likeliest tokens to name
            beside the chosen one.
        scores: what log probabilities are for. With 'prompt' no token is made.
        accepted: when the request came, by `time.perf_counter`; default: now.
        drafter: drafts what may follow; None where nobody does.
        listen: called in the engine's thread when `take` has something; must not block. It is told
            of the first token and of the end at once, of events between them when the loop says so:
            waking a reader costs more than a token. If it fails nobody reads on, and the request
            is cancelled.

    Attributes:
        answer: what was made so far.
        has_begun: whether it has left the queue; one that is preempted goes back, but has begun.
        is_cancelled: whether the request shall end at its next token.
        is_finished: whether its end was told.
        on_cancel: called by `cancel`, in its thread.
        prompt_scores: None where the prompt is not scored, else log probabilities of its tokens but
            the first, as far as it is read. What is cached of other prompts has none, so such
            a prompt is read by itself, and not cached.
        num_cached: prompt tokens whose keys and values were there already; known with the first
            token.
        num_offloaded: of these, how many had to come back from the host's memory.
        num_read: of the tokens to be read before rounds begin, how many are.
        num_to_read: the prompt, and of a preempted request all of its answer but the latest token.
        num_behind: tokens of the output before the latest one whose keys and values are not there:
            forced ones, which are to be fed together.
        divergence: where the prompt leaves one that is cached, if it does.
    """

    def __init__(  # noqa: PLR0913 - what requests may differ in
        self,
        prompt_ids: Sequence[int],
        sampler: Sampler,
        text: TextStream | None = None,
        *,
        top_logprobs: int | None = None,
        scores: Scores = "answer",
        accepted: float | None = None,
        drafter: Drafter | None = None,
        listen: Callable[[], None] = lambda: None,
    ) -> None:
        if scores == "prompt":
            sampler.stop_test = replace(sampler.stop_test, max_tokens=0)
        self.prompt_ids, self.sampler, self.top_logprobs = prompt_ids, sampler, top_logprobs
        self.drafter = drafter
        self.accepted = time.perf_counter() if accepted is None else accepted
        self.answer = Answer(
            sampler, len(prompt_ids), self.accepted, text, scores_end=scores != "answer"
        )
        self.has_begun = self.is_cancelled = self.is_finished = False
        self.on_cancel: Callable[[], None] = lambda: None
        self.prompt_scores: list[TokenLogprobs] | None = None if scores == "answer" else []
        self.num_cached = self.num_offloaded = self.num_read = self.num_behind = 0
        self.num_to_read = len(prompt_ids)
        self.divergence: Divergence | None = None
        self._listen = listen
        self._events: deque[Event] = deque()
        self._is_untold = False

    # --- for who reads the answer -----------------------------------------------------------------

    def take(self) -> list[Event]:
        """Events since the last call; after the last one, a `Completion` or `Failure`, none."""
        taken = []
        while self._events:
            taken.append(self._events.popleft())
        return taken

    def cancel(self) -> None:
        """End the request at its next token, if it still goes on."""
        if not self.is_cancelled:
            self.is_cancelled = True
            self.on_cancel()

    # --- for executors ----------------------------------------------------------------------------

    @property
    def is_read(self) -> bool:
        """Whether what comes next are rounds."""
        return self.num_read >= self.num_to_read

    @property
    def num_wanted(self) -> int:
        """Tokens that may still be made."""
        return self.sampler.stop_test.max_tokens - len(self.sampler.output_ids)

    @property
    def has_all_tokens(self) -> bool:
        """Whether no token may follow, by length or by the form of the answer."""
        return self.num_wanted <= 0 or self.sampler.is_complete

    @property
    def last(self) -> int:
        """The latest token, once there is one."""
        return self.sampler.output_ids[-1]

    @property
    def position(self) -> int:
        """Of the latest token."""
        return len(self.prompt_ids) + len(self.sampler.output_ids) - 1

    @property
    def ids_behind(self) -> list[int]:
        """The tokens that `num_behind` counts; the last one is right before the latest token."""
        made = self.sampler.output_ids
        return made[len(made) - 1 - self.num_behind : len(made) - 1]

    def draft(self, most: int, by: Drafter | None = None) -> Draft | None:
        """What may follow the latest token, and could be told if it does; None for nothing.

        Args:
            most: tokens.
            by: who drafts; the request's own drafter where it is None.
        """
        drafter = by or self.drafter
        if drafter is None or self.num_behind:
            return None
        # One token more is made in any case.
        draft = drafter.draft(self.sampler.output_ids, min(most, self.num_wanted - 1))
        if draft is None:
            return None
        ids = draft.ids[: self.sampler.num_fitting(draft.ids)]
        return replace(draft, ids=ids) if ids else None

    def draft_behind(self, draft: Draft, most: int) -> tuple[int, Draft] | None:
        """The token behind a draft, and the next draft, if the answer follows its prediction.

        None where nobody can know.

        Args:
            draft: the latest.
            most: tokens of the next one.
        """
        if self.drafter is None:
            return None
        num_left = self.num_wanted - len(draft.ids) - 1
        found = self.drafter.behind(draft, min(most, num_left - 1))
        if found is None:
            return None
        token_id, following = found
        count = self.sampler.num_fitting((token_id, *following.ids)) - 1
        return (token_id, replace(following, ids=following.ids[:count])) if count > 0 else None

    def score(self, position: int, logits: Tensor) -> None:
        """Take logits [T, V] of tokens of the prompt; those that were taken before change nothing.

        Args:
            position: of the first of these tokens.
            logits: any device.

        Raises:
            BadLogits: the best score of a row is NaN or infinite.
        """
        scores = self.prompt_scores
        assert scores is not None, "it is scored"
        ids = self.prompt_ids[len(scores) + 1 : position + len(logits) + 1]
        if ids:
            first = len(scores) - position
            rows = logits[first : first + len(ids)]
            scores += logprobs_of_rows(rows, ids, len(scores) + 1, self.top_logprobs or 0)

    # --- for the loop -----------------------------------------------------------------------------

    def was_read(self, now: float) -> None:
        """Tell scores of the prompt, if there are any; where no token is wanted, that was all."""
        if self.prompt_scores is None or self.answer.num_made:
            return
        self._put(Scored(tuple(self.prompt_scores)), is_urgent=False)
        if self.has_all_tokens and not self.sampler.output_ids:
            self.answer.take_none(now)

    def put_token(
        self,
        token_id: int,
        logprobs: TokenLogprobs | None,
        now: float,
        *,
        is_forced: bool = False,
        is_drafted: bool = False,
    ) -> None:
        """Tell of the next token."""
        is_first = not self.answer.num_made
        chunk = self.answer.take(
            token_id, logprobs, now, is_forced=is_forced, is_drafted=is_drafted
        )
        self._put(chunk, is_urgent=is_first)

    def finish(self, now: float) -> None:
        """Tell of the end: cancelled, if no token was the last one."""
        rest, completion = self.answer.finish(now, self.num_cached)
        self.is_finished = True
        if rest is not None:
            self._put(rest, is_urgent=False)
        self._put(completion, is_urgent=True)

    def fail(self, error: SoloistError) -> None:
        """Tell that the request cannot go on, unless its end was told."""
        if not self.is_finished:
            self.is_finished = True
            self._put(Failure(error), is_urgent=True)

    def flush(self) -> None:
        """Tell the listener of what it does not know yet."""
        if self._is_untold:
            self._is_untold = False
            try:
                self._listen()
            except Exception:
                log.exception("a request is cancelled: its listener failed")
                self.cancel()

    def _put(self, event: Event, *, is_urgent: bool) -> None:
        self._events.append(event)
        self._is_untold = True
        if is_urgent:
            self.flush()
