"""Layers of several kinds, and quantised matrices, give the reference's logits."""

from dataclasses import replace

import pytest
import torch

from interpreter.models import Bench, gpu, mixed_model, prompt, reference_logits
from interpreter.quantised import (
    FORMATS,
    alike,
    as_q4_k_m,
    formats_of,
    matrices_of,
    quantised,
)
from plan.shapes import SMALL
from soloist.errors import ShapeUnsupported
from soloist.megakernel.attention_plan import AttentionPlan
from soloist.megakernel.plan import make_plan
from soloist.megakernel.weight_format import quantized_format
from soloist.model.dtype import Dtype
from soloist.model.quantized import Codes, Quantized
from soloist.model.rope import Rope
from soloist.model.torch_types import TORCH_DTYPES
from soloist.weights.formats import formats_of as formats_of_stored
from unit.prefill.models import random_weights

ATOL = 1e-4
# Of all logits: what rounding to 16 bits may do.
MOST_ERROR = 0.02
TOKENS = 72  # a page, and a round of eight in the next one


@pytest.mark.few(3)
@pytest.mark.parametrize("queries", [1, 8])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_layers_of_several_kinds(ranks: int, queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AttentionPlan, "unsplit_positions", property(lambda _: 64))
    config = mixed_model()
    plan = make_plan(config, Dtype.BF16, gpu(9), ranks)
    assert plan.image.kind_of == (0, 1, 0, 1, 0, 2)
    weights, ids = random_weights(config), prompt(config, TOKENS)
    seen = Bench(config, plan, weights).feed(ids[:16] if queries == 1 else ids, queries)
    wanted = reference_logits(config, weights, ids)[: len(seen)]
    torch.testing.assert_close(seen, wanted, rtol=0, atol=ATOL)


def test_windows_and_rope_make_no_kind() -> None:
    plain = mixed_model().layers[0]
    other = replace(plain, attention=replace(plain.attention, window=7, rope=False))
    image = make_plan(replace(mixed_model(), layers=(plain, other)), Dtype.BF16, gpu(9)).image
    assert image.kind_of == (0, 0)
    assert image.layer_offset(1) == image.kinds[0].num_bytes


@pytest.mark.parametrize("kind", FORMATS)
def test_quantised_matrices(kind: str) -> None:
    """All of them and without rounding, so that places and scales alone decide."""
    config = mixed_model()
    stored = alike(config, kind)
    plan = make_plan(config, Dtype.BF16, gpu(9), formats=formats_of(stored))
    parts, meant = quantised(random_weights(config), stored)
    ids = prompt(config, 24)
    seen = Bench(config, plan, parts).feed(ids, 8)
    torch.testing.assert_close(seen, reference_logits(config, meant, ids), rtol=0, atol=ATOL)


@pytest.mark.parametrize(
    ("stored", "ranks"),
    [
        (FORMATS["int4-zeros"], 1), (FORMATS["int4-zeros"], 2), (FORMATS["int8-permuted"], 1),
        (FORMATS["fp8-block"], 1), (Quantized(Codes.FP8, 128, Dtype.FP32, scale_rows=4), 1),
    ],
    ids=["int4", "int4 on ranks", "permuted", "blocks of heads", "blocks in heads"],
)  # fmt: skip
def test_quantised_rows_that_are_put_in_order(stored: Quantized, ranks: int) -> None:
    """Rope turns neighbours in half of a head, and the kernel has rows in another order."""
    rope = Rope(10_000.0, interleaved=True, share=0.5)
    config = replace(mixed_model(), layers=mixed_model().layers[-2:], rope=rope)
    forms = {f"layers.{i}.qkv": stored for i in range(config.num_layers)}
    formats = formats_of_stored(forms, config, ranks)
    assert formats.keys() == forms.keys()
    plan = make_plan(config, Dtype.BF16, gpu(9), ranks, formats)
    half = torch.bfloat16
    rounded = {k: v.to(half).float() for k, v in random_weights(config).items()}
    parts, meant = quantised(rounded, forms)
    ids = prompt(config, 24)
    seen = Bench(config, plan, parts, half).feed(ids, 8)
    wanted = reference_logits(config, meant, ids)
    assert (seen - wanted).norm() / wanted.norm() < MOST_ERROR


PERMUTED = pytest.mark.parametrize("kind", ["int4-permuted", "int8-permuted"])


@pytest.mark.parametrize("queries", [1, 8])
@PERMUTED
def test_permuted_matrices(kind: str, queries: int) -> None:
    """In all products."""
    config = mixed_model()
    stored = alike(config, kind)
    plan = make_plan(config, Dtype.BF16, gpu(9), formats=formats_of(stored))
    assert all(op.matrix.format.is_permuted for op in plan.operations)
    parts, meant = quantised(random_weights(config), stored)
    ids = prompt(config, 3 * queries)
    seen = Bench(config, plan, parts).feed(ids, queries)
    torch.testing.assert_close(seen, reference_logits(config, meant, ids), rtol=0, atol=ATOL)


@PERMUTED
def test_permuted_matrices_on_ranks(kind: str) -> None:
    """Those of which every rank has all columns."""
    config, half = mixed_model(), torch.bfloat16
    split = ("attention_output", "down")
    names = [name for name in matrices_of(config) if not name.endswith(split)]
    stored = alike(config, kind, names)
    plan = make_plan(config, Dtype.BF16, gpu(9), 2, formats_of(stored))
    rounded = {k: v.to(half).float() for k, v in random_weights(config).items()}
    parts, meant = quantised(rounded, stored)
    ids = prompt(config, 24)
    seen = Bench(config, plan, parts, half).feed(ids, 8)
    wanted = reference_logits(config, meant, ids)
    assert (seen - wanted).norm() / wanted.norm() < MOST_ERROR


