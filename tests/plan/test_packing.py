"""Packing loses nothing, invents only zeros, and every block finds its part."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interpreter.quantised import FORMATS, random_parts
from plan.cuda_text import functions
from plan.shapes import SMALL, all_operations, models, operation, small_plan
from soloist.megakernel.gpu import Gpu
from soloist.megakernel.layer_kind import Operation
from soloist.megakernel.partition import Matrix, RowOrder
from soloist.megakernel.plan import Plan, make_plan
from soloist.megakernel.tile import HALF_TILE_ROWS, HALF_TILE_VALUES, STEP_COLUMNS, tile_places
from soloist.megakernel.weight_format import BF16, quantized_format
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.quantized import COLUMNS, SCALES, Codes, Quantized
from soloist.weights.numbers import numbers
from soloist.weights.packing import (
    columns_of,
    gather,
    ordered,
    pack,
    place,
    table_of,
    unordered,
    unpack,
)


def numbered(rows: int, columns: int) -> torch.Tensor:
    """Values from 1 on: none is the zero of padding, none comes twice."""
    return torch.arange(1, rows * columns + 1, dtype=torch.int32).view(rows, columns)


@settings(max_examples=25, deadline=None)
@given(models(most=20, num_sms=6), st.integers(6, 13))
def test_round_trips(model: ModelConfig, num_sms: int) -> None:
    plan = small_plan(model, num_sms)
    for op in all_operations(plan):
        values = numbered(op.matrix.rows, op.matrix.columns)
        packed = pack(plan, op, {"": values})
        assert packed.numel() * 2 == op.matrix.num_bytes
        kept = packed[packed != 0]
        assert kept.numel() == values.numel() == kept.unique().numel()
        assert torch.equal(unpack(plan, op, packed)[""], values)


@st.composite
def quantised(draw: st.DrawFn) -> Quantized:
    """Every way in which the kernel takes a matrix, also groups wider than its own."""
    codes = draw(st.sampled_from(Codes))
    if codes is Codes.INT6 or draw(st.integers(0, 4)) == 0:
        return draw(st.sampled_from([x for x in FORMATS.values() if x.super_block]))
    is_fp8 = codes is Codes.FP8
    return Quantized(
        codes,
        draw(st.sampled_from([0, 32, 64, 96, 128, 256, 512])),
        draw(st.sampled_from(Dtype)),
        has_zeros=not is_fp8 and draw(st.booleans()),
        scale_rows=draw(st.sampled_from([1, 2, 4, 128])) if is_fp8 else 1,
        permuted=draw(st.booleans()),
    )


def require_round_trip(plan: Plan, op: Operation, stored: Quantized) -> None:
    """Every code comes back, and so do the numbers; scales and zeros in the kernel's groups."""
    op = replace(op, matrix=replace(op.matrix, format=quantized_format(stored)))
    matrix = op.matrix
    parts = random_parts(matrix.rows, matrix.columns, stored)
    packed = pack(plan, op, parts)
    assert packed.shape == (
        matrix.units * matrix.unit_half_tiles * matrix.steps,
        matrix.format.half_tile_bytes,
    )
    again = unpack(plan, op, packed)
    if stored.permuted:
        again[COLUMNS] = columns_of(op, table_of(op, parts[COLUMNS]))
    assert set(again) == set(stored.parts)
    assert {p: x.dtype for p, x in again.items() if p != SCALES} == {
        p: x.dtype for p, x in parts.items() if p != SCALES
    }
    assert torch.equal(again[""].view(torch.uint8), parts[""].view(torch.uint8))
    width = matrix.format.group
    assert again[SCALES].shape == (matrix.rows, -(-matrix.columns // width))
    meant = numbers(replace(stored, group=width), again)
    assert torch.equal(meant, numbers(stored, parts))


@settings(max_examples=60, deadline=None)
@given(
    models(most=20, num_sms=6), st.integers(6, 13), quantised(),
    st.sampled_from([Dtype.BF16, Dtype.FP16]),
)  # fmt: skip
def test_round_trips_of_quantised_matrices(
    model: ModelConfig, num_sms: int, stored: Quantized, dtype: Dtype
) -> None:
    plan = replace(small_plan(model, num_sms), dtype=dtype)
    for op in all_operations(plan):
        require_round_trip(plan, op, stored)


@pytest.mark.parametrize("vocab", [1, 7, 8, 9, 203, 1000])
@pytest.mark.parametrize("kind", FORMATS)
def test_odd_vocabularies_of_quantised_heads(kind: str, vocab: int) -> None:
    plan = small_plan(replace(SMALL, vocab_size=vocab), 7)
    require_round_trip(plan, plan.head, FORMATS[kind])


@pytest.mark.parametrize("kind", FORMATS)
def test_rows_of_padding_stand_for_zeros(kind: str) -> None:
    """Whatever their codes are; columns of padding meet activations that are zeros."""
    plan = small_plan(SMALL, 7)
    matrix = replace(plan.head.matrix, format=quantized_format(FORMATS[kind]))
    parts = random_parts(matrix.rows, matrix.columns, FORMATS[kind])
    packed = pack(plan, replace(plan.head, matrix=matrix), parts)
    whole = replace(plan.head, matrix=replace(matrix, rows=matrix.units * 8))
    meaning = replace(FORMATS[kind], group=matrix.format.group, permuted=False)
    meant = numbers(meaning, unpack(plan, whole, packed))
    assert len(meant) > matrix.rows
    assert meant[: matrix.rows].any()
    assert not meant[matrix.rows :].any()


@pytest.mark.parametrize("kind", FORMATS)
def test_quantised_matrices_in_the_image(kind: str) -> None:
    """Bytes of the image, and what is gathered out of them."""
    stored = quantized_format(FORMATS[kind])
    names = ("qkv", "attention_output", "gate_up", "down")
    formats = {f"layers.{i}.{name}": stored for i in range(2) for name in names} | {"head": stored}
    plan = make_plan(SMALL, Dtype.BF16, Gpu("sm_90a", 7, 227 * 1024), formats=formats)
    image = torch.full((plan.blocks, plan.image.block_stride), 255, dtype=torch.uint8)
    packed = {}
    for layer in range(2):
        for op in all_operations(plan)[: -1 if layer else None]:
            parts = random_parts(op.matrix.rows, op.matrix.columns, FORMATS[kind], seed=layer)
            packed[op, layer] = pack(plan, op, parts)
            place(plan, op, layer, packed[op, layer], image)
    for (op, layer), values in packed.items():
        assert torch.equal(gather(plan, op, layer, image), values)


@settings(max_examples=10, deadline=None)
@given(models(most=12, num_sms=6), st.integers(6, 9))
def test_places_in_the_image(model: ModelConfig, num_sms: int) -> None:
    """Layers and matrices side by side, in no one's gap, each block's part in its row."""
    plan = small_plan(model, num_sms)
    image = torch.zeros(plan.blocks, plan.image.block_stride // 2, dtype=torch.int16)
    owned = torch.zeros_like(image, dtype=torch.bool)
    filled = 0
    for layer in range(model.num_layers):
        for op in all_operations(plan)[: -1 if layer else None]:
            filled += 1
            matrix = op.matrix
            packed = torch.full((matrix.num_bytes // 2,), filled, dtype=torch.int16)
            packed[::97] = torch.arange(packed[::97].numel(), dtype=torch.int32).to(torch.int16)
            before = image.clone()
            place(plan, op, layer, packed, image)
            start = plan.image.matrix_offset(layer, matrix.name) // 2
            at = 0
            for block in range(plan.blocks):
                part = slice(start, start + matrix.block_bytes(block) // 2)
                size = matrix.block_bytes(block) // 2
                assert torch.equal(image[block, part], packed[at : at + size])
                assert not owned[block, part].any()
                owned[block, part] = True
                before[block, part] = image[block, part]
                at += size
            assert at == packed.numel()
            assert torch.equal(before, image)  # and nothing else


@pytest.mark.parametrize("vocab", [1, 7, 8, 9, 203, 1000, 4093])
def test_odd_vocabularies(vocab: int) -> None:
    plan = small_plan(
        ModelConfig(**{**{f: getattr(SMALL, f) for f in SMALL.__slots__}, "vocab_size": vocab}), 7
    )
    values = numbered(vocab, 64)
    packed = pack(plan, plan.head, {"": values})
    assert torch.equal(unpack(plan, plan.head, packed)[""], values)


def test_orders_and_their_inverses() -> None:
    plan = small_plan(SMALL, 7)
    rows = torch.arange(SMALL.layers[0].attention.qkv_rows)
    by_head = ordered(plan.shape, operation(plan, "qkv").matrix, rows)
    # Two query heads, a key head and a value head of the first KV head, 32 rows each.
    assert by_head[::32].tolist() == [0, 32, 128, 192, 64, 96, 160, 224]
    pairs = ordered(plan.shape, operation(plan, "gate_up").matrix, torch.arange(192))
    assert pairs[::8].tolist()[:4] == [0, 96, 8, 104]
    for op, values in ((operation(plan, "qkv"), by_head), (operation(plan, "gate_up"), pairs)):
        assert torch.equal(unordered(plan.shape, op.matrix, values), values.sort().values)
    assert operation(plan, "down").matrix.order is RowOrder.NATURAL


def test_fragments_of_a_tile() -> None:
    """What the first warp's lanes read: rows g and g + 8, columns 8q … 8q + 7."""
    plan = Plan(SMALL, Dtype.BF16, Gpu("sm_90a", 2, 227 * 1024), 2)
    row, column = torch.arange(64)[:, None] * 1000, torch.arange(64)
    packed = pack(
        plan, operation(plan, "down"), {"": torch.nn.functional.pad(row + column, (0, 32))}
    )
    slot = packed[:2].flatten()
    lane = 5  # g = 1, q = 1
    assert slot[lane * 8 : lane * 8 + 8].tolist() == [
        1008, 1009, 9008, 9009, 1010, 1011, 9010, 9011,
    ]  # fmt: skip
    assert slot[256 + lane * 8] == 1012  # the second multiply
    assert slot[HALF_TILE_VALUES + lane * 8] == 1040  # the second half of the warp's columns


@pytest.mark.parametrize("rows", [16, 8])
def test_the_text_for_cuda_finds_every_value(rows: int) -> None:
    """Of a tile and of a half tile: the kernel looks embeddings up in the packed head."""
    plan, cuda = small_plan(SMALL, 7), functions("\n".join(tile_places()))
    matrix = Matrix("any", rows, STEP_COLUMNS, RowOrder.NATURAL, blocks=1, format=BF16)
    values = numbered(rows, STEP_COLUMNS)
    packed = pack(plan, Operation(matrix, 1, plan.gpu), {"": values}).flatten().tolist()
    for row in range(rows):
        half, g = divmod(row, HALF_TILE_ROWS)
        for column in range(STEP_COLUMNS):
            if rows == 16:
                place = cuda["tile_place"](half, g, column)
            else:
                place = cuda["half_tile_place"](row, column)
            assert packed[place] == values[row, column], (row, column)


def test_two_steps_share_the_slot_of_8_rows_left_over() -> None:
    """Three times 8 rows of three steps: 16 rows, 16 rows, 8 of each step; then 16 rows, 8 rows."""
    plan = small_plan(SMALL, 7)
    matrix = Matrix("any", 24, 3 * 512, RowOrder.NATURAL, blocks=1, format=BF16)
    op = Operation(matrix, 2, plan.gpu)
    unit, step = torch.arange(24)[:, None] // 8, torch.arange(3 * 512) // 512
    place_of = 10 * unit + step
    packed = pack(plan, op, {"": place_of})
    held = [half.unique().tolist() for half in packed]
    assert held == [[0, 10], [0, 10], [1, 11], [1, 11], [20], [21], [2, 12], [2, 12], [22]]
    assert torch.equal(unpack(plan, op, packed)[""], place_of)
