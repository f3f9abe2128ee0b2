"""What runs a loaded model: several sequences side by side, a token of each in every round.

Executors own device memory and decide nothing about order; `scheduler` and `loop` do. They are used
from one thread at a time.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor

from soloist.errors import DeviceError, RequestError, StepFailed
from soloist.kv.prefix import Divergence
from soloist.sampling import Sampler
from soloist.sampling.logprobs import TokenLogprobs, logprobs, logprobs_of_rows

log = logging.getLogger(__name__)

# Tokens that are read at a time where every one of them is scored: on the decode kernel eight
# rounds, as others then have.
SCORED_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Picked:
    """A token that was chosen; the sampler has observed it.

    Attributes:
        token_id: which one.
        logprobs: where they are wanted.
        forced: tokens behind it, observed too, that were not chosen: no others could follow.
    """

    token_id: int
    logprobs: TokenLogprobs | None = None
    forced: tuple[int, ...] = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All of them."""
        return (self.token_id, *self.forced)


# What a round brings for one sequence: a token; why it cannot go on; or nothing, since the sequence
# waits for the next rounds.
Outcome = Picked | RequestError | None


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """Prompt tokens in the prefix cache, and how many have moved since the start.

    Attributes:
        on_device: where they can be used at once.
        on_host: in the host's memory.
        offloaded: ever copied to the host.
        fetched: ever copied back.
        evicted: ever dropped from both.
    """

    on_device: int = 0
    on_host: int = 0
    offloaded: int = 0
    fetched: int = 0
    evicted: int = 0


class Running:
    """One sequence that an executor has opened.

    Attributes:
        prompt_ids: at least one token.
        sampler: how tokens are chosen; its output is what was made so far.
        top_logprobs: None where no log probabilities are wanted, else how many of the likeliest
            tokens to name beside the chosen one.
        prompt_scores: None where the prompt is not scored, else log probabilities of its tokens but
            the first, as far as it is read. What is cached of other prompts has none, so such
            a prompt is read by itself, and not cached.
        num_cached: prompt tokens whose keys and values were there already.
        num_offloaded: of these, how many had to come back from the host's memory.
        num_read: of the tokens to be read before rounds begin, how many are.
        num_to_read: the prompt, and of a sequence that was preempted all of its answer but the
            latest token.
        num_behind: tokens of the output before the latest one whose keys and values are not there:
            forced ones, which are to be fed together.
        divergence: where the prompt leaves one that is cached, if it does.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        sampler: Sampler,
        top_logprobs: int | None = None,
        *,
        scores_prompt: bool = False,
    ) -> None:
        self.prompt_ids, self.sampler, self.top_logprobs = prompt_ids, sampler, top_logprobs
        self.prompt_scores: list[TokenLogprobs] | None = [] if scores_prompt else None
        self.num_cached = self.num_offloaded = self.num_read = self.num_behind = 0
        self.num_to_read = len(prompt_ids)
        self.divergence: Divergence | None = None

    @property
    def is_read(self) -> bool:
        """Whether what comes next are rounds."""
        return self.num_read >= self.num_to_read

    @property
    def num_wanted(self) -> int:
        """Tokens that may still be made."""
        return self.sampler.stop_test.max_tokens - len(self.sampler.output_ids)

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

    @property
    def is_over(self) -> bool:
        """Whether nothing may follow, by length or by the form of the answer."""
        return self.num_wanted <= 0 or self.sampler.is_complete

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


class Executor(ABC):
    """A model on a device.

    Attributes:
        num_columns: sequences that may be open at once.
        shares_steps: whether a round reads the weights once for all its sequences.
    """

    num_columns: int
    shares_steps: bool = True

    def bind(self) -> None:  # noqa: B027 - most executors need nothing
        """Make the calling thread the one that uses the device; the loading thread already is."""

    @abstractmethod
    def open(
        self,
        prompt_ids: Sequence[int],
        sampler: Sampler,
        top_logprobs: int | None = None,
        *,
        scores_prompt: bool = False,
    ) -> Running | None:
        """Begin a sequence; arguments as of `Running`.

        Returns:
            The sequence; None where its pages are taken until another sequence is closed. One
            that fits the context can always be opened where no other is open.
        """

    def reserve(self, running: Sequence[Running]) -> bool:  # noqa: ARG002 - `open` reserved all
        """Reserve pages for the next step: of one sequence that is read, or of several that decode.

        Returns:
            False where the pages are taken until one of the open sequences is preempted or closed.
            A sequence alone always has enough.
        """
        return True

    def preempt(self, running: Running) -> None:  # noqa: ARG002 - never called
        """Free a sequence's pages for those before it; `resume` begins it again."""
        raise AssertionError("pages never ran out")

    def resume(self, running: Running) -> bool:  # noqa: ARG002 - never called
        """Begin a preempted sequence again; it is read once more, then goes on with the same bits.

        Returns:
            False, as `open` returns None.
        """
        raise AssertionError("nothing was preempted")

    @property
    def cached(self) -> CachedTokens:
        """What the prefix cache holds; may be asked from any thread."""
        return CachedTokens()

    @property
    def num_pages(self) -> int:
        """Pages of the KV cache; may be asked from any thread."""
        return 0

    @property
    def num_pages_free(self) -> int:
        """Pages that a sequence could have now; may be asked from any thread.

        Pages of cached prompts that no open sequence uses count: they make place.
        """
        return 0

    def check(self) -> None:  # noqa: B027 - most executors have no books
        """Make sure that the device goes on, and that nothing is lost or has two owners.

        Called after a step failed and what it had was freed: a page with two owners would
        change other answers silently.

        Raises:
            AssertionError: it is not so.
            DeviceError: the device failed.
        """

    @abstractmethod
    def read(self, running: Running) -> Picked | None:
        """Read the next chunk; with the last one of a prompt, choose the first token.

        Before, `reserve` returned True.

        Returns:
            The first token; None where more is to be read, where the sequence was preempted and
            has it, or where none is wanted but scores of the prompt.

        Raises:
            BadLogits, GrammarFailed: no first token can be chosen.
            DeviceError: the device failed.
        """

    @abstractmethod
    def rounds(self, running: Sequence[Running], most: int) -> Generator[list[Outcome], None, None]:
        """Rounds as they come, with one outcome for each of `running`, in that order.

        Ends after `most` rounds or earlier: at a stop token, where a sequence has all its tokens
        or its form, or when the executor sees fit. Closing it, like `stop`, ends it soon, and drops
        what the device made meanwhile. Before, `reserve` returned True.

        Raises:
            DeviceError: the device failed.
        """

    @abstractmethod
    def stop(self) -> None:
        """Ask the rounds that run to end soon; what they still bring counts."""

    @abstractmethod
    def close(self, running: Running) -> None:
        """End a sequence, and free its pages."""

    def generate(
        self,
        prompt_ids: Sequence[int],
        sampler: Sampler,
        cancelled: Callable[[], bool],
        on_read: Callable[[Running], None] = lambda _: None,
    ) -> Generator[int, None, None]:
        """One sequence alone: yield tokens, at most the request's largest number.

        Closing the iterator ends device work before it returns, so the next request may start.

        Args:
            prompt_ids: at least one token; with the answer they fit the context.
            sampler: chooses and observes tokens.
            cancelled: asked before every chunk of the prompt and after every token.
            on_read: called with the sequence when its prompt is read, before the first token.

        Raises:
            BadLogits: the best score is NaN or infinite.
            GrammarFailed: the answer cannot get its form any more.
            DeviceError: the device failed.
        """
        running = self.open(prompt_ids, sampler)
        assert running is not None, "nobody else has a sequence open"
        try:
            picked = None
            while picked is None:
                if cancelled():
                    return
                picked = self.read(running)
            on_read(running)
            yield from picked.token_ids
            while not running.is_over and not cancelled():
                with closing(self.rounds([running], running.num_wanted)) as rounds:
                    for (outcome,) in rounds:
                        if isinstance(outcome, RequestError):
                            raise outcome
                        if outcome is not None:
                            yield from outcome.token_ids
                        if cancelled():
                            return
        finally:
            self.close(running)


