"""Choices as the kernel reads them."""

import numpy as np
import pytest

from soloist.megakernel.choice import Choice, pack_choices, seen_words
from soloist.megakernel.sampling_header import NO_TOKEN, SEEN_IN_PROMPT, bad_score
from soloist.sampling import SamplingParams
from soloist.sampling.adjust import TokenCounts

VOCAB = 50


def counts_of(prompt: list[int], output: list[int]) -> TokenCounts:
    counts = TokenCounts(VOCAB, prompt)
    for token_id in output:
        counts.add(token_id)
    return counts


def test_words_count_the_output_and_mark_the_prompt() -> None:
    words = seen_words(counts_of([1, 1, 2], [2, 3, 3]))
    assert words.dtype == np.uint32
    assert {i: int(words[i]) for i in np.flatnonzero(words)} == {
        1: SEEN_IN_PROMPT, 2: SEEN_IN_PROMPT + 1, 3: 2,
    }  # fmt: skip


def test_queries_share_the_lists() -> None:
    counts = counts_of([4], [5, 6])
    choices = [
        Choice(SamplingParams(logit_bias={9: 2.5}, min_tokens=3), counts, frozenset({8, 7})),
        None,
        Choice(SamplingParams(min_tokens=2), counts, frozenset({8})),
        Choice(SamplingParams(temperature=1, seed=2, presence_penalty=1), counts),
    ]
    packed = pack_choices(choices, [10, 20, 30, 40], VOCAB)
    assert packed.list_ids.tolist() == [7, 8, 9]
    assert packed.list_values.tolist() == [0, 0, 2.5]
    spans = [tuple(int(p[f"{x}_{y}"]) for x in ("ban", "bias") for y in ("begin", "count"))
             for p in packed.params[:4]]  # fmt: skip
    assert spans == [(0, 2, 2, 1), (0, 0, 3, 0), (0, 0, 3, 0), (0, 0, 3, 0)], "two tokens are made"
    assert packed.params["history"][:4].tolist() == [0, 1, 2, 3]
    assert list(packed.seen) == [3]
    # The next position, and how much output there is.
    assert packed.steps["position_low"].tolist() == [11, 21, 31, 41, 0, 0, 0, 0]
    assert packed.steps["num_output"].tolist() == [2, 0, 2, 2, 0, 0, 0, 0]


def test_packing_leaves_the_counts_alone() -> None:
    counts = counts_of([], [1])
    params = SamplingParams(frequency_penalty=1)
    packed = pack_choices([Choice(params, counts)], [0], VOCAB)
    counts.add(1)
    assert packed.seen[0][1] == 1


def test_sampling_needs_a_seed() -> None:
    choice = Choice(SamplingParams(temperature=1.0), counts_of([], []))
    with pytest.raises(AssertionError, match="a seed"):
        pack_choices([choice], [0], VOCAB)


def test_words_that_are_no_token() -> None:
    words = [word for word, _ in NO_TOKEN.values()]
    assert len(set(words)) == 3
    assert min(words) > 2**31
    assert {str(bad_score(word)) for word in words} == {"nan", "inf", "-inf"}
