"""When a request ends, and why: decided here alone, from one token after the other. Without torch.

The first of these that holds is told as the finish reason:

- 'eos': the token is one of the model's end-of-sequence tokens, unless they are ignored;
- 'stop': it is a stop token, it completes a stop string in the text, or with it the answer has the
  whole form that was asked for (a JSON object is closed, say);
- 'length': it is the last one that was wanted.

Whoever cancels a request ends it as 'cancelled'. The host asks this test for every token. A launch
of the decode kernel ends early at up to `MAX_STOPS` of `ending_ids`, so that less is made in vain;
what it makes beyond the end is dropped.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, Self

from soloist.sampling.params import SamplingParams

FinishReason = Literal["eos", "stop", "length"]


@dataclass(frozen=True, slots=True)
class StopTest:
    """The token ids that end one request and its largest number of tokens.

    Attributes:
        ending_ids: every token id after which nothing follows; such a token is no part of the text.
    """

    eos_ids: frozenset[int]
    stop_ids: frozenset[int]
    max_tokens: int
    ending_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        # Once, since every token is looked for in it.
        object.__setattr__(self, "ending_ids", self.eos_ids | self.stop_ids)

    @classmethod
    def for_request(cls, params: SamplingParams, eos_ids: Iterable[int]) -> Self:
        """The test for `params` on a model whose end-of-sequence tokens are `eos_ids`."""
        return cls(
            eos_ids=frozenset() if params.ignore_eos else frozenset(eos_ids),
            stop_ids=params.stop_token_ids,
            max_tokens=params.max_tokens,
        )

    def finish_reason(
        self, token_id: int, num_output: int, *, is_complete: bool = False
    ) -> FinishReason | None:
        """Why generation ends with `token_id` as output token number `num_output`, or None.

        Args:
            token_id: the latest one.
            num_output: tokens so far, with it.
            is_complete: the text has a stop string, or the answer its whole form.
        """
        if token_id in self.eos_ids:
            return "eos"
        if token_id in self.stop_ids or is_complete:
            return "stop"
        return "length" if num_output >= self.max_tokens else None