def is_lost(error: BaseException) -> bool:
    """Whether an error means that the device cannot be used any more, as far as one can tell.

    Memory that ran out is no such error.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return False
    # What the driver reports once it reports to every later call.
    of_driver = isinstance(error, RuntimeError) and "CUDA error" in str(error)
    return of_driver or isinstance(error, DeviceError | torch.AcceleratorError)


def own_failure(step: str, error: Exception) -> RequestError:
    """What a sequence's own part of a step brings where it fails, while other parts go on.

    Raises:
        Exception: `error` itself, where the device is lost.
    """
    if isinstance(error, RequestError):
        return error
    if is_lost(error):
        raise error
    log.error("%s failed; one request is aborted", step, exc_info=error)
    return StepFailed(step, error)


def pick(running: Running, logits: Tensor) -> Picked:
    """Choose and observe the next token from logits [V] on any device.

    Raises:
        BadLogits: the best score is NaN or infinite.
        GrammarFailed: no token is allowed.
    """
    token_id = running.sampler.pick(logits, running.position + 1)
    running.sampler.observe(token_id)
    return picked(running, token_id, logits)


def picked(running: Running, token_id: int, logits: Tensor) -> Picked:
    """An observed token, what is to be known of its logits [V], and what must follow it."""
    wanted = running.top_logprobs
    if wanted is not None:
        return Picked(token_id, logprobs(logits, token_id, wanted))
    return Picked(token_id, forced=take_forced(running))


def take_forced(running: Running, least: int = 1) -> tuple[int, ...]:
    """Append what must follow without asking the model, if that is at least so many tokens.

    Where log probabilities are wanted nothing is: they need logits, so forced tokens come one a
    round, each the only one allowed.
    """
    taken: list[int] = []
    while True:
        span = list(running.sampler.forced_ids)[: running.num_wanted]
        if not span or len(taken) + len(span) < least:
            break
        for token_id in span:
            running.sampler.observe(token_id)
        taken += span
    running.num_behind += len(taken)
    return tuple(taken)
