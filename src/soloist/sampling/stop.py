"""When generation ends: decided from one token id and a count, without text and without torch."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Self

from soloist.sampling.params import SamplingParams

FinishReason = Literal["eos", "stop", "length"]


@dataclass(frozen=True, slots=True)
class StopTest:
    """The token ids that end one request and its largest number of tokens."""

    eos_ids: frozenset[int]
    stop_ids: frozenset[int]
    max_tokens: int

    @classmethod
    def for_request(cls, params: SamplingParams, eos_ids: Iterable[int]) -> Self:
        """The test for `params` on a model whose end-of-sequence tokens are `eos_ids`."""
        return cls(
            eos_ids=frozenset() if params.ignore_eos else frozenset(eos_ids),
            stop_ids=params.stop_token_ids,
            max_tokens=params.max_tokens,
        )

    @property
    def ending_ids(self) -> frozenset[int]:
        """Every token id after which nothing follows."""
        return self.eos_ids | self.stop_ids

    def finish_reason(self, token_id: int, num_output: int) -> FinishReason | None:
        """Why generation ends with `token_id` as output token number `num_output`, or None."""
        if token_id in self.eos_ids:
            return "eos"
        if token_id in self.stop_ids:
            return "stop"
        return "length" if num_output >= self.max_tokens else None
