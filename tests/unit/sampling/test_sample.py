"""The choice itself: distributions, ties, reproducibility, errors, taking tokens back.

Statistical tests use fixed seeds: they give the same result on every machine. A bound of 10^-4 on
the p-value says how improbable the recorded draws may be under the exact distribution.
"""

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from soloist.errors import BadLogits, BadTokenId
from soloist.sampling import Sampler, SamplingParams
from soloist.sampling.adjust import TokenCounts
from soloist.sampling.logprobs import logprobs
from soloist.sampling.sample import Largest, sample

V = 40
LOGITS = np.random.default_rng(5).normal(scale=1.5, size=V).astype(np.float32)
DRAWS = 3000
LEAST_P_VALUE = 1e-4


def _exact(scores, kept):
    """Softmax over the kept ids in float64, zero elsewhere."""
    weights = np.exp(scores.astype(np.float64) - scores.max())
    share = np.zeros(len(scores))
    share[kept] = weights[kept]
    return share / share.sum()


def _draw(params, counts):
    picks = [sample(LOGITS, params, counts, position) for position in range(DRAWS)]
    return np.bincount(picks, minlength=V)


def _assert_drawn_from(seen, expected):
    assert (seen[expected == 0] == 0).all()
    # Cells that expect few draws are joined, as the chi-square approximation asks.
    order = np.argsort(expected)
    rare = order[np.cumsum(expected[order]) * DRAWS < 10]
    common = np.setdiff1d(np.flatnonzero(expected), rare)
    observed = np.append(seen[common], seen[rare].sum())
    wanted = np.append(expected[common], expected[rare].sum()) * DRAWS
    used = wanted > 0
    assert chisquare(observed[used], wanted[used]).pvalue > LEAST_P_VALUE


def _ranking(scores):
    return np.argsort(-scores, kind="stable")


def test_temperature_draws_from_the_softmax():
    params = SamplingParams(temperature=0.7, seed=1)
    _assert_drawn_from(_draw(params, TokenCounts(V, [])), _exact(LOGITS / 0.7, np.arange(V)))


def test_top_k_draws_from_the_k_best():
    params = SamplingParams(temperature=1.0, top_k=7, seed=2)
    expected = _exact(LOGITS, _ranking(LOGITS)[:7])
    _assert_drawn_from(_draw(params, TokenCounts(V, [])), expected)


def test_top_p_draws_from_the_nucleus():
    params = SamplingParams(temperature=1.3, top_p=0.8, seed=3)
    order = _ranking(LOGITS)
    share = _exact(LOGITS / 1.3, np.arange(V))[order]
    kept = order[: int((np.cumsum(share) < 0.8).sum()) + 1]
    _assert_drawn_from(_draw(params, TokenCounts(V, [])), _exact(LOGITS / 1.3, kept))


def test_min_p_draws_from_tokens_near_the_best():
    params = SamplingParams(temperature=1.0, min_p=0.1, seed=4)
    kept = np.flatnonzero(np.exp(LOGITS - LOGITS.max()) >= 0.1)
    _assert_drawn_from(_draw(params, TokenCounts(V, [])), _exact(LOGITS, kept))


def test_penalties_and_bias_shift_the_distribution():
    counts = TokenCounts(V, [1, 2])
    for token_id in (2, 3, 3):
        counts.add(token_id)
    params = SamplingParams(
        temperature=1.0,
        seed=2**64 - 1,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        logit_bias={9: 1.5},
    )
    scores = LOGITS.astype(np.float64)
    for token_id in (1, 2, 3):
        scores[token_id] *= 1.5 if scores[token_id] < 0 else 1 / 1.5
    scores[2] -= 0.5 + 0.3
    scores[3] -= 0.5 + 0.6
    scores[9] += 1.5
    _assert_drawn_from(_draw(params, counts), _exact(scores, np.arange(V)))


