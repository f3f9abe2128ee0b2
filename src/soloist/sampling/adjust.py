"""From logits to scores: what is not allowed, penalties, bias, the ban on ending early; fp32."""

import struct
from collections.abc import Iterable
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from soloist.errors import BadTokenId
from soloist.sampling.constraint import Words, flags_of
from soloist.sampling.elementary import FloatArray
from soloist.sampling.params import SamplingParams


class TokenCounts:
    """What prompt and output hold of each token; adding and taking back are exact opposites.

    Attributes:
        prompt_ids: [T] int64.
        num_output: tokens in the output.

    Raises:
        BadTokenId: the prompt holds a token outside the vocabulary.
    """

    def __init__(self, vocab_size: int, prompt_ids: Iterable[int]) -> None:
        self._vocab_size = vocab_size
        self._output = list[int]()
        self.num_output = 0
        # A first token waits for this, so lists are read once for all who need it, and by what
        # reads them in a third of numpy's time.
        given = tuple(prompt_ids)
        try:
            packed = struct.Struct(f"{len(given)}i").pack(*given)
        except struct.error as error:
            raise BadTokenId("prompt", max(given, key=abs), vocab_size) from error
        self.prompt_ids = np.frombuffer(packed, np.int32).astype(np.int64)
        if len(self.prompt_ids):
            self._check(int(self.prompt_ids.min()))
            self._check(int(self.prompt_ids.max()))

    @cached_property
    def in_prompt(self) -> NDArray[np.bool_]:
        """[V]; made when it is asked for, since few requests do."""
        held = np.zeros(self._vocab_size, np.bool_)
        held[self.prompt_ids] = True
        return held

    @cached_property
    def in_output(self) -> NDArray[np.int32]:
        """[V] int32, how often; made when it is asked for, and kept up from then on."""
        counted = np.bincount(np.array(self._output, np.int64), minlength=self._vocab_size)
        return counted.astype(np.int32)

    def add(self, token_id: int) -> None:
        """Append a token to the output."""
        self._check(token_id)
        self._count(token_id, 1)
        self._output.append(token_id)
        self.num_output += 1

    def remove(self, token_id: int) -> None:
        """Take the latest token of the output back, which is this one."""
        taken = self._output.pop()
        assert taken == token_id, "it is the latest"
        self._count(token_id, -1)
        self.num_output -= 1

    def as_they_are(self, *, each_token: bool) -> Self:
        """The same counts, whatever is added here later.

        Args:
            each_token: how often the output has each token stays, too, and not its length alone:
                a copy of V numbers, which penalties want.
        """
        counts = object.__new__(type(self))
        vars(counts).update(vars(self))  # as `copy` has it, in a fifth of its time
        if each_token:
            counts.in_output = self.in_output.copy()
        return counts

    def _check(self, token_id: int) -> None:
        if not 0 <= token_id < self._vocab_size:
            raise BadTokenId("prompt or output", token_id, self._vocab_size)

    def _count(self, token_id: int, by: int) -> None:
        if "in_output" in vars(self):
            self.in_output[token_id] += by


def adjusted(
    logits: FloatArray,
    params: SamplingParams,
    counts: TokenCounts,
    ending_ids: Iterable[int],
    allowed: Words | None = None,
) -> FloatArray:
    """The scores that a token is chosen by, before temperature.

    Args:
        logits: [V] fp32; left as they are.
        params: penalties, bias and min_tokens are used.
        counts: prompt and output so far.
        ending_ids: tokens that end generation; banned while the output is shorter than min_tokens.
        allowed: bits [ceil(V / 32)] of the tokens that may be chosen; None for all.

    Returns:
        [V] fp32, `logits` itself where nothing is to be adjusted.
    """
    is_banned = counts.num_output < params.min_tokens
    if not (params.has_penalties or params.logit_bias or is_banned or allowed is not None):
        return logits
    scores = logits.copy()
    if allowed is not None:
        scores[~flags_of(allowed, len(logits))] = -np.inf
    if params.has_penalties:
        _penalize(scores, params, counts)
    for token_id, bias in params.logit_bias.items():
        scores[token_id] += np.float32(bias)
    if is_banned:
        scores[list(ending_ids)] = -np.inf
    return scores


def _penalize(scores: FloatArray, params: SamplingParams, counts: TokenCounts) -> None:
    repetition = np.float32(params.repetition_penalty)
    frequency = np.float32(params.frequency_penalty)
    presence = np.float32(params.presence_penalty)
    output = np.flatnonzero(counts.in_output)
    if repetition != 1:
        seen = np.flatnonzero(counts.in_prompt | (counts.in_output > 0))
        chosen = scores[seen]
        scores[seen] = np.where(chosen < 0, chosen * repetition, chosen / repetition)
    scores[output] -= frequency * counts.in_output[output].astype(np.float32)
    scores[output] -= presence
