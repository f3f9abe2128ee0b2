"""Products of FP8 matrices with activations in 8 bits, compiled by g++, against torch."""

import ctypes
from pathlib import Path

import pytest
import torch
from torch import Tensor

from soloist.megakernel.partition import RowOrder
from soloist.model.dtype import Dtype
from soloist.model.torch_types import TORCH_DTYPES
from soloist.prefill.fragments import arranged_columns, eight_bit_columns
from soloist.prefill.packed_form import Out, quantize_source, takes_eight_bits
from unit.prefill.eight_bits import fp8_numbers, in_order, product_in_eight_bits, quantised_rows
from unit.prefill.packed_matrices import SHAPES, packed_matrix
from unit.prefill.packed_on_host import built_quantize
from unit.prefill.test_packed_product_on_host import activations, close, form, product

# An odd number of spans.
ODD = (72, 640, RowOrder.NATURAL, 3, 2)


def quantised_by_kernel(
    x: Tensor, dtype: Dtype, folder: Path, columns: Tensor | None = None, *, arranged: bool = False
) -> tuple[Tensor, Tensor]:
    library = built_quantize(quantize_source(dtype), folder)
    codes = torch.empty(x.shape, dtype=torch.uint8)
    scales = torch.full((len(x),), float("nan"))
    table = None if columns is None else columns.data_ptr()
    places = (x.data_ptr(), table, codes.data_ptr(), scales.data_ptr())
    assert library.run_quantize(*map(ctypes.c_void_p, places), len(x), x.shape[1], arranged)
    return codes, scales


@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.FP16], ids=lambda d: d.value)
@pytest.mark.parametrize("order", ["plain", "arranged", "table"])
def test_rows_become_codes(order: str, dtype: Dtype, tmp_path: Path) -> None:
    """The largest number of a row may be anywhere; a row of zeros stays one."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(30, 4640, generator=draw)
    x[:6] *= torch.tensor([1.0, 1e-3, 0.0, 100.0, 1e-30, 1.0])[:, None]
    x[0, 4639], x[3, 0] = -50.0, 1000.0
    x = x.to(TORCH_DTYPES[dtype])
    codes, scales = quantised_rows(x)
    given, table = x, None
    if order == "arranged":
        given = x[:, arranged_columns(x.shape[1])].contiguous()
    if order == "table":
        table = torch.randperm(x.shape[1], generator=draw).to(torch.uint16)
        codes = codes[:, table.long()]
    seen, own = quantised_by_kernel(given, dtype, tmp_path, table, arranged=order == "arranged")
    assert torch.equal(own, scales)
    assert torch.equal(seen, in_order(codes))
    assert not (seen[2] & 0x7F).any()


def test_what_is_no_number_stays_none(tmp_path: Path) -> None:
    x = torch.ones(3, 64, dtype=torch.bfloat16)
    x[0, 40], x[1, 7] = float("nan"), float("-inf")
    codes, scales = quantised_by_kernel(x, Dtype.BF16, tmp_path)
    numbers = codes.view(torch.float8_e4m3fn).float() * scales[:, None]
    assert [row.isnan().any().item() for row in numbers] == [True, True, False]


def test_a_place_has_a_column_of_its_own() -> None:
    assert sorted(eight_bit_columns(160)) == list(range(160))


# Each is compiled, which takes seconds.
@pytest.mark.parametrize(
    ("shape", "width", "tokens", "each", "changes"),
    [
        ("halves left over", 64, 70, 8, {}),
        ("two groups", 128, 130, 3, {}),
        ("heads", 8, 9, 4, {"groups": 1}),
        ("odd", 64, 33, 8, {"token_slots": 1, "most_weight_slots": 1}),
        pytest.param("an odd vocabulary", 64, 65, 8, {}, marks=pytest.mark.slow),
        pytest.param("one block", 256, 300, 8, {}, marks=pytest.mark.slow),
    ],
)
def test_products_are_as_defined(
    shape: str, width: int, tokens: int, each: int, changes: dict[str, int], tmp_path: Path
) -> None:
    own_shape = ODD if shape == "odd" else SHAPES[shape]
    case = packed_matrix("fp8", own_shape)
    assert takes_eight_bits(case.operation.matrix)
    x = activations(case, tokens)
    wanted = product_in_eight_bits(x, fp8_numbers("fp8", own_shape))
    for out, bound in ((Out.VALUES, 3e-3), (Out.WIDE, 1e-6)):
        own = form(case, width, out, eight_bits=True, **changes)
        close(product(case, own, x, tmp_path / out, each), wanted, bound)


@pytest.mark.parametrize("out", [Out.GATED, Out.ARRANGED])
def test_gate_and_up_leave_as_neurons(out: Out, tmp_path: Path) -> None:
    """Scaled before SwiGLU."""
    shape = SHAPES["gate and up"]
    case = packed_matrix("fp8", shape, Dtype.FP16)
    # So small that sums stay in fp16's range.
    x = activations(case, 50) * 1e-4
    seen = product(case, form(case, 64, out, eight_bits=True), x, tmp_path, 4)
    sums = product_in_eight_bits(x, fp8_numbers("fp8", shape))
    gate, up = sums.to(x.dtype).double().chunk(2, dim=1)
    wanted = torch.nn.functional.silu(gate) * up
    if out is Out.ARRANGED:
        wanted = wanted[:, arranged_columns(wanted.shape[1])]
    close(seen, wanted, 2e-3)


@pytest.mark.parametrize("parts", [2, 4])
def test_parts_of_the_columns_are_scaled_each(parts: int, tmp_path: Path) -> None:
    shape = SHAPES["one block"]
    case = packed_matrix("fp8", shape)
    x = activations(case, 21)
    own = form(case, 64, Out.WIDE, parts=parts, eight_bits=True)
    seen = product(case, own, x, tmp_path, 3)
    matrix, columns = fp8_numbers("fp8", shape).double(), shape[1] // parts
    codes, scales = quantised_rows(x)
    for part, of_part in enumerate(seen.split(21)):
        here = slice(part * columns, (part + 1) * columns)
        wanted = codes.to(torch.float64)[:, here] @ matrix[:, here].T * scales.double()[:, None]
        close(of_part, wanted, 1e-6)


def test_bits_do_not_depend_on_the_tile(tmp_path: Path) -> None:
    case = packed_matrix("fp8", SHAPES["heads"])
    x = activations(case, 130)
    seen = [
        product(
            case, form(case, width, Out.VALUES, eight_bits=True), x[:count], tmp_path / str(i),
            each, seed=i,
        )
        for i, (width, count, each) in enumerate([(64, 130, 8), (128, 130, 3), (8, 21, 5)])
    ]  # fmt: skip
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0][:21], seen[2])


def test_only_rows_with_one_scale_are_multiplied_in_eight_bits() -> None:
    shape = SHAPES["one block"]
    narrow = (48, 1024 - 64, RowOrder.NATURAL, 1, 3)
    taken = {
        kind: takes_eight_bits(packed_matrix(kind, shape).operation.matrix)
        for kind in ("plain", "int4", "int8", "fp8", "fp8-32", "fp8-block")
    }
    assert [kind for kind, takes in taken.items() if takes] == ["fp8"]
    assert not takes_eight_bits(packed_matrix("fp8", narrow).operation.matrix)
