"""What runs a loaded model: several requests side by side, a token of each in every round.

Executors own device memory and decide nothing about order; `scheduler` and `core` do. They are used
from one thread at a time.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from soloist.engine.request import Request
from soloist.errors import DeviceError, RequestError, StepFailed
from soloist.kv.saving import SavedTokens
from soloist.kv.tiers import CachedTokens
from soloist.sampling.logprobs import TokenLogprobs, logprobs
from soloist.speculation import Archive, Draft, Drafter, Drafting

log = logging.getLogger(__name__)

# Tokens that are read at a time where every one of them is scored: on the decode kernel eight
# rounds, as others then have.
SCORED_TOKENS = 64
# What a request's own part of a round is, for people.
CHOOSING = "choosing a token"


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


@dataclass(frozen=True, slots=True)
class Verified:
    """Tokens of one round that checked a draft; the sampler has observed them.

    Attributes:
        picks: at least one: the drafts that were right, and what was chosen behind them.
        draft: what was checked.
        num_accepted: of its tokens; the first of `picks`.
    """

    picks: tuple[Picked, ...]
    draft: Draft
    num_accepted: int


# What a round brings for one request: a token; several, where some were drafted; why it cannot go
# on; or nothing, since the request waits for the next rounds.
Outcome = Picked | Verified | RequestError | None


class Executor(ABC):
    """A model on a device.

    Attributes:
        max_running: requests that may be open at once.
        shares_steps: whether a round reads the weights once for all its requests.
        drafting: how requests may draft; None where drafts are not checked.
    """

    max_running: int
    shares_steps: bool = True
    drafting: Drafting | None = None

    def drafter(
        self,
        prompt_ids: Sequence[int],
        prediction_ids: Sequence[int] | None,
        archive: Archive | None = None,
    ) -> Drafter | None:
        """What drafts for one request; None where nothing would be checked.

        Args:
            prompt_ids: its prompt.
            prediction_ids: of a text that the answer will mostly repeat; None without.
            archive: earlier answers; None where none are kept.
        """
        drafting = self.drafting
        if drafting is None or not (drafting.looks_up or prediction_ids is not None):
            return None
        return Drafter(drafting, prompt_ids, prediction_ids, archive)

    def bind(self) -> None:  # noqa: B027 - most executors need nothing
        """Make the calling thread the one that uses the device; the loading thread already is."""

    @abstractmethod
    def open(self, request: Request) -> bool:
        """Begin a request; or resume one that was preempted.

        A resumed request is read once more, then goes on with the same bits.

        Returns:
            False where its pages are taken until another request is freed. One that fits the
            context can always be opened where no other is open.
        """

    def reserve(self, requests: Sequence[Request]) -> bool:  # noqa: ARG002 - `open` reserved all
        """Reserve pages for the next step: of a request that is read, or of several that decode.

        Returns:
            False where the pages are taken until an open request is preempted or freed. A request
            alone always has enough.
        """
        return True

    def preempt(self, request: Request) -> None:  # noqa: ARG002 - never called
        """Free a request's pages for those before it; `open` resumes it."""
        raise AssertionError("pages never ran out")

    @property
    def cached(self) -> CachedTokens:
        """What the prefix cache holds; may be asked from any thread."""
        return CachedTokens()

    def save_to(  # executors that cache nothing are not asked to
        self, root: Path, most_bytes: int, facts: tuple[object, ...]
    ) -> None:
        """From now on save cached prompts to a folder, and find there what was saved before.

        Args:
            root: the folder; it exists.
            most_bytes: of all files in it.
            facts: what the bits of keys and values depend on, beside the executor itself.
        """
        raise AssertionError(f"it caches no prompts: {root}, {most_bytes}, {facts}")

    @property
    def saved(self) -> SavedTokens | None:
        """What became of saved prompts; None where none are. May be asked from any thread."""
        return None

    def forget(self) -> None:  # noqa: B027 - most executors cache nothing
        """Drop cached prompts from memory that no request uses; what is saved stays."""

    def offload(self) -> None:  # executors without such memory are not asked to
        """Move cached prompts that no request uses to the host's memory, as far as it goes."""
        raise AssertionError("it offloads nothing")

    def flush(self, within_s: float) -> None:  # noqa: B027 - most executors save nothing
        """Wait until prompts that are being saved are written, for so long at most."""

    @property
    def num_pages(self) -> int:
        """Pages of the KV cache; may be asked from any thread."""
        return 0

    @property
    def num_pages_free(self) -> int:
        """Pages that a request could have now; may be asked from any thread.

        Pages of cached prompts that no open request uses count: they make place.
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
    def read(self, request: Request) -> Picked | None:
        """Read the next chunk; with the last one of a prompt, choose the first token.

        Before, `reserve` returned True. The device may have begun with `rounds` when this returns;
        whatever else comes next ends them, `free` too.

        Returns:
            The first token; None where more is to be read, where the request was preempted and
            has it, or where none is wanted but scores of the prompt.

        Raises:
            BadLogits, GrammarFailed: no first token can be chosen.
            DeviceError: the device failed.
        """

    @abstractmethod
    def rounds(
        self, requests: Sequence[Request], most: int
    ) -> Generator[list[Outcome], None, None]:
        """Rounds as they come, with one outcome for each of `requests`, in that order.

        Ends after `most` rounds or earlier: at a stop token, where a request has all its tokens
        or its form, or when the executor sees fit. Closing it, like `stop`, ends it soon, and drops
        what the device made meanwhile. Before, `reserve` returned True.

        Raises:
            DeviceError: the device failed.
        """

    @abstractmethod
    def stop(self) -> None:
        """Ask the rounds that run to end soon; what they still bring counts."""

    @abstractmethod
    def free(self, request: Request) -> None:
        """Free what is held for a request."""


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
    """What a request's own part of a step brings where it fails, while other parts go on.

    Raises:
        Exception: `error` itself, where the device is lost.
    """
    if isinstance(error, RequestError):
        return error
    if is_lost(error):
        raise error
    log.error("%s failed; one request is aborted", step, exc_info=error)
    return StepFailed(step, error)


def pick(request: Request, logits: Tensor) -> Picked:
    """Choose and observe the next token from logits [V] on any device.

    Raises:
        BadLogits: the best score is NaN or infinite.
        GrammarFailed: no token is allowed.
    """
    token_id = request.sampler.pick(logits, request.position + 1)
    request.sampler.observe(token_id)
    return picked(request, token_id, logits)


def picked(request: Request, token_id: int, logits: Tensor) -> Picked:
    """An observed token, what is to be known of its logits [V], and what must follow it."""
    wanted = request.top_logprobs
    if wanted is not None:
        return Picked(token_id, logprobs(logits, token_id, wanted))
    return Picked(token_id, forced=take_forced(request))


def verify(request: Request, draft: Draft, pick_at: Callable[[int], Picked]) -> Verified:
    """Choose tokens column by column, as far as the draft has what was chosen.

    Each is chosen as it would be without drafts: from the logits behind the same tokens, after
    all of them were observed, with the noise of its position. So the answer has the same tokens.

    Args:
        request: that drafted.
        draft: its tokens were fed behind the latest one.
        pick_at: chooses and observes the token behind column 0, 1, …, each called once.

    Raises:
        BadLogits, GrammarFailed: no token can be chosen right behind the latest one.
    """
    picks, num_accepted, is_wrong = [pick_at(0)], 0, False
    for column, token_id in enumerate(draft.ids, 1):
        if picks[-1].token_id != token_id:
            is_wrong = True
            break
        num_accepted += 1
        # Behind forced tokens other columns would be needed.
        ends = token_id in request.sampler.stop_test.ending_ids
        if picks[-1].forced or request.has_all_tokens or ends:
            break
        try:
            picks.append(pick_at(column))
        except RequestError:
            break  # the next round meets it at once
    if request.drafter is not None:
        request.drafter.judge(draft, num_accepted + is_wrong, num_accepted)
    return Verified(tuple(picks), draft, num_accepted)


def take_forced(request: Request, least: int = 1) -> tuple[int, ...]:
    """Append what must follow without asking the model, if that is at least so many tokens.

    Where log probabilities are wanted nothing is: they need logits, so forced tokens come one a
    round, each the only one allowed.
    """
    if not request.sampler.is_constrained:
        return ()
    taken: list[int] = []
    while True:
        span = list(request.sampler.forced_ids)[: request.num_wanted]
        if not span or len(taken) + len(span) < least:
            break
        for token_id in span:
            request.sampler.observe(token_id)
        taken += span
    request.num_behind += len(taken)
    return tuple(taken)
