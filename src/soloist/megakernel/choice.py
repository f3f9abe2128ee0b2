"""How the queries of a launch choose their tokens, packed for the kernel. No torch, no device."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from soloist.megakernel.abi import SAMPLE_PARAMS, SAMPLE_STEP
from soloist.megakernel.limits import MAX_QUERIES
from soloist.megakernel.sampling_header import (
    SEEN_IN_PROMPT,
    ListSpan,
    packed_params,
    packed_steps,
)
from soloist.sampling.adjust import TokenCounts
from soloist.sampling.constraint import Words
from soloist.sampling.params import SamplingParams

_LARGEST = SamplingParams()


@dataclass(frozen=True, slots=True)
class Choice:
    """How a query's tokens are chosen where the largest logit alone does not decide.

    Attributes:
        params: what the request asks for; with a seed, unless greedy.
        counts: prompt and output when the launch starts, the query's first input token included.
            The kernel counts on from there by itself; this one stays as it is.
        ending_ids: token ids that are banned while the output is shorter than min_tokens.
        allowed: bits [ceil(V / 32)] of the tokens that the first choice of the launch may take; the
            host says before every further one what it may take (`Decoder.allow`). None for all.
    """

    params: SamplingParams
    counts: TokenCounts
    ending_ids: frozenset[int] = frozenset()
    allowed: Words | None = None


@dataclass(frozen=True, slots=True)
class PackedChoices:
    """Choices as the kernel reads them.

    Attributes:
        params: [MAX_QUERIES] of `SAMPLE_PARAMS`.
        steps: [MAX_QUERIES] of `SAMPLE_STEP`, for the first round.
        list_ids: token ids of all bans and biases.
        list_values: biases at the same places, zeros beside bans.
        seen: by query that has penalties, [V]: times in the output, and `SEEN_IN_PROMPT`.
        masks: by query that the host says tokens of, bits [ceil(V / 32)] for its first choice.
    """

    params: NDArray[np.void]
    steps: NDArray[np.void]
    list_ids: NDArray[np.uint32]
    list_values: NDArray[np.float32]
    seen: dict[int, NDArray[np.uint32]]
    masks: dict[int, Words]


def pack_choices(
    choices: Sequence[Choice | None], positions: Sequence[int], vocab_size: int
) -> PackedChoices:
    """Pack one choice a query, None for the largest logit.

    Args:
        choices: at most MAX_QUERIES.
        positions: of the queries' first input tokens; the first choice is for the next position.
        vocab_size: V.
    """
    params, steps = (np.zeros(MAX_QUERIES, s.dtype) for s in (SAMPLE_PARAMS, SAMPLE_STEP))
    ids: list[int] = []
    values: list[float] = []
    seen: dict[int, NDArray[np.uint32]] = {}
    masks: dict[int, Words] = {}

    def span(items: dict[int, float]) -> ListSpan:
        begin = len(ids)
        ids.extend(items)
        values.extend(items.values())
        return ListSpan(begin, len(items))

    packed: dict[tuple[int, frozenset[int], bool], NDArray[np.void]] = {}
    for query, choice in enumerate(choices):
        asked, banned = _LARGEST if choice is None else choice.params, frozenset[int]()
        if choice is not None:
            assert asked.is_greedy or asked.seed is not None, "a seed, unless greedy"
            if choice.counts.num_output < asked.min_tokens:
                banned = choice.ending_ids
            if asked.has_penalties:
                seen[query] = seen_words(choice.counts)
            if choice.allowed is not None:
                masks[query] = choice.allowed
        is_masked = query in masks
        # Queries that check a draft are of one request: most differ in nothing here.
        like = id(asked), banned, is_masked
        if like not in packed:
            ban = span(dict.fromkeys(sorted(banned), 0.0)) if banned else ListSpan()
            bias = span(dict(asked.logit_bias))
            packed[like] = packed_params(
                asked, vocab_size, ban, bias, history=query, is_masked=is_masked
            )
        params[query] = packed[like]
    count = len(choices)
    params["history"][:count] = range(count)
    num_outputs = [0 if c is None else c.counts.num_output for c in choices]
    steps[:count] = packed_steps([position + 1 for position in positions], num_outputs)
    return PackedChoices(
        params, steps, np.array(ids, np.uint32), np.array(values, np.float32), seen, masks
    )


def seen_words(counts: TokenCounts) -> NDArray[np.uint32]:
    """[V] words of the kernel's `seen`."""
    return counts.in_output.astype(np.uint32) | counts.in_prompt * np.uint32(SEEN_IN_PROMPT)
