"""Keys and values in 8 and 4 bits: the plan and its layout give the reference's logits."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from interpreter import lane_models
from interpreter.mixtures import MIXTURES, SMS
from interpreter.models import Bench, configured, gpu, prompt, reference_logits
from soloist.errors import ShapeUnsupported
from soloist.megakernel.attention_plan import AttentionPlan
from soloist.megakernel.plan import Plan, make_plan
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.kv_format import KV_FORMATS, KvName, kv_format, plain
from soloist.model.torch_types import Weights
from unit.prefill.models import random_weights

NAMES = pytest.mark.parametrize("name", KV_FORMATS)
# Heads of 128, 96 and 64 numbers: with norms, with a window, without rope in some layers; 16 query
# heads to a KV head, and 12 with a rope that turns neighbours of half a head.
CASES = (
    "qwen3-norms-128", "mistral-window-96", "smollm3-nope-64", "mistral-window-sixteen-heads-32",
    "glm-twelve-heads-64",
)  # fmt: skip
TOKENS = 136
# Where products are summed in another order a number now and then rounds to the next code.
ERROR = {"int8": 3e-4, "fp8": 2e-3, "int4": 4e-3}


def coded(case: str, name: KvName, folder: Path, ranks: int = 1) -> tuple[ModelConfig, Plan]:
    config, plan = configured(case, folder, ranks=ranks)
    kv = kv_format(name, config, Dtype.BF16)
    return config, make_plan(config, Dtype.BF16, plan.gpu, ranks, kv=kv)


def error_of(seen: Tensor, wanted: Tensor) -> float:
    return float((seen - wanted).norm() / wanted.norm())


@pytest.mark.few(6)
@NAMES
@pytest.mark.parametrize("case", CASES)
def test_logits_are_the_references_with_the_same_codes(
    case: str, name: KvName, tmp_path: Path
) -> None:
    """And nearer to them than to logits without codes, by far."""
    config, plan = coded(case, name, tmp_path)
    weights, ids = random_weights(config), prompt(config, TOKENS)
    wanted = reference_logits(config, weights, ids, plan.kv)
    exact = reference_logits(config, weights, ids)
    seen = Bench(config, plan, weights).feed(ids, 8)
    assert error_of(seen, wanted) < ERROR[name]
    assert error_of(seen, exact) > 4 * error_of(seen, wanted)


@NAMES
def test_split_caches_give_the_same(
    name: KvName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AttentionPlan, "unsplit_positions", property(lambda _: 64))
    config, plan = coded("smollm3-nope-64", name, tmp_path)
    weights, ids = random_weights(config), prompt(config, TOKENS)
    wanted = reference_logits(config, weights, ids, plan.kv)
    assert error_of(Bench(config, plan, weights).feed(ids, 8), wanted) < ERROR[name]


@NAMES
def test_two_ranks_give_the_same(name: KvName, tmp_path: Path) -> None:
    config, plan = coded("qwen3-norms-128", name, tmp_path, ranks=2)
    weights, ids = random_weights(config), prompt(config, 70)
    wanted = reference_logits(config, weights, ids, plan.kv)
    assert error_of(Bench(config, plan, weights).feed(ids, 8), wanted) < ERROR[name]


@pytest.mark.few(2)
@pytest.mark.parametrize("ranks", [1, 2])
@NAMES
def test_lanes_give_the_same(name: KvName, ranks: int, tmp_path: Path) -> None:
    config, plain, weights = lane_models.configured("mean of lanes", tmp_path, ranks)
    kv = kv_format(name, config, Dtype.BF16)
    plan = make_plan(config, Dtype.BF16, plain.gpu, ranks, kv=kv)
    ids = prompt(config, 70)
    wanted = reference_logits(config, weights, ids, kv)
    assert error_of(Bench(config, plan, weights).feed(ids, 5), wanted) < ERROR[name]


@pytest.mark.few(2)
@pytest.mark.parametrize("ranks", [1, 2])
@NAMES
def test_experts_give_the_same(name: KvName, ranks: int) -> None:
    config = MIXTURES["softmax"]
    plan = make_plan(
        config, Dtype.BF16, gpu(SMS), ranks, kv=kv_format(name, config, Dtype.BF16)
    )  # fmt: skip
    weights, ids = random_weights(config), prompt(config, 70)
    wanted = reference_logits(config, weights, ids, plan.kv)
    assert error_of(Bench(config, plan, weights).feed(ids, 8), wanted) < ERROR[name]


@NAMES
def test_a_querys_bits_are_the_same_alone_and_beside_others(name: KvName, tmp_path: Path) -> None:
    """In the kernel's rounding, eight positions of a sequence or one: logits and pages."""
    config, plan = coded("smollm3-nope-64", name, tmp_path)
    weights: Weights = {k: v.bfloat16() for k, v in random_weights(config).items()}
    ids = prompt(config, 70)
    alone, together = (Bench(config, plan, weights, torch.bfloat16) for _ in range(2))
    # Sums of this oracle are of a library, which may order those of one query otherwise.
    torch.testing.assert_close(alone.feed(ids), together.feed(ids, 8), rtol=0, atol=0.02)
    assert alone.pool.tensor.shape == together.pool.tensor.shape
    used = alone.memory.page_tables[0, :2].long()
    differing = (alone.pool.tensor[used] != together.pool.tensor[used]).float().mean()
    assert float(differing) < 0.02


@NAMES
def test_rounding_stays_near(name: KvName, tmp_path: Path) -> None:
    config, plan = coded("qwen3-norms-128", name, tmp_path)
    weights = {k: v.bfloat16() for k, v in random_weights(config).items()}
    ids = prompt(config, 96)
    wanted = reference_logits(config, weights, ids, plan.kv)
    seen = Bench(config, plan, weights, torch.bfloat16).feed(ids, 8)
    assert 1e-5 < error_of(seen, wanted) < (0.05 if name == "int4" else 0.03)


@NAMES
def test_a_cache_of_codes_is_split_later(name: KvName, tmp_path: Path) -> None:
    config, plan = coded("qwen3-norms-128", name, tmp_path)
    plain = replace(plan, kv=None)
    assert plan.kv is not None
    ratio = plain.kv_layout.page_bytes / plan.kv_layout.page_bytes
    assert plan.attention.unsplit_positions == pytest.approx(
        plain.attention.unsplit_positions * ratio, rel=0.2
    )
    assert config.kv_values_per_token * 64 == plan.kv_layout.page_values


@NAMES
def test_what_has_no_kernel_is_refused(name: KvName, tmp_path: Path) -> None:
    config, plan = coded("qwen3-norms-128", name, tmp_path)
    with pytest.raises(ShapeUnsupported, match=f"keys and values in {name} beside fp16.*bf16"):
        make_plan(config, Dtype.FP16, gpu(9), kv=plan.kv)
    assert make_plan(config, Dtype.FP16, gpu(9), kv=plain(Dtype.FP16)).kv is None
