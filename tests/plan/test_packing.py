"""Packing loses nothing, invents only zeros, and every block finds its part."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plan.cuda_text import functions
from plan.shapes import SMALL, all_operations, models, operation, small_plan
from soloist.megakernel.gpu import Gpu
from soloist.megakernel.layer_kind import Operation
from soloist.megakernel.partition import Matrix, RowOrder
from soloist.megakernel.plan import Plan
from soloist.megakernel.tile import HALF_TILE_ROWS, HALF_TILE_VALUES, STEP_COLUMNS, tile_places
from soloist.megakernel.weight_format import BF16, INT8_SCALED
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.weights.packing import ordered, pack, place, unordered, unpack


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


@settings(max_examples=25, deadline=None)
@given(models(most=20, num_sms=6), st.integers(6, 13))
def test_round_trips_of_values_and_scales(model: ModelConfig, num_sms: int) -> None:
    """Every byte of both parts comes back, and none lies in another's place."""
    plan = small_plan(model, num_sms)
    for op in all_operations(plan):
        stored = replace(op, matrix=replace(op.matrix, format=INT8_SCALED))
        matrix, generator = stored.matrix, torch.Generator().manual_seed(1)
        groups = -(-matrix.columns // 32)
        parts = {
            "": torch.randint(-127, 128, (matrix.rows, matrix.columns), generator=generator),
            ".scales": torch.randint(0, 256, (matrix.rows, groups), generator=generator),
        }
        given_ = {"": parts[""].to(torch.int8), ".scales": parts[".scales"].to(torch.uint8)}
        packed = pack(plan, stored, given_)
        assert packed.numel() == matrix.num_bytes
        assert packed.shape[1] == INT8_SCALED.half_tile_bytes
        again = unpack(plan, stored, packed)
        assert again.keys() == given_.keys()
        assert all(torch.equal(again[name], given_[name]) for name in given_)


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
