"""Inverse frequencies of every rule against transformers, and their plain properties."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from soloist.model.families.dense import read_rope
from soloist.model.reading import Fields
from soloist.model.rope import LinearScaling, Rope, YarnScaling, yarn_attention_factor
from unit.model.configurations import LLAMA3_RULES

# fp32 arithmetic on their side.
RELATIVE_BOUND = 1e-6

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
RULES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "linear, odd factor": {"rope_type": "linear", "factor": 2.7},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama 3.2": LLAMA3_RULES,
    "llama 3.1": {**LLAMA3_RULES, "factor": 8.0},
    "llama3, wide blend": {**LLAMA3_RULES, "low_freq_factor": 0.5, "high_freq_factor": 31.0},
    "yarn": YARN,
    "yarn, attention factor": {**YARN, "attention_factor": 0.77},
    "yarn, both mscales": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.4},
    "yarn, one mscale": {**YARN, "mscale": 0.707},
    "yarn, not truncated": {**YARN, "truncate": False},
    "yarn, betas": {**YARN, "beta_fast": 4.0, "beta_slow": 0.5, "factor": 40.0},
    "yarn, one border": {**YARN, "beta_fast": 2.0, "beta_slow": 2.0, "truncate": False},
    "yarn, borders outside": {**YARN, "original_max_position_embeddings": 16},
    "yarn, no growth": {**YARN, "factor": 1.0},
}


def ours(rules: dict[str, Any], theta: float, head_dim: int) -> Rope:
    values = {"rope_theta": theta, "rope_scaling": rules, "max_position_embeddings": 131072}
    return read_rope(Fields(values, "config.json", "phi3"), None, head_dim, share=1.0)


@pytest.mark.parametrize("theta", [500.0, 10_000.0, 1_000_000.0])
@pytest.mark.parametrize("head_dim", [6, 64, 96, 128])
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES.keys())
def test_equals_transformers(rules: dict[str, Any], head_dim: int, theta: float) -> None:
    config = LlamaConfig(
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters={"rope_theta": theta, **rules},
    )
    wanted, factor = ROPE_INIT_FUNCTIONS[rules["rope_type"]](config, torch.device("cpu"))
    rope = ours(rules, theta, head_dim)
    seen = torch.tensor(rope.inverse_frequencies(head_dim), dtype=torch.float64)
    wanted = wanted.double()
    difference = ((seen - wanted) / wanted).abs()
    worst = int(difference.argmax())
    assert difference[worst] <= RELATIVE_BOUND, (
        f"pair {worst}: {seen[worst]:.9g}, wanted {wanted[worst]:.9g}"
    )
    assert rope.attention_factor == pytest.approx(factor, rel=RELATIVE_BOUND)


@pytest.mark.parametrize(
    "rules",
    [{}, {"factor": 8.0}, {"attention_factor": 0.9}, {"factor": 0.5}],
    ids=["context", "factor", "attention factor", "no growth"],
)
@pytest.mark.parametrize("share", [1.0, 0.75])
@pytest.mark.parametrize("context", [4096, 4097])
def test_longrope_equals_transformers(rules: dict[str, Any], share: float, context: int) -> None:
    pairs = int(64 * share) // 2
    rules = {
        "rope_type": "longrope",
        "short_factor": [1 + i / 64 for i in range(pairs)],
        "long_factor": [1.5 * 1.1**i for i in range(pairs)],
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": share,
        **rules,
    }
    config = LlamaConfig(
        head_dim=64,
        max_position_embeddings=131072,
        rope_parameters={"rope_theta": 10_000.0, **rules},
    )
    function = ROPE_INIT_FUNCTIONS["longrope"]
    wanted, factor = function(config, torch.device("cpu"), seq_len=context)
    rope = ours(rules, 10_000.0, 64).for_context(context)
    seen = torch.tensor(rope.inverse_frequencies(64), dtype=torch.float64)
    torch.testing.assert_close(seen, wanted.double(), rtol=RELATIVE_BOUND, atol=0)
    assert rope.attention_factor == pytest.approx(factor, rel=RELATIVE_BOUND)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dims", [2, 6, 8, 12])
def test_the_order_in_halves_keeps_pairs(interleaved: bool, dims: int) -> None:
    rope = Rope(1e4, interleaved=interleaved, share=dims / 12)
    order = rope.order_in_halves(12)
    assert sorted(order) == list(range(12))
    apart = 1 if interleaved else dims // 2
    for i, (first, second) in enumerate(zip(order[:6], order[6:], strict=True)):
        if i < dims // 2:  # turned by the i-th frequency
            assert (first, second) == ((2 * i if interleaved else i), first + apart)
        else:
            assert min(first, second) >= dims
    assert rope.is_in_halves(12) is (dims == 12 and not interleaved)


@given(
    theta=st.floats(1.5, 1e8),
    head_dim=st.integers(1, 128).map(lambda n: 2 * n),
)
def test_plain_frequencies_fall_from_one(theta: float, head_dim: int) -> None:
    frequencies = Rope(theta).inverse_frequencies(head_dim)
    assert len(frequencies) == head_dim // 2
    assert frequencies[0] == 1.0
    assert all(a > b for a, b in pairwise(frequencies))


@given(
    factor=st.floats(1.0, 64.0),
    original=st.integers(16, 10**6),
    fast=st.floats(1.0, 64.0),
    slow=st.floats(0.01, 1.0),
    truncate=st.booleans(),
    theta=st.floats(100.0, 1e7),
)
@settings(max_examples=60)
def test_yarn_lies_between_plain_and_interpolated(
    factor: float, original: int, fast: float, slow: float, truncate: bool, theta: float
) -> None:
    scaling = YarnScaling(factor, original, fast, slow, 1.0, truncate)
    plain = Rope(theta).inverse_frequencies(64)
    for seen, kept in zip(Rope(theta, scaling).inverse_frequencies(64), plain, strict=True):
        assert kept / factor * (1 - 1e-9) <= seen <= kept * (1 + 1e-9)


def test_interpolation_keeps_the_temperature() -> None:
    assert Rope(1e4).attention_factor == 1.0
    assert Rope(1e4, LinearScaling(4.0)).attention_factor == 1.0
    assert yarn_attention_factor(0.5) == 1.0
    assert yarn_attention_factor(1.0) == 1.0
    assert yarn_attention_factor(2.718281828459045) == pytest.approx(1.1)
