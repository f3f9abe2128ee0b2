"""What a request yields: pieces of text as they come, and at the end what happened and how fast."""

from dataclasses import dataclass, field
from typing import Literal

from soloist.errors import SoloistError
from soloist.sampling import FinishReason as StopReason
from soloist.sampling.logprobs import TokenLogprobs
from soloist.speculation import Tally

FinishReason = StopReason | Literal["cancelled"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Text that is safe to show; the tokens that were made since the last chunk.

    Attributes:
        text: may lag behind the tokens by what is not certain yet.
        token_ids: of the tokens made.
        logprobs: where they were asked for, one for each token but the one that ends the request;
            where the prompt is scored, for that one too.
        num_forced: of the tokens, those that the form of the answer left no choice for and that
            were given out without a step of their own.
        num_drafted: of the tokens, those that were drafted, and checked in one step with others.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_forced: int = 0
    num_drafted: int = 0


@dataclass(frozen=True, slots=True)
class Scored:
    """What a model thinks of its prompt; comes before the first chunk.

    Attributes:
        logprobs: of the prompt's tokens, each after those before it; the first has none.
    """

    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Timings:
    """Times of one request, by the engine's clock.

    Attributes:
        prompt_tokens: tokens read.
        new_tokens: tokens made.
        ttft_s: request accepted → first token known.
        decode_s: first token → last token.
        total_s: request accepted → finished.
        queue_s: request accepted → work on it begins, a part of `ttft_s`.
        cached_tokens: tokens of the prompt that did not have to be read again.
        decode_bytes: that the device had to read from the first token to the last: weights, keys
            and values of this request and of those it shared steps with; 0 if not counted.
        forced_tokens: of the new tokens; see `Chunk.num_forced`.
        drafts: what became of tokens that were drafted.
        longest_gap_s: the longest time between two tokens; 0 where there are no two.
    """

    prompt_tokens: int
    new_tokens: int
    ttft_s: float
    decode_s: float
    total_s: float
    queue_s: float = 0.0
    cached_tokens: int = 0
    decode_bytes: int = 0
    forced_tokens: int = 0
    drafts: Tally = field(default_factory=Tally)
    longest_gap_s: float = 0.0

    @property
    def tokens_per_round(self) -> float | None:
        """Tokens behind the first one, for each round that made some; None where none did.

        Forced ones are left out: they come without a round of their own.
        """
        made = self.new_tokens - 1 - self.forced_tokens
        rounds = made - self.drafts.accepted
        return made / rounds if rounds > 0 else None

    @property
    def decode_tokens_per_s(self) -> float | None:
        """(N - 1) / (time of last - time of first); None where there are no two tokens."""
        return (self.new_tokens - 1) / self.decode_s if self.decode_s > 0 else None

    def mbu(self, bandwidth_gb_per_s: float | None) -> float | None:
        """Bytes that had to be read a second over measured read bandwidth; None if unknown."""
        if not (bandwidth_gb_per_s and self.decode_bytes and self.decode_s > 0):
            return None
        return self.decode_bytes / self.decode_s / 1e9 / bandwidth_gb_per_s


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of a request.

    Attributes:
        text: all of it.
        token_ids: all of them, the one that ended the request included.
        finish_reason: why it ended.
        timings: how fast it went.
        seed: what chose the tokens; None where the best one was always taken.
        stop: the stop string that ended it, if one did.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    timings: Timings
    seed: int | None
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """The end of a request that cannot go on."""

    error: SoloistError


Event = Scored | Chunk | Completion | Failure


class Cancel:
    """A flag that ends a request at its next token; safe to set from a signal handler."""

    def __init__(self) -> None:
        self.requested = False

    def __call__(self) -> None:
        """Ask for the end."""
        self.requested = True
