"""What the names of formats mean, and which columns share a scale."""

from dataclasses import replace

import pytest

from soloist.errors import NoGroupFits
from soloist.model.dtype import Dtype
from soloist.model.quantized import AT_LOAD, Codes, Quantized, label, rounded, words


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


def test_names_for_files_and_for_people() -> None:
    int4, int8 = (Quantized(c, g, Dtype.BF16) for c, g in ((Codes.INT4, 128), (Codes.INT8, 0)))
    narrow, blocks = replace(int4, group=64), Quantized(Codes.FP8, 128, Dtype.FP32, False, 128)
    for layers, head, name, told in (
        ([None, None], None, "bf16", "bf16"),
        ([int4, int4], None, "int4", "int4 (groups of 128), head bf16"),
        (
            [int4, narrow],
            int8,
            "int4+int8 head",
            "int4 (groups of 64 and 128), head int8 (one scale a row)",
        ),
        ([None], int8, "bf16+int8 head", "bf16, head int8 (one scale a row)"),
        (
            [replace(int4, permuted=True), int4],
            None,
            "int4-permuted+int4",
            "int4-permuted (groups of 128), int4 (groups of 128), head bf16",
        ),
        (
            [blocks, None],
            None,
            "fp8-block+bf16",
            "bf16, fp8-block (blocks of 128 × 128), head bf16",
        ),
    ):
        assert label(layers, head, "bf16") == name
        assert words(layers, head, "bf16") == told