def test_seeds_and_positions_differ_and_repeat():
    def picks(seed):
        params = SamplingParams(temperature=1.0, seed=seed)
        return [sample(LOGITS, params, TokenCounts(V, []), position) for position in range(50)]

    assert picks(1) == picks(1)
    assert picks(1) != picks(2)
    assert picks(1) != picks(1 + 2**32)
    assert len(set(picks(1))) > 5


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.7, seed=1),
        SamplingParams(temperature=1.3, seed=1, presence_penalty=1.0, logit_bias={3: 2.0}),
        SamplingParams(temperature=1.0, seed=1, top_k=5),
        SamplingParams(temperature=1.0, seed=1, top_p=0.8),
        SamplingParams(temperature=1.0, seed=1, min_p=0.1),
    ],
    ids=str,
)
def test_what_is_prepared_for_a_position_changes_no_token(params):
    logits = torch.randn(9, 500, generator=torch.Generator().manual_seed(1))
    plain, prepared = (Sampler(params, 500, [4, 9]) for _ in range(2))
    for position, row in enumerate(logits, 2):
        prepared.prepare(position, row)
        token_id = prepared.pick(row, position)
        assert token_id == plain.pick(row, position)
        prepared.prepare(position + 7, row)  # another one than is picked
        assert token_id == prepared.pick(row, position)
        assert token_id == prepared.pick(row, position), "nothing is prepared any more"
        for sampler in (plain, prepared):
            sampler.observe(token_id)


def test_noise_is_made_where_it_is_prepared(monkeypatch):
    sampler = Sampler(SamplingParams(temperature=1.0, seed=1), 500, [4])
    sampler.prepare(1, torch.zeros(500))

    def late(*_: object) -> None:
        raise AssertionError("it was prepared")

    monkeypatch.setattr("soloist.sampling.sample.noise_of", late)
    sampler.pick(torch.zeros(500), 1)
    with pytest.raises(AssertionError):
        sampler.pick(torch.zeros(500), 1)


def test_choices_keep_their_tokens():
    logits = (np.arange(1000) % 17).astype(np.float32)
    params = SamplingParams(temperature=2.0, top_p=0.9, seed=99)
    picks = [sample(logits, params, TokenCounts(1000, []), position) for position in range(8)]
    assert picks == [440, 456, 458, 100, 999, 611, 184, 576]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_lowest_id_on_ties(dtype):
    logits = torch.zeros(V, dtype=dtype)
    logits[[5, 9, 30]] = 2
    assert Sampler(SamplingParams(), V, []).pick(logits, 0) == 5
    assert Sampler(SamplingParams(logit_bias={5: -1.0}), V, []).pick(logits, 0) == 9


def test_a_single_survivor_is_taken_whatever_the_seed():
    for seed in range(20):
        params = SamplingParams(temperature=1.0, top_k=1, seed=seed)
        assert sample(LOGITS, params, TokenCounts(V, []), 3) == LOGITS.argmax()


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.5, seed=1)])
@pytest.mark.parametrize(("index", "value"), [(3, np.nan), (0, np.inf), (slice(None), -np.inf)])
def test_logits_that_decide_nothing_are_refused(params, index, value):
    logits = LOGITS.copy()
    logits[index] = value
    with pytest.raises(BadLogits, match="position 8"):
        sample(logits, params, TokenCounts(V, []), 8)


