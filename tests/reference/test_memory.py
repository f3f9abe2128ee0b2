"""What the reference says that it takes, against what a tiny model really takes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from soloist.kv.memory import kv_bytes_per_token
from soloist.model.dtype import Dtype
from soloist.model.families import read_config, tensors
from soloist.model.kv_format import KvName, kv_format, plain
from soloist.reference.build import build_reference
from soloist.reference.cache import Scratch
from soloist.reference.memory import MOST_READERS, rope_table_bytes, scratch_bytes
from soloist.weights.memory import row_bytes
from soloist.weights.random import random_weights
from unit.model.configurations import (
    GEMMA3_1B,
    GLM_45_AIR,
    LANEFORMER_2B,
    LLAMA_31_8B,
    MISTRAL_7B,
    PUBLISHED,
    QWEN3_17B,
    QWEN3_30B_A3B,
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
    "norms all around": changed(
        GEMMA3_1B, **SMALL, num_hidden_layers=2, sliding_window=100, sliding_window_pattern=2
    ),
    "experts": changed(
        QWEN3_30B_A3B,
        **SMALL,
        num_hidden_layers=2,
        moe_intermediate_size=40,
        num_experts=12,
        num_experts_per_tok=3,
    ),
    "shared experts": changed(
        GLM_45_AIR,
        **SMALL,
        num_hidden_layers=3,
        moe_intermediate_size=72,
        n_routed_experts=24,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
    ),
    "lanes": changed(
        LANEFORMER_2B,
        **SMALL,
        num_hidden_layers=6,
        sliding_window=100,
        swa_layers=[0, 1],
    ),
}


def held_bytes(*held: torch.Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in held)


@pytest.mark.parametrize("dtype", list(Dtype), ids=lambda d: d.value)
@pytest.mark.parametrize("name", TINY)
def test_the_estimate_holds(
    name: str, dtype: Dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, chunk = 700, 64
    # Small enough that scores go through in tiles; and scratch stays to be measured.
    for module in ("memory", "blocks"):
        monkeypatch.setattr(f"soloist.reference.{module}.SCORE_VALUES", 2**15)
    monkeypatch.setattr("soloist.reference.device.KEPT_TOKENS", chunk)
    config = read_config(written(tmp_path, TINY[name]))
    specs, needed = tensors(config), scratch_bytes(config, dtype, context, chunk)
    weights = random_weights(specs, dtype, torch.device("cpu"))
    assert row_bytes(specs, dtype) == held_bytes(*weights.values())
    model = build_reference(config, weights)
    cache = model.new_cache(context)
    assert cache.num_bytes == kv_bytes_per_token(config, plain(dtype)) * context
    kept, tokens = 0, chunk // MOST_READERS  # of each reader
    for start in range(0, context - tokens, tokens):
        model._scratch = Scratch(model.device)
        model.forward(torch.ones(tokens, dtype=torch.int64), start, cache)
        kept = max(kept, MOST_READERS * model._scratch.num_bytes)
    assert model._rotaries
    rope_bytes = held_bytes(*(x for rotary in model._rotaries for x in (rotary.cos, rotary.sin)))
    assert rope_bytes == rope_table_bytes(config, context)
    kept += rope_bytes
    assert kept <= needed, "the estimate is too low"
    # What only passes by (copies, and of lanes their partial results) is counted, but not kept.
    most = 6 if config.lanes else 3 if dtype is Dtype.FP32 else 4
    assert needed <= most * kept, "the estimate is far too high"


@pytest.mark.parametrize("dtype", [Dtype.FP32, Dtype.BF16], ids=lambda d: d.value)
@pytest.mark.parametrize("kv", ["int8", "fp8", "int4"])
def test_numbers_that_codes_stand_for_are_counted(kv: KvName, dtype: Dtype, tmp_path: Path) -> None:
    context, chunk = 700, 64
    config = read_config(written(tmp_path, changed(TINY["norms"], head_dim=32)))
    stored = kv_format(kv, config, dtype)
    weights = random_weights(tensors(config), dtype, torch.device("cpu"))
    cache = build_reference(config, weights, stored).new_cache(context)
    assert cache.num_bytes == kv_bytes_per_token(config, stored) * context
    plainly = scratch_bytes(config, dtype, context, chunk)
    more = scratch_bytes(config, dtype, context, chunk, kv=stored) - plainly
    read = MOST_READERS * held_bytes(*cache.view(0, 0, context))
    # In fp32 before it is rounded, and codes of 4 bits apart.
    assert read < more <= 4 * read


@pytest.mark.parametrize("name", PUBLISHED)
def test_more_of_anything_needs_more(name: str, tmp_path: Path) -> None:
    config = read_config(written(tmp_path, PUBLISHED[name]))
    base = scratch_bytes(config, Dtype.BF16, 1000, 128)
    assert scratch_bytes(config, Dtype.BF16, 1001, 128) > base
    assert scratch_bytes(config, Dtype.BF16, 1000, 129) > base