@pytest.mark.few(10)
@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.FP16], ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("kind", FORMATS)
def test_as_the_kernel_multiplies(kind: str, dtype: Dtype) -> None:
    """Digits, sums of integers, scales: near the reference."""
    config, half = mixed_model(), TORCH_DTYPES[dtype]
    stored = alike(config, kind)
    plan = make_plan(config, dtype, gpu(9), formats=formats_of(stored))
    rounded = {k: v.to(half).float() for k, v in random_weights(config).items()}
    parts, meant = quantised(rounded, stored)
    ids = prompt(config, 24)
    seen = Bench(config, plan, parts, half).feed(ids, 8)
    wanted = reference_logits(config, meant, ids)
    assert (seen - wanted).norm() / wanted.norm() < MOST_ERROR


def test_matrices_as_q4_k_m_mixes_them() -> None:
    config, half = mixed_model(), torch.bfloat16
    stored = as_q4_k_m(config)
    plan = make_plan(config, Dtype.BF16, gpu(9), formats=formats_of(stored))
    assert len({plan.format_of(f"layers.{i}.down") for i in range(config.num_layers)}) == 2
    rounded = {k: v.to(half).float() for k, v in random_weights(config).items()}
    parts, meant = quantised(rounded, stored)
    ids = prompt(config, 24)
    seen = Bench(config, plan, parts, half).feed(ids, 8)
    wanted = reference_logits(config, meant, ids)
    assert (seen - wanted).norm() / wanted.norm() < MOST_ERROR


def test_a_format_for_each_matrix() -> None:
    """Layers of one shape become several kinds; what is left stands for itself in 16 bits."""
    config, half = mixed_model(), torch.bfloat16
    names, kinds = matrices_of(config), list(FORMATS)
    plain = {"layers.0.qkv", "layers.1.down", "layers.2.gate_up", "layers.4.attention_output"}
    stored = {
        name: FORMATS[kinds[i % len(kinds)]] for i, name in enumerate(names) if name not in plain
    }
    plan = make_plan(config, Dtype.BF16, gpu(9), formats=formats_of(stored))
    assert len(plan.image.kinds) == config.num_layers
    rounded = {k: v.to(half).float() for k, v in random_weights(config).items()}
    parts, meant = quantised(rounded, stored)
    ids = prompt(config, 24)
    seen = Bench(config, plan, parts, half).feed(ids, 8)
    wanted = reference_logits(config, meant, ids)
    assert (seen - wanted).norm() / wanted.norm() < MOST_ERROR


@pytest.mark.parametrize(("kind", "bits"), [("int4", 4 + 16 / 128), ("int8", 8 + 16 / 512)])
def test_fewer_bits_are_fewer_bytes(kind: str, bits: float) -> None:
    config = mixed_model()
    plain, scaled = (
        make_plan(config, Dtype.BF16, gpu(9), formats=formats).image.streamed_bytes
        for formats in (None, formats_of(alike(config, kind)))
    )
    assert scaled / plain == pytest.approx(bits / 16, rel=0.02)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("int4-zeros", 2), ("int4-zeros", 4), ("fp8-32", 2), ("int4-zeros-64", 2),
        ("int8", 2), ("int8", 4), ("int8", 8), ("int4-wide", 2), ("fp8", 4),
    ],
)  # fmt: skip
def test_quantised_matrices_on_ranks(kind: str, ranks: int) -> None:
    """Where each rank's columns are whole groups, or all columns of a row are one."""
    layer = mixed_model().layers[1]
    wide = replace(layer, mlp=replace(layer.mlp, intermediate_size=256))
    config = replace(mixed_model(), layers=(wide, wide))
    stored = alike(config, kind)
    plan = make_plan(config, Dtype.BF16, gpu(9), ranks, formats_of(stored))
    parts, meant = quantised(random_weights(config), stored)
    ids = prompt(config, 24)
    seen = Bench(config, plan, parts).feed(ids, 8)
    torch.testing.assert_close(seen, reference_logits(config, meant, ids), rtol=0, atol=ATOL)


@pytest.mark.parametrize(
    ("ranks", "name", "given"),
    [
        (1, "layers.9.down", "a format of layers.9.down"),
        (1, "embedding", "a format of embedding"),
        (2, "layers.0.down", "layers.0.down in int4 with 48 columns on each of 2 ranks"),
    ],
)  # fmt: skip
def test_formats_that_cannot_be_read_are_refused(ranks: int, name: str, given: str) -> None:
    config = replace(SMALL, tied_head=ranks == 1)
    formats = {name: quantized_format(FORMATS["int4-zeros"])}
    with pytest.raises(ShapeUnsupported) as refused:
        make_plan(config, Dtype.BF16, gpu(9), ranks, formats)
    assert f"does not support {given}" in refused.value.message


@pytest.mark.parametrize("group", [16, 48, 100])
def test_groups_that_no_reader_takes_are_refused(group: int) -> None:
    with pytest.raises(ShapeUnsupported) as refused:
        quantized_format(Quantized(Codes.INT4, group, Dtype.BF16))
    assert f"int4 in groups of {group} columns" in refused.value.message
    assert refused.value.message.endswith("(allowed: multiples of 32)")
