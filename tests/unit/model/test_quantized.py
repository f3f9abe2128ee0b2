"""What the names of formats mean, and which columns share a scale."""

import pytest

from soloist.errors import NoGroupFits
from soloist.model.dtype import Dtype
from soloist.model.quantized import AT_LOAD, Codes, Quantized, rounded


def test_names_are_those_of_the_codes() -> None:
    assert AT_LOAD == {"int4": Codes.INT4, "int8": Codes.INT8, "fp8": Codes.FP8}


@pytest.mark.parametrize("codes", [Codes.INT8, Codes.FP8])
def test_eight_bits_have_a_scale_a_row_of_any_length(codes: Codes) -> None:
    assert rounded("m", 17, codes, Dtype.FP16, 32) == Quantized(codes, 0, Dtype.FP16)
    assert rounded("m", 17, codes, Dtype.FP16).groups(17) == 1


@pytest.mark.parametrize(
    ("columns", "most", "group"),
    [(256, 128, 128), (256, 64, 64), (320, 128, 64), (96, 128, 32), (4096, 32, 32)],
)
def test_four_bits_take_the_largest_group_that_divides(columns: int, most: int, group: int) -> None:
    made = rounded("m", columns, Codes.INT4, Dtype.BF16, most)
    assert made == Quantized(Codes.INT4, group, Dtype.BF16)
    assert made.groups(columns) * group == columns


def test_rows_without_a_group_are_refused_by_name() -> None:
    with pytest.raises(NoGroupFits) as error:
        rounded("layers.0.down", 1000, Codes.INT4, Dtype.BF16, 64)
    assert error.value.message == (
        "tensor 'layers.0.down' has rows of 1,000 numbers, which do not divide into groups of 64 "
        "or 32 for int4 (allowed: a multiple of 32)"
    )
    assert error.value.hint == "choose int8 or fp8, which have one scale a row"
