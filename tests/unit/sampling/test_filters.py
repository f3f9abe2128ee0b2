"""Each filter against its literal definition, and against transformers where no scores tie."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from soloist.sampling import SamplingParams
from soloist.sampling.adjust import TokenCounts, adjusted
from soloist.sampling.elementary import integer_weights
from soloist.sampling.filters import ranked, survivors

# Few distinct values, so that ties are common and probabilities are far from every threshold.
TIED = st.lists(st.integers(-6, 6), min_size=1, max_size=40).map(
    lambda values: np.array(values, np.float32) / 2
)
SHARES = st.sampled_from([0.0625, 0.1, 0.3, 0.5, 0.77, 0.9, 0.95, 0.999])


def _in_order(scores):
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))


def _literal(scores, top_k=None, top_p=1.0, min_p=0.0):
    """The filters as one would say them, in float64; None where rounding could decide."""
    order = _in_order(scores)[: top_k or len(scores)]
    weight = {i: math.exp(float(scores[i]) - float(scores.max())) for i in order}
    if top_p < 1:
        total, summed, kept = sum(weight.values()), 0.0, []
        for i in order:
            kept.append(i)
            summed += weight[i]
            if abs(summed / total - top_p) < 1e-6:
                return None
            if summed >= top_p * total:
                break
        order = kept
    if any(abs(weight[i] - min_p) < 1e-6 for i in order):
        return None
    return sorted(i for i in order if weight[i] >= min_p)


@settings(max_examples=300, deadline=None)
@given(
    scores=TIED,
    top_k=st.none() | st.integers(1, 45),
    top_p=st.just(1.0) | SHARES,
    min_p=st.just(0.0) | SHARES,
)
def test_survivors_are_those_of_the_literal_definition(scores, top_k, top_p, min_p):
    expected = _literal(scores, top_k, top_p, min_p)
    params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
    ids = survivors(scores, params).tolist()
    assert len(ids) >= 1
    if expected is not None:
        assert ids == expected


@settings(max_examples=100, deadline=None)
@given(scores=TIED, count=st.integers(1, 40))
def test_ranking_breaks_ties_by_lowest_id(scores, count):
    count = min(count, len(scores))
    assert ranked(scores, count).tolist() == _in_order(scores)[:count]


@pytest.mark.parametrize("top_p", [1e-9, 0.25, 0.5, 0.9999999])
def test_nucleus_of_equal_scores_is_exact(top_p):
    # All weights are 2^32, so the smallest set is exactly ceil(p · V), p in steps of 2^-24.
    steps = max(1, round(top_p * 2**24))
    expected = math.ceil(Fraction(steps, 2**24) * 1000)
    params = SamplingParams(temperature=1.0, top_p=top_p)
    assert survivors(np.zeros(1000, np.float32), params).tolist() == list(range(expected))


def _exact_nucleus(scores, top_p):
    """By the weights of all tokens."""
    weights = integer_weights(scores - scores.max())
    order = np.lexsort((np.arange(len(scores)), -scores))
    summed = np.cumsum(weights[order])
    needed = math.ceil(Fraction(max(1, round(top_p * 2**24)), 2**24) * int(summed[-1]))
    return sorted(order[: int((summed < needed).sum()) + 1].tolist())


def test_a_wide_nucleus_needs_a_second_look():
    scores = np.random.default_rng(0).normal(size=20_000).astype(np.float32)
    ids = survivors(scores, SamplingParams(temperature=1.0, top_p=0.95))
    assert ids.tolist() == _exact_nucleus(scores, 0.95)
    assert len(ids) > 256


@pytest.mark.parametrize("kind", ["wide", "peaked", "few values", "banned", "one", "far"])
def test_nuclei_of_a_vocabulary_are_exact(kind):
    rng, sizes = np.random.default_rng(3), set()
    for number in range(60):
        scores = rng.normal(scale=3, size=30_000)
        if kind == "peaked":
            scores[rng.choice(30_000, 40, replace=False)] += rng.uniform(10, 30)
        elif kind == "few values":
            scores = np.rint(scores)
            scores[rng.choice(30_000, 300, replace=False)] += 12
        elif kind == "banned":
            scores[rng.random(30_000) < 0.99] = -np.inf
        elif kind == "one":
            scores[5] = 1000
        elif kind == "far":
            scores[rng.choice(30_000, 5, replace=False)] += 7.9 + scores.max()
        scores = scores.astype(np.float32)
        top_p = float(rng.choice([0.01, 0.5, 0.9, 0.95, 0.999, 0.9999999]))
        ids = survivors(scores, SamplingParams(temperature=1.0, top_p=top_p))
        assert ids.tolist() == _exact_nucleus(scores, top_p), number
        sizes.add(len(ids))
    assert len(sizes) > 1 or kind == "one"


def test_a_share_that_ends_right_at_a_token_is_exact():
    """The bounds of the total lie on both sides of the border there."""
    scores = np.full(20_000, -11.0, np.float32)
    scores[:4] = 0, -1, -1, -2
    weights = integer_weights(scores)
    for count in range(1, 5):
        share = int(weights[:count].sum()) / int(weights.sum())
        step = 2.0**-24
        for top_p in (share, share + step, share - step, share + step / 2):
            ids = survivors(scores, SamplingParams(temperature=1.0, top_p=top_p))
            assert ids.tolist() == _exact_nucleus(scores, top_p)


@pytest.mark.parametrize("min_p", [1e-9, 2.0**-24, 1e-5, 0.05, 0.3, 1.0])
def test_min_p_weighs_all_tokens_that_may_pass(min_p):
    scores = np.linspace(0, -20, 200_001, dtype=np.float32)
    kept = integer_weights(scores) >= math.ceil(
        Fraction(max(1, round(min_p * 2**24)), 2**24) * 2**32
    )
    ids = survivors(scores, SamplingParams(temperature=1.0, min_p=min_p))
    assert ids.tolist() == np.flatnonzero(kept).tolist()


def test_few_tokens_of_a_vocabulary_are_weighed(monkeypatch):
    weighed = []

    def counted(gaps):
        weighed.append(len(gaps))
        return integer_weights(gaps)

    monkeypatch.setattr("soloist.sampling.filters.integer_weights", counted)
    rng = np.random.default_rng(1)
    scores = rng.normal(scale=3, size=150_000).astype(np.float32)
    scores[:200] += np.linspace(30, 10, 200, dtype=np.float32)
    for params in ({"top_p": 0.9}, {"top_k": 20, "top_p": 0.9}, {"min_p": 0.05}):
        survivors(scores, SamplingParams(temperature=1.0, **params))
    assert max(weighed) <= 1024


def test_a_permuted_vocabulary_keeps_the_same_tokens():
    rng = np.random.default_rng(1)
    scores = rng.normal(scale=3, size=5000).astype(np.float32)
    mixing = rng.permutation(5000)
    params = SamplingParams(temperature=1.0, top_p=0.9, min_p=0.001)
    assert set(mixing[survivors(scores[mixing], params)]) == set(survivors(scores, params))


@pytest.mark.parametrize(
    ("warper", "params"),
    [
        (TopKLogitsWarper(20), {"top_k": 20}),
        (TopPLogitsWarper(0.9), {"top_p": 0.9}),
        (MinPLogitsWarper(0.05), {"min_p": 0.05}),
    ],
)
def test_supports_are_those_of_transformers(warper, params):
    for seed in range(20):
        scores = torch.randn(1, 500, generator=torch.Generator().manual_seed(seed)) * 3
        kept = torch.isfinite(warper(None, scores.clone())[0]).nonzero().flatten()
        ids = survivors(scores[0].numpy(), SamplingParams(temperature=1.0, **params))
        assert ids.tolist() == kept.tolist()


def test_repetition_penalty_is_that_of_transformers():
    logits = torch.randn(1, 200, generator=torch.Generator().manual_seed(0))
    seen = [3, 5, 5, 199]
    theirs = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([seen]), logits.clone())
    counts = TokenCounts(200, seen[:2])
    for token_id in seen[2:]:
        counts.add(token_id)
    ours = adjusted(logits[0].numpy(), SamplingParams(repetition_penalty=1.3), counts, ())
    assert np.array_equal(ours, theirs[0].numpy())


def test_presence_and_frequency_count_output_only():
    counts = TokenCounts(4, [0, 1])
    for token_id in (1, 2, 2):
        counts.add(token_id)
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    assert adjusted(np.zeros(4, np.float32), params, counts, ()).tolist() == [0, -0.75, -1, 0]


def test_bias_comes_after_penalties_and_the_ban_after_bias():
    logits = np.array([4.0, 1.0, 1.0], np.float32)
    params = SamplingParams(repetition_penalty=2.0, logit_bias={0: 1.0, 2: 50.0}, min_tokens=1)
    counts = TokenCounts(3, [0])
    assert adjusted(logits, params, counts, {2}).tolist() == [3, 1, -math.inf]
    counts.add(1)
    assert adjusted(logits, params, counts, {2}).tolist() == [3, 0.5, 51]
    assert logits.tolist() == [4, 1, 1]


def test_nothing_to_adjust_copies_nothing():
    logits = np.zeros(3, np.float32)
    assert adjusted(logits, SamplingParams(), TokenCounts(3, []), ()) is logits
