"""Every value that a request may not ask for is refused by name; what is accepted cannot change."""

import math

import pytest

from soloist.errors import BadSampling, BadTokenId
from soloist.sampling import SamplingParams, StopTest

REFUSED = [
    ("temperature", -0.1),
    ("temperature", 0.001),
    ("temperature", 101.0),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", True),
    ("temperature", "1"),
    ("top_k", 0),
    ("top_k", -1),
    ("top_k", 2.0),
    ("top_k", True),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("top_p", math.nan),
    ("top_p", None),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", 101.0),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("frequency_penalty", False),
    ("seed", -1),
    ("seed", 2**64),
    ("seed", 1.0),
    ("seed", True),
    ("max_tokens", 0),
    ("max_tokens", 1.5),
    ("min_tokens", -1),
    ("min_tokens", 513),
    ("ignore_eos", 1),
    ("stop", "end"),
    ("stop", ("",)),
    ("stop", (1,)),
    ("stop_token_ids", {1}),
    ("stop_token_ids", frozenset({-1})),
    ("stop_token_ids", frozenset({"a"})),
    ("logit_bias", [1]),
    ("logit_bias", {1: 100.5}),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {"1": 1.0}),
]


@pytest.mark.parametrize(("field", "value"), REFUSED)
def test_unusable_values_are_refused_by_name(field, value):
    base = {"temperature": 1.0, field: value}
    with pytest.raises(BadSampling) as caught:
        SamplingParams(**base)
    assert field in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"), [("seed", 0), ("top_k", 5), ("top_p", 0.9), ("min_p", 0.1)]
)
def test_greedy_refuses_what_would_have_no_effect(field, value):
    with pytest.raises(BadSampling, match=f"leave {field}"):
        SamplingParams(**{field: value})


def test_token_ids_are_checked_against_the_vocabulary():
    SamplingParams(logit_bias={9: 1.0}, stop_token_ids=frozenset({9})).check_vocabulary(10)
    with pytest.raises(BadTokenId, match="logit_bias"):
        SamplingParams(logit_bias={10: 1.0}).check_vocabulary(10)
    with pytest.raises(BadTokenId, match="stop_token_ids"):
        SamplingParams(stop_token_ids=frozenset({10})).check_vocabulary(10)


def test_the_bias_is_a_copy_that_cannot_change():
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 3.0
    assert params.logit_bias == {1: 2.0}
    with pytest.raises(TypeError):
        params.logit_bias[1] = 3.0


def test_equal_params_hash_alike():
    assert hash(SamplingParams(logit_bias={1: 1.0})) == hash(SamplingParams(logit_bias={1: 1.0}))


def test_a_missing_seed_is_drawn_once():
    params = SamplingParams(temperature=1.0)
    first, second = params.with_seed(), params.with_seed()
    assert first.seed is not None
    assert first.seed != second.seed
    assert first.with_seed() is first
    assert SamplingParams().with_seed().seed is None


def test_describe_shows_effective_values_only():
    assert SamplingParams().describe() == {"temperature": 0.0, "max_tokens": 512}
    params = SamplingParams(
        temperature=1.0, logit_bias={1: 2.0}, stop=("x",), stop_token_ids=frozenset({2, 1})
    )
    assert params.describe() == {
        "temperature": 1.0,
        "logit_bias": {1: 2.0},
        "stop_token_ids": [1, 2],
        "max_tokens": 512,
        "stop": ["x"],
    }


def test_finish_reasons():
    params = SamplingParams(stop_token_ids=frozenset({7}), max_tokens=3)
    test = StopTest.for_request(params, eos_ids=(1, 2))
    assert test.ending_ids == {1, 2, 7}
    assert [test.finish_reason(t, 1) for t in (1, 2, 7, 5)] == ["eos", "eos", "stop", None]
    assert test.finish_reason(5, 3) == "length"
    assert test.finish_reason(1, 3) == "eos"


def test_ignored_eos_is_a_token_like_any_other():
    test = StopTest.for_request(SamplingParams(ignore_eos=True), eos_ids=(1,))
    assert test.finish_reason(1, 1) is None
    assert test.ending_ids == frozenset()