@pytest.mark.parametrize(("index", "value"), [(3, np.nan), (0, np.inf), (slice(None), -np.inf)])
def test_the_largest_logit_is_refused_where_the_definition_refuses_it(index, value):
    logits = torch.tensor(LOGITS)
    logits[index] = float(value)
    with pytest.raises(BadLogits, match="position 8"):
        Largest(logits).wait(8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_logit_is_what_greedy_takes(dtype):
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        logits = torch.randn(V, generator=generator).to(dtype)
        logits[torch.randint(V, (3,), generator=generator)] = 4.0  # equal ones: the lowest id
        wanted = sample(logits.float().numpy(), SamplingParams(), TokenCounts(V, []), 0)
        assert Largest(logits).wait(0) == wanted


@pytest.mark.parametrize(
    ("params", "takes_it"),
    [
        (SamplingParams(), True),
        (SamplingParams(min_tokens=1, stop_token_ids=frozenset({3})), False),
        (SamplingParams(min_tokens=1), True),
        (SamplingParams(temperature=0.1, seed=1), False),
        (SamplingParams(logit_bias={5: 1.0}), False),
        (SamplingParams(presence_penalty=0.1), False),
    ],
)
def test_who_takes_the_largest_logit(params, takes_it):
    assert Sampler(params, V, [1]).takes_the_largest is takes_it


def test_the_ban_on_ending_passes():
    sampler = Sampler(SamplingParams(min_tokens=1), V, [1], eos_ids=[2])
    assert not sampler.takes_the_largest
    sampler.observe(4)
    assert sampler.takes_the_largest


@pytest.mark.parametrize("token_id", [-1, V, 2**70, -(2**70)])
def test_a_prompt_outside_the_vocabulary_is_refused(token_id):
    with pytest.raises(BadTokenId, match=str(token_id)):
        TokenCounts(V, [1, token_id, 2])


def test_an_overflow_by_temperature_is_refused():
    logits = np.full(V, 3e38, np.float32)
    with pytest.raises(BadLogits):
        sample(logits, SamplingParams(temperature=0.01, seed=1), TokenCounts(V, []), 0)


def test_masked_tokens_are_never_chosen():
    logits = LOGITS.copy()
    logits[::2] = -np.inf
    params = SamplingParams(temperature=100.0, seed=1)
    picks = {sample(logits, params, TokenCounts(V, []), position) for position in range(500)}
    assert all(token_id % 2 == 1 for token_id in picks)


def test_a_seed_is_needed_by_the_pure_form_and_drawn_by_the_sampler():
    params = SamplingParams(temperature=1.0)
    with pytest.raises(ValueError, match="seed"):
        sample(LOGITS, params, TokenCounts(V, []), 0)
    assert Sampler(params, V, []).params.seed is not None


def test_min_tokens_bans_every_ending():
    logits = torch.zeros(V)
    logits[[1, 2]] = 5
    params = SamplingParams(min_tokens=2, stop_token_ids=frozenset({2}))
    sampler = Sampler(params, V, [4], eos_ids=[1])
    picks = []
    for position in range(1, 4):
        picks.append(sampler.pick(logits, position))
        sampler.observe(picks[-1])
    assert picks == [0, 0, 1]
    assert sampler.stop_test.finish_reason(1, 3) == "eos"


def test_rollback_undoes_observe():
    params = SamplingParams(frequency_penalty=2.0)
    logits = torch.tensor([3.0, 2.0, 0.0])
    sampler = Sampler(params, 3, [])
    assert sampler.pick(logits, 0) == 0
    sampler.observe(0)
    assert sampler.pick(logits, 1) == 1
    sampler.observe(1)
    sampler.rollback(2)
    assert sampler.output_ids == []
    assert sampler.pick(logits, 0) == 0
    with pytest.raises(ValueError, match="take back"):
        sampler.rollback(1)


def test_ids_and_shapes_outside_the_vocabulary_are_refused():
    for token_id in (V, -1, 2**31, -(2**40), 2**70):
        with pytest.raises(BadTokenId, match="prompt"):
            Sampler(SamplingParams(), V, [1, token_id])
    with pytest.raises(BadTokenId, match="eos_ids"):
        Sampler(SamplingParams(), V, [], eos_ids=[V])
    with pytest.raises(BadTokenId, match="stop_token_ids"):
        Sampler(SamplingParams(stop_token_ids=frozenset({V})), V, [])
    sampler = Sampler(SamplingParams(), V, [])
    with pytest.raises(BadTokenId, match="output"):
        sampler.observe(-1)
    with pytest.raises(ValueError, match="shape"):
        sampler.pick(torch.zeros(1, V), 0)


def test_logprobs_are_the_log_softmax_of_raw_logits():
    logits = torch.from_numpy(LOGITS)
    expected = torch.log_softmax(logits.double(), 0)
    found = logprobs(logits, 3, top=4)
    assert found.chosen == pytest.approx(float(expected[3]), abs=1e-12)
    assert [token_id for token_id, _ in found.top] == expected.topk(4).indices.tolist()
    assert [value for _, value in found.top] == pytest.approx(expected.topk(4).values.tolist())
    assert logprobs(logits, 3).top == ()


def test_the_likeliest_tokens_tie_by_lowest_id():
    assert [i for i, _ in logprobs(torch.zeros(5), 0, top=3).top] == [0, 1, 2]
