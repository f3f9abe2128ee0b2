"""The memory estimate against what a tiny model really takes, and refusals that name what fits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from soloist.errors import OutOfMemory, gigabytes
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.families import read_config, tensors
from soloist.model.memory import (
    HEADROOM_BYTES,
    MOST_READERS,
    estimate,
    fitting_context,
    kv_bytes_per_token,
    require_memory,
)
from soloist.model.tensors import TensorSpec
from soloist.reference import build_reference
from soloist.reference.cache import Scratch
from soloist.weights.random import random_weights
from unit.model.configurations import (
    LANEFORMER_2B,
    LLAMA_31_8B,
    MISTRAL_7B,
    PUBLISHED,
    QWEN3_17B,
    changed,
    written,
)

SMALL = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 2048,
    "rope_scaling": None,
}
TINY: dict[str, dict[str, Any]] = {
    "norms": changed(QWEN3_17B, **SMALL, num_hidden_layers=2),
    "biases": changed(LLAMA_31_8B, **SMALL, num_hidden_layers=3, attention_bias=True),
    "window": changed(MISTRAL_7B, **SMALL, num_hidden_layers=2, sliding_window=100),
    "lanes": changed(
        LANEFORMER_2B,
        **SMALL,
        num_hidden_layers=6,
        sliding_window=100,
        swa_layers=[0, 1],
    ),
}


def model_of(folder: Path, values: dict[str, Any]) -> tuple[ModelConfig, tuple[TensorSpec, ...]]:
    config = read_config(written(folder, values))
    return config, tensors(config)


def held_bytes(held: torch.Tensor) -> int:
    return held.numel() * held.element_size()


@pytest.mark.parametrize("dtype", list(Dtype), ids=lambda d: d.value)
@pytest.mark.parametrize("name", TINY)
def test_the_estimate_holds(
    name: str, dtype: Dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, chunk = 700, 64
    # Small enough that scores go through in tiles; and scratch stays to be measured.
    for module in ("model.memory", "reference.blocks"):
        monkeypatch.setattr(f"soloist.{module}.SCORE_VALUES", 2**15)
    monkeypatch.setattr("soloist.reference.device.KEPT_TOKENS", chunk)
    config, specs = model_of(tmp_path, TINY[name])
    needs = estimate(config, specs, dtype, context, chunk)
    weights = random_weights(specs, dtype, torch.device("cpu"))
    assert needs.weights_bytes == sum(held_bytes(w) for w in weights.values())
    model = build_reference(config, weights)
    cache = model.new_cache(context)
    assert needs.kv_bytes == cache.num_bytes == kv_bytes_per_token(config, dtype) * context
    kept, tokens = 0, chunk // MOST_READERS  # of each reader
    for start in range(0, context - tokens, tokens):
        model._scratch = Scratch(model.device)
        model.forward(torch.ones(tokens, dtype=torch.int64), start, cache)
        kept = max(kept, MOST_READERS * model._scratch.num_bytes)
    assert model._rotary is not None
    kept += held_bytes(model._rotary.cos) + held_bytes(model._rotary.sin)
    assert kept <= needs.scratch_bytes, "the estimate is too low"
    # What only passes by (copies, and of lanes their partial results) is counted, but not kept.
    most = 6 if config.lanes else 3 if dtype is Dtype.FP32 else 4
    assert needs.scratch_bytes <= most * kept, "the estimate is far too high"
    assert needs.total_bytes == needs.weights_bytes + needs.kv_bytes + needs.scratch_bytes


@pytest.mark.parametrize("name", PUBLISHED)
def test_more_of_anything_needs_more(name: str, tmp_path: Path) -> None:
    config, specs = model_of(tmp_path, PUBLISHED[name])
    base = estimate(config, specs, Dtype.BF16, 1000, 128).total_bytes
    assert estimate(config, specs, Dtype.BF16, 1001, 128).total_bytes > base
    assert estimate(config, specs, Dtype.BF16, 1000, 129).total_bytes > base
    assert estimate(config, specs, Dtype.FP32, 1000, 128).total_bytes > base


@given(
    name=st.sampled_from(["llama-3.2-1b", "laneformer-2b", "mistral-7b-v0.1", "qwen3-1.7b"]),
    dtype=st.sampled_from(list(Dtype)),
    gigabytes_there=st.floats(0.1, 80),
    chunk=st.sampled_from([16, 256, 1024]),
)
@settings(max_examples=60, deadline=None)
def test_the_named_context_fits_and_one_more_does_not(
    name: str,
    dtype: Dtype,
    gigabytes_there: float,
    chunk: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    config, specs = model_of(tmp_path_factory.mktemp("config"), PUBLISHED[name])
    there = int(gigabytes_there * 1e9)
    longest = fitting_context(config, specs, dtype, there, chunk)
    assert 0 <= longest <= config.context_tokens
    assert fitting_context(config, specs, dtype, there + 10**8, chunk) >= longest
    if longest:
        require_memory(config, specs, dtype, longest, there, chunk)
    if longest < config.context_tokens:
        with pytest.raises(OutOfMemory) as caught:
            require_memory(config, specs, dtype, longest + 1, there, chunk)
        if longest:
            assert caught.value.hint.endswith(f"--context {longest}")


def test_refusals_name_what_fits(tmp_path: Path) -> None:
    config, specs = model_of(tmp_path, LLAMA_31_8B)

    def refusal(dtype: Dtype, there: int) -> OutOfMemory:
        with pytest.raises(OutOfMemory) as caught:
            require_memory(config, specs, dtype, 131072, there, 256)
        assert "nothing was allocated" in caught.value.message
        assert gigabytes(there) in caught.value.message
        assert caught.value.available_bytes == there < caught.value.needed_bytes
        return caught.value

    shorter = refusal(Dtype.BF16, 20 * 10**9)
    assert "weights 16.1 GB" in shorter.message
    assert "--context" in shorter.hint
    other = refusal(Dtype.FP32, 20 * 10**9)
    assert "--precision bf16 --context" in other.hint
    assert "billion parameters fit in bf16" in refusal(Dtype.BF16, 10 * 10**9).hint
    assert refusal(Dtype.BF16, 0).hint


def test_the_sum_includes_the_reserve(tmp_path: Path) -> None:
    config, specs = model_of(tmp_path, TINY["norms"])
    needs = estimate(config, specs, Dtype.FP32, 100, 16).total_bytes + HEADROOM_BYTES
    require_memory(config, specs, Dtype.FP32, 100, needs, 16)
    with pytest.raises(OutOfMemory):
        require_memory(config, specs, Dtype.FP32, 100, needs - 1, 16)
