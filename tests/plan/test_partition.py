"""Every unit of a matrix has one owner, and owners share evenly."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from plan.cuda_text import functions
from soloist.megakernel.partition import Matrix, RowOrder
from soloist.megakernel.weight_format import BF16, quantized_format
from soloist.model.dtype import Dtype
from soloist.model.quantized import Codes, Quantized

FORMATS = [
    BF16,
    quantized_format(Quantized(Codes.INT4, 64, Dtype.FP16, has_zeros=True)),
    quantized_format(Quantized(Codes.FP8, 128, Dtype.BF16, scale_rows=128)),
]


@st.composite
def matrices(draw: st.DrawFn) -> Matrix:
    blocks, order = draw(st.integers(1, 170)), draw(st.sampled_from(RowOrder))
    rows, columns = draw(st.integers(1, 20_000)), draw(st.integers(1, 20_000))
    padded = None
    if order is RowOrder.NATURAL and draw(st.booleans()):
        padded = (-(-rows // 8) // blocks + draw(st.integers(1, 9))) * blocks
    return Matrix("any", rows, columns, order, blocks, draw(st.sampled_from(FORMATS)), padded)


@given(matrices())
def test_units_are_owned_once_and_in_order(matrix: Matrix) -> None:
    first = [matrix.first_unit(block) for block in range(matrix.blocks + 1)]
    assert (first[0], first[-1]) == (0, matrix.units)
    assert first == sorted(first)
    counts = {end - start for start, end in pairwise(first)}
    assert max(counts) == matrix.max_units
    assert max(counts) - min(counts) <= 1  # the kernel compiles for two counts only


@given(matrices(), st.data())
def test_owner_is_the_inverse_of_first_unit(matrix: Matrix, data: st.DataObject) -> None:
    unit = data.draw(st.integers(0, matrix.units - 1))
    owner = matrix.owner(unit)
    assert matrix.first_unit(owner) <= unit < matrix.first_unit(owner + 1)


@given(matrices())
def test_the_text_for_cuda_says_the_same(matrix: Matrix) -> None:
    cuda = functions("\n".join(matrix.cuda()))
    for block in range(matrix.blocks):
        assert cuda["first_unit"](block) == matrix.first_unit(block)
        assert cuda["num_units"](block) == matrix.num_units(block)
    for unit in range(0, matrix.units, 1 + matrix.units // 50):
        assert cuda["owner"](unit) == matrix.owner(unit)


@given(matrices())
def test_the_blocks_bytes_make_up_the_matrix(matrix: Matrix) -> None:
    own = [matrix.block_bytes(block) for block in range(matrix.blocks)]
    assert sum(own) == matrix.num_bytes
    assert max(own) == matrix.max_block_bytes
    values = matrix.rows * matrix.columns
    assert matrix.num_bytes >= values * matrix.format.value_bits // 8
    assert matrix.num_bytes % matrix.format.half_tile_bytes == 0


@given(matrices())
def test_tiles_hold_all_units(matrix: Matrix) -> None:
    halves = matrix.max_units * matrix.unit_half_tiles
    assert 2 * matrix.max_tiles - 1 <= halves <= 2 * matrix.max_tiles


@given(matrices())
def test_steps_share_slots_where_a_block_has_8_rows_left_over(matrix: Matrix) -> None:
    first = [
        matrix.first_unit(block) * matrix.unit_half_tiles for block in range(matrix.blocks + 1)
    ]
    assert matrix.shares_slots == any((end - start) % 2 for start, end in pairwise(first))


def test_padding_units_belong_to_the_last_blocks() -> None:
    matrix = Matrix("head", 203, 64, RowOrder.NATURAL, 7, BF16, 28)
    assert (matrix.units, matrix.max_units, matrix.owner(27)) == (28, 4, 6)
