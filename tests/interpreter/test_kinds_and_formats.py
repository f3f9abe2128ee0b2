"""Layers of several kinds, and matrices in another format, give the reference's logits."""

from dataclasses import replace

import pytest
import torch

from interpreter.models import Bench, gpu, mixed_model, prompt, quantised, reference_logits
from plan.shapes import SMALL
from soloist.errors import ShapeUnsupported
from soloist.megakernel.attention_plan import AttentionPlan
from soloist.megakernel.plan import make_plan
from soloist.megakernel.weight_format import INT8_SCALED
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from unit.prefill.models import random_weights

ATOL = 1e-4
TOKENS = 90


def matrices_of(config: ModelConfig) -> list[str]:
    """All but the embedding."""
    names = ("qkv", "attention_output", "gate_up", "down")
    return [*(f"layers.{i}.{name}" for i in range(config.num_layers) for name in names), "head"]


@pytest.mark.parametrize("queries", [1, 8])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_layers_of_several_kinds(ranks: int, queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AttentionPlan, "unsplit_positions", property(lambda _: 64))
    config = mixed_model()
    plan = make_plan(config, Dtype.BF16, gpu(9), ranks)
    assert plan.image.kind_of == (0, 1, 0, 1, 0, 2)
    weights, ids = random_weights(config), prompt(config, TOKENS)
    seen = Bench(config, plan, weights).feed(ids[:40] if queries == 1 else ids, queries)
    wanted = reference_logits(config, weights, ids)[: len(seen)]
    torch.testing.assert_close(seen, wanted, rtol=0, atol=ATOL)


def test_windows_and_rope_make_no_kind() -> None:
    plain = mixed_model().layers[0]
    other = replace(plain, attention=replace(plain.attention, window=7, rope=False))
    image = make_plan(replace(mixed_model(), layers=(plain, other)), Dtype.BF16, gpu(9)).image
    assert image.kind_of == (0, 0)
    assert image.layer_offset(1) == image.kinds[0].num_bytes


@pytest.mark.parametrize("queries", [1, 8])
def test_matrices_in_8_bits(queries: int) -> None:
    """All of them, so that nothing but the format rounds."""
    config = mixed_model()
    names = matrices_of(config)
    formats = dict.fromkeys(names, INT8_SCALED)
    plan = make_plan(config, Dtype.BF16, gpu(9), formats=formats)
    parts, meant = quantised(random_weights(config), names)
    ids = prompt(config, TOKENS)
    seen = Bench(config, plan, parts).feed(ids[:40] if queries == 1 else ids, queries)
    wanted = reference_logits(config, meant, ids)[: len(seen)]
    torch.testing.assert_close(seen, wanted, rtol=0, atol=ATOL)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_format_for_each_matrix(dtype: torch.dtype) -> None:
    """Some layers' MLPs in 8 bits beside the rest in 16: other kinds, near the reference."""
    config = mixed_model()
    names = [name for name in matrices_of(config) if name[-4:] in ("e_up", "down") and "1" in name]
    plan = make_plan(config, Dtype.BF16, gpu(9), formats=dict.fromkeys(names, INT8_SCALED))
    rounded = {k: v.to(dtype).float() for k, v in random_weights(config).items()}
    parts, meant = quantised(rounded, names)
    ids = prompt(config, 40)
    seen = Bench(config, plan, parts, dtype).feed(ids, 8)
    wanted = reference_logits(config, meant, ids)
    assert (seen - wanted).norm() / wanted.norm() < 0.02


def test_fewer_bits_are_fewer_bytes() -> None:
    config = mixed_model()
    names = matrices_of(config)
    plain, scaled = (
        make_plan(config, Dtype.BF16, gpu(9), formats=formats).image.streamed_bytes
        for formats in (None, dict.fromkeys(names, INT8_SCALED))
    )
    assert scaled / plain == pytest.approx((8 + 8 / 32) / 16, rel=0.02)


@pytest.mark.parametrize(
    ("ranks", "name", "given"),
    [
        (1, "layers.9.down", "a format of layers.9.down"),
        (1, "embedding", "a tied embedding in int8_scaled"),
        (2, "layers.0.down", "layers.0.down in int8_scaled with 48 columns on each of 2 ranks"),
    ],
)
def test_formats_that_cannot_be_read_are_refused(ranks: int, name: str, given: str) -> None:
    config = replace(SMALL, tied_head=ranks == 1)
    with pytest.raises(ShapeUnsupported) as refused:
        make_plan(config, Dtype.BF16, gpu(9), ranks, {name: INT8_SCALED})
    assert f"does not support {given}" in refused.value.message
