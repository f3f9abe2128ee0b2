"""Which packed byte is which register of `wgmma`'s first operand, for every format.

Here a chunk of a fragment is read byte by byte as `cuda/tile/fragments.cuh` reads it, with nothing
but the places that `prefill/fragments.py` gives. Tests of the CUDA code itself are beside this.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interpreter.quantised import FORMATS, random_parts
from plan.shapes import PUBLIC, all_operations, models, small_plan
from soloist.megakernel.gpu import TYPICAL
from soloist.megakernel.partition import RowOrder
from soloist.megakernel.plan import make_plan
from soloist.megakernel.weight_format import WeightFormat
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.quantized import Codes
from soloist.prefill.fragments import (
    BLOCK_FRAGMENTS,
    CHUNK_COLUMNS,
    HALF_BYTES,
    Half,
    HalfKind,
    Load,
    RowCut,
    Tiling,
    arranged_column,
    best_shares,
    chunk_bytes,
    chunk_place,
    fragments,
    half_tiles_of_rows,
    has_fragments,
    num_chunks,
    tiled,
)
from unit.prefill.packed_matrices import KINDS, SHAPES, packed_matrix


def operand_place(lane: int, register: int, value: int) -> tuple[int, int]:
    """(row, k) of a value of m64k16's first operand in a warp's 16 rows (PTX ISA, wgmma)."""
    row = lane // 4 + register % 2 * 8
    return row, register // 2 * 8 + lane % 4 * 2 + value


def piece(half: Half, which: int, chunk: int, stored: WeightFormat, steps: int, pairs: bool) -> int:
    """Where the bytes begin that are copied for one half of a fragment."""
    step, warp = chunk_place(chunk, pairs_steps=pairs)
    at, each = half.in_step(step, steps), chunk_bytes(stored.value_bits)
    if half.kind is HalfKind.ALONE:
        return at + warp * each
    if stored.value_bits == 4:
        return at + (2 * warp + which) * each
    return at + which * stored.half_tile_values_bytes + warp * each


def code_place(
    codes: Codes | None, is_tile: bool, lane: int, p: int, m: int, register: int, value: int
) -> tuple[int, int]:
    """(value of a fragment's chunk, nibble) that becomes a register's value.

    A value has 8 or 16 bits: of integers of 4 bits it is a byte with two nibbles.
    """
    half, r = register % 2, register // 2
    if codes is None:
        if is_tile:
            return ((2 * p + m) * 32 + lane) * 8 + (2 * r + half) * 2 + value, 0
        return ((2 * half + p) * 32 + lane) * 8 + (2 * m + r) * 2 + value, 0
    if codes is Codes.INT4:
        if is_tile:
            return lane * 16 + (2 * p + m) * 4 + 2 * r + value, half
        return half * 256 + lane * 8 + m * 4 + 2 * r + value, p
    if not is_tile:
        return half * 512 + lane * 16 + (2 * p + m) * 4 + 2 * r + value, 0
    if codes is Codes.INT8:
        return p * 512 + lane * 16 + (2 * m + half) * 4 + 2 * r + value, 0
    return p * 512 + lane * 16 + (2 * m + r) * 4 + 2 * half + value, 0


# Codes of six bits lie in two places each, as tests of the CUDA code find them.
WHOLE = [kind for kind in KINDS if kind == "plain" or FORMATS[kind].codes is not Codes.INT6]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", WHOLE)
def test_every_register_gets_its_value(kind: str, shape: str) -> None:
    """Codes without their scales: those are the business of tests of the CUDA code."""
    case = packed_matrix(kind, SHAPES[shape])
    matrix, image = case.operation.matrix, case.image.flatten().numpy()
    stored, pairs = matrix.format, matrix.pairs_steps
    codes = None if stored.meaning is None else stored.meaning.codes
    wanted = wanted_codes(kind, SHAPES[shape], case.numbers)
    seen = np.full(wanted.shape, -1, dtype=wanted.dtype)
    found = fragments(case.plan.shape, case.operation, case.image.shape[1], gated=False)
    registers = [
        (lane, p, m, register, value)
        for lane in range(32) for p in (0, 1) for m in (0, 1)
        for register in range(4) for value in (0, 1)
    ]  # fmt: skip
    for is_tile in (True, False):
        source = [code_place(codes, is_tile, *place) for place in registers]
        index, nibble = (np.array(x) for x in zip(*source, strict=True))
        to = [operand_place(lane, register, value) for lane, _, _, register, value in registers]
        rows = np.array([row for row, _ in to])
        k = np.array([
            p * 32 + m * 16 + k for (_, p, m, _, _), (_, k) in zip(registers, to, strict=True)
        ])  # fmt: skip
        columns = np.array([arranged_column(int(place)) for place in k])
        for fragment in found:
            if (fragment[0].kind is HalfKind.TILE) is not is_tile:
                continue
            for chunk in range(num_chunks(matrix.columns)):
                parts = []
                for which, half in enumerate(fragment):
                    each = chunk_bytes(stored.value_bits)
                    at = piece(half, which, chunk, stored, matrix.steps, pairs)
                    is_none = half.kind is HalfKind.NONE
                    parts.append(np.zeros(each, np.uint8) if is_none else image[at : at + each])
                given = np.concatenate(parts)
                values = given.view(np.uint16) if codes is None else given
                values = values[index].astype(np.int64)
                if codes is Codes.INT4:
                    values = values >> 4 * nibble & 15
                result = np.array([half.out for half in fragment])[rows // 8] + rows % 8
                column = chunk * CHUNK_COLUMNS + columns
                exists = np.array([half.kind is not HalfKind.NONE for half in fragment])[rows // 8]
                exists &= (result < matrix.rows) & (column < matrix.columns)
                assert (seen[result[exists], column[exists]] == -1).all(), "nothing comes twice"
                seen[result[exists], column[exists]] = values[exists]
    assert np.array_equal(seen, wanted)


def wanted_codes(kind: str, shape: tuple, numbers: torch.Tensor) -> np.ndarray:
    """What is stored of each number, as an unsigned integer."""
    if kind == "plain":
        return numbers.view(torch.int16).numpy().view(np.uint16).astype(np.int64)
    rows, columns, *_ = shape
    codes = random_parts(rows, columns, FORMATS[kind])[""]
    if FORMATS[kind].codes is Codes.INT4:
        codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1)
    return codes.view(torch.uint8).numpy().astype(np.int64)


def test_places_of_a_row_are_its_columns() -> None:
    assert sorted(map(arranged_column, range(96))) == list(range(96))
    # Words of lanes' columns 0 and 1, then of 2 and 3; a lane of a quad has 8 columns.
    assert [arranged_column(place) for place in range(10)] == [0, 1, 8, 9, 16, 17, 24, 25, 2, 3]


@settings(max_examples=25, deadline=None)
@given(models(most=20, num_sms=6), st.integers(6, 13))
def test_every_row_is_in_one_half(model: ModelConfig, num_sms: int) -> None:
    plan = small_plan(model, num_sms)
    for op in all_operations(plan):
        if not has_fragments(op):
            continue
        found = fragments(plan.shape, op, plan.image.block_stride, gated=False)
        halves = [half for pair in found for half in pair if half.kind is not HalfKind.NONE]
        halves = [half for half in halves if half.out < op.matrix.rows]  # the rest is padding
        assert sorted(half.out for half in halves) == list(range(0, op.matrix.rows, 8))
        for first in (8, op.matrix.rows // 2):
            some = fragments(plan.shape, op, plan.image.block_stride, gated=False, first=first)
            outs = {half.out for pair in some for half in pair if half.kind is not HalfKind.NONE}
            assert outs >= {half.out for half in halves if half.out + 8 > first}
            assert len(some) <= len(found)


@pytest.mark.parametrize("name", PUBLIC)
def test_neurons_come_by_four_fragments(name: str) -> None:
    """32 of them in order, which leave arranged for the next product."""
    gpu = TYPICAL["sm_90a"]
    plan = make_plan(PUBLIC[name], Dtype.BF16, gpu)
    op = plan.image.operation(0, "gate_up")
    assert op.matrix.order is RowOrder.PAIRED
    found = fragments(plan.shape, op, plan.image.block_stride, gated=True)
    assert [low.out for low, _ in found] == list(range(0, op.matrix.rows // 2, 8))
    assert all(low.out == high.out and low.kind is HalfKind.TILE for low, high in found)
    assert len(found) % 4 == 0
    table = half_tiles_of_rows(plan.shape, plan.image.head, plan.image.block_stride)
    assert [half.out for half in table] == list(range(0, 8 * len(table), 8))
    assert 8 * len(table) >= plan.model.vocab_size


def test_tiles_are_even() -> None:
    def shares(
        count: int, columns: int, tokens: int, width: int, parts: tuple[int, ...] = (1,)
    ) -> tuple[int, int]:
        load = Load(count, columns, 16, width, -(-tokens // width))
        found = best_shares(load, 132, parts=parts)
        assert not found.rows.rest
        return found.rows.each, found.parts

    # qkv of llama-3.1-8b after few tokens: on most SMs at once; after many: as much as fits.
    assert 96 <= 2 * -(-384 // shares(384, 4096, 128, 64)[0]) <= 132
    assert shares(384, 4096, 2048, 256) == (8, 1)
    # down of llama-3.2-1b, whose rows alone are too few for all SMs.
    each, parts = shares(128, 8192, 128, 64, (1, 2, 4, 8))
    assert parts > 1
    assert 96 <= 2 * -(-128 // each) * parts <= 132
    pair = (Half(HalfKind.TILE), Half(HalfKind.TILE))
    tiling, table = tiled([pair] * 11, RowCut(4), 176)
    assert tiling == Tiling(each=4, count=3, results=176)
    kinds = np.frombuffer(table, np.uint32).reshape(3, BLOCK_FRAGMENTS, 2, HALF_BYTES // 4)[..., 6]
    assert (kinds == HalfKind.TILE).sum(axis=(1, 2)).tolist() == [8, 8, 6]


def test_the_last_round_has_narrower_tiles() -> None:
    # gate_up of laneformer-2b-as-llama after 128 tokens: tiles of 8 would take two whole rounds,
    # and tiles of 4 three, each of which reads all tokens.
    rows = best_shares(Load(1536, 3072, 16, 128, 1), 132, multiple=4).rows
    assert rows == RowCut(8, whole=132, rest=4)
    rows = RowCut(5, whole=2, rest=3)
    places = [HalfKind.TILE] * 17
    found = [(Half(kind, at=i), Half(kind, at=i)) for i, kind in enumerate(places)]
    assert [[half.at for half, _ in tile] for tile in rows.tiles(found)] == [
        [0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12], [13, 14, 15], [16],
    ]  # fmt: skip
    tiling, table = tiled(found, rows, 272)
    assert tiling == Tiling(each=5, count=5, results=272)
    kinds = np.frombuffer(table, np.uint32).reshape(5, BLOCK_FRAGMENTS, 2, HALF_BYTES // 4)[..., 6]
    assert (kinds == HalfKind.TILE).sum(axis=(1, 2)).tolist() == [10, 10, 6, 6, 2]


def test_chunks_are_neighbouring_columns() -> None:
    assert [chunk_place(c, pairs_steps=False) for c in (0, 7, 8)] == [(0, 0), (0, 7), (1, 0)]
    assert [chunk_place(c, pairs_steps=True) for c in (0, 1, 2, 15, 16)] == [
        (0, 0), (1, 0), (0, 1), (1, 7), (2, 0),
    ]  # fmt: skip
