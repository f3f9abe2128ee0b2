"""What a request yields: pieces of text as they come, and at the end what happened and how fast."""

from dataclasses import dataclass
from typing import Literal

from soloist.sampling import FinishReason as StopReason

FinishReason = StopReason | Literal["cancelled"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Text that is safe to show; the ids of the tokens that were made since the last chunk."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Timings:
    """Times of one request, by the engine's clock.

    Attributes:
        prompt_tokens: tokens read.
        new_tokens: tokens made.
        ttft_s: request accepted → first token known.
        decode_s: first token → last token.
        total_s: request accepted → finished.
    """

    prompt_tokens: int
    new_tokens: int
    ttft_s: float
    decode_s: float
    total_s: float

    @property
    def decode_tokens_per_s(self) -> float | None:
        """(N - 1) / (time of last - time of first); None where there are no two tokens."""
        return (self.new_tokens - 1) / self.decode_s if self.decode_s > 0 else None


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of a request."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    timings: Timings
    seed: int | None


class Cancel:
    """A flag that ends a request at its next token; safe to set from a signal handler."""

    def __init__(self) -> None:
        self.requested = False

    def __call__(self) -> None:
        """Ask for the end."""
        self.requested = True
