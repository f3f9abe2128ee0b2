"""What `bench decode` measures: one request to anything that answers it. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Run:
    """One timed request.

    Attributes:
        ttft_s: accepted → first token.
        decode_s: first token → last token.
        token_ids: made.
        token_s: times between instants at which tokens came.
        tokens_per_round: where tokens were drafted.
        accepted: of the drafted tokens, the share that was right; None where there are none.
        beside_tokens_per_s: of each request that has no prediction beside others that have one,
            mean, while all of them decode; None where there are no such requests.
    """

    ttft_s: float
    decode_s: float
    token_ids: tuple[int, ...]
    token_s: tuple[float, ...]
    tokens_per_round: float | None = None
    accepted: float | None = None
    beside_tokens_per_s: float | None = None


class Contender(Protocol):
    """Something that can answer the same request."""

    name: str

    def run(self, prompt_ids: list[int], new_tokens: int) -> Run:
        """Answer with exactly `new_tokens` tokens."""
        ...


def gaps_s(times: Sequence[float]) -> tuple[float, ...]:
    """Between each two instants."""
    return tuple(b - a for a, b in pairwise(times))
