"""The kernel of products with packed matrices, compiled by g++, against torch."""

import ctypes
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from soloist.megakernel.weight_format import quantized_format
from soloist.model.dtype import Dtype
from soloist.model.quantized import Codes, Quantized
from soloist.model.torch_types import TORCH_DTYPES
from soloist.prefill.fragments import RowCut, arranged_columns, fragments, tiled
from soloist.prefill.packed_form import SLICED_TOKEN_SLOTS, Form, Out, form_of, rows_source
from unit.prefill.eight_bits import in_order, quantised_rows
from unit.prefill.packed_matrices import SHAPES, Packed, packed_matrix
from unit.prefill.packed_on_host import built, built_numbers

UNTOUCHED = -7.0
BLOCKS = 2


def form(case: Packed, tokens: int, out: Out, **changes: object) -> Form:
    own = form_of(case.operation.matrix, case.plan.dtype, tokens, out)
    return replace(own, **{"token_slots": 3, "most_weight_slots": 3, **changes})


def product(
    case: Packed, own: Form, x: Tensor, folder: Path, each: int | RowCut, seed: int = 1,
    changes: Mapping[str, str] | None = None,
) -> Tensor:  # fmt: skip
    """The kernel's result, with a row and a column behind it that it must not touch."""
    matrix = case.operation.matrix
    gated = own.out in (Out.GATED, Out.ARRANGED)
    results = matrix.rows // 2 if gated else matrix.rows
    pitch = results if gated else results + (5 if results % 8 else 8)
    dtype = torch.float32 if own.out is Out.WIDE else x.dtype
    out = torch.full((own.parts * len(x) + 1, pitch), UNTOUCHED, dtype=dtype)
    found = fragments(case.plan.shape, case.operation, case.image.shape[1], gated=gated)
    tiling, words = tiled(found, each if isinstance(each, RowCut) else RowCut(each), results)
    table = torch.frombuffer(bytearray(words), dtype=torch.uint8)
    arranged, scales = x[:, arranged_columns(matrix.columns)].contiguous(), None
    if own.eight_bits:
        codes, of_tokens = quantised_rows(x)
        # Read in pairs.
        arranged, scales = in_order(codes), torch.nn.functional.pad(of_tokens, (0, 1))
    image = case.image.contiguous()
    places = [ctypes.c_void_p(t.data_ptr()) for t in (arranged, image, table, out)]
    library = built(own, folder, changes)
    numbers = (len(x), matrix.columns, tiling.count, pitch, results, BLOCKS, seed)
    read = ctypes.c_void_p(None if scales is None else scales.data_ptr())
    assert library.run(*places, *map(ctypes.c_uint32, numbers), read), "somebody waits forever"
    assert (out[own.parts * len(x) :] == UNTOUCHED).all()
    assert (out[:, results:] == UNTOUCHED).all()
    return out[: own.parts * len(x), :results]


def activations(case: Packed, tokens: int) -> Tensor:
    draw = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, case.operation.matrix.columns, generator=draw)
    return x.to(case.numbers.dtype)


def close(seen: Tensor, wanted: Tensor, bound: float) -> None:
    assert (seen.double() - wanted).norm() <= bound * wanted.norm()


# Each is compiled, which takes seconds.
WIDE = [
    ("plain", "halves left over", Dtype.BF16), ("plain", "part of a step", Dtype.FP16),
    ("int4", "two groups", Dtype.BF16), ("int4-zeros", "halves left over", Dtype.FP16),
    ("int8-zeros", "halves left over", Dtype.BF16), ("fp8-block", "an odd vocabulary", Dtype.BF16),
    ("int4-offsets", "halves left over", Dtype.BF16), ("super-int4", "two groups", Dtype.BF16),
    ("super-int6", "halves left over", Dtype.BF16), ("super-mixed", "two groups", Dtype.FP16),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("plain", "an odd vocabulary", Dtype.BF16), ("int4", "halves left over", Dtype.BF16),
            ("int4-wide", "one block", Dtype.FP16), ("int4-zeros-64", "heads", Dtype.BF16),
            ("int8", "one block", Dtype.BF16), ("fp8", "two groups", Dtype.BF16),
            ("fp8-32", "halves left over", Dtype.FP16), ("int4-offsets", "heads", Dtype.FP16),
            ("super-int4", "halves left over", Dtype.FP16),
            ("super-int6", "two groups", Dtype.BF16),
            ("super-int6-offset", "gate and up", Dtype.BF16),
            ("super-mixed", "one block", Dtype.BF16),
            ("super-int6", "an odd vocabulary", Dtype.FP16),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "shape", "dtype"), WIDE)
def test_weights_are_the_numbers_that_unpacking_gives(
    kind: str, shape: str, dtype: Dtype, tmp_path: Path
) -> None:
    """One token of ones and zeros after the other: every sum is one number, bit by bit."""
    case = packed_matrix(kind, SHAPES[shape], dtype)
    own = form(case, 64, Out.WIDE)
    columns = case.operation.matrix.columns
    x = torch.zeros(64, columns, dtype=case.numbers.dtype)
    picked = torch.randperm(columns, generator=torch.Generator().manual_seed(0))[:64]
    x[torch.arange(64), picked] = 1.0
    seen = product(case, own, x, tmp_path, 8)
    assert torch.equal(seen, case.numbers[:, picked].float().T)


@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.FP16], ids=lambda d: d.value)
@pytest.mark.parametrize("codes", [Codes.INT4, Codes.INT8])
def test_pairs_are_rounded_once(codes: Codes, dtype: Dtype, tmp_path: Path) -> None:
    """Every code with every scale is what fp32, which has all of their products, is rounded to."""
    stored = quantized_format(Quantized(codes, 128, dtype))
    library = built_numbers(rows_source(stored, dtype, 4), tmp_path)
    kind = TORCH_DTYPES[dtype]
    scales = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(kind)
    finite = scales.isfinite()
    signed = codes is Codes.INT8
    for first in range(-128, 128, 4) if signed else range(0, 16, 4):
        four = range(first, first + 4)
        word = sum((code & 0xFF) << 8 * i for i, code in enumerate(four))
        seen = torch.empty(1 << 16, 4, dtype=torch.int16)
        library.run_numbers(word, ctypes.c_void_p(seen.data_ptr()))
        values = torch.tensor([code - (0 if signed else 8) for code in four], dtype=torch.float32)
        wanted = (scales[:, None].float() * values).to(kind).view(torch.int16)
        assert torch.equal(seen[finite], wanted[finite])


@pytest.mark.parametrize(
    ("kind", "groups", "each", "tokens", "width"),
    [("plain", 2, 8, 70, 64), ("plain", 2, 5, 9, 8), ("plain", 1, 3, 9, 8),
     ("plain", 2, RowCut(7, whole=1, rest=2), 9, 8),
     ("int4", 2, 5, 130, 128), ("fp8-block", 2, 8, 64, 64), ("int8-zeros", 1, 4, 64, 64),
     ("super-int6", 2, 8, 130, 128),
     pytest.param("int4", 2, 3, 130, 128, marks=pytest.mark.slow),
     pytest.param("plain", 2, 7, 70, 64, marks=pytest.mark.slow)],
)  # fmt: skip
def test_products_are_those_of_torch(
    kind: str, groups: int, each: int | RowCut, tokens: int, width: int, tmp_path: Path
) -> None:
    """Also where the second group has no rows in some tiles, or in any, and tiles differ."""
    case = packed_matrix(kind, SHAPES["halves left over"])
    x = activations(case, tokens)
    own = form(case, width, Out.VALUES, groups=groups)
    seen = product(case, own, x, tmp_path, each)
    close(seen, x.double() @ case.numbers.double().T, 3e-3)


# What stands in the kernel, and mistakes in its place.
FREE_TOKENS = "if (lane == 0) mbarrier_arrive(rings.tokens.empty + tokens.slot * 8);\n        "
FREE_WEIGHTS = "if (lane == 0) mbarrier_arrive(rings.weights.empty + weights.slot * 8);"
PAUSES = "for (u32 i = 0; i < 9; ++i) pause();"
MISTAKES = {
    "tokens are given back early": {
        f"wait_for_products<0>();\n        {FREE_TOKENS}": (
            f"{FREE_TOKENS}{PAUSES} wait_for_products<0>();\n        "
        )
    },
    "weights are given back unread": {
        "const u32 run = chunk % kRuns": (
            f"if (chunk % kWeightChunks == 0) {{ {FREE_WEIGHTS} }} {PAUSES} "
            "const u32 run = chunk % kRuns"
        ),
        "if (lane == 0) mbarrier_arrive_after": "if (false) mbarrier_arrive_after",
    },
    "operands change under products": {"convert(next);": "convert(now);"},
    "results are given back unread": {
        "way.store(ring.data + at.slot * kResultBytes, product, i * kLeaving, 0, kLeaving);": "",
        "if (lane == 0) mbarrier_arrive(ring.empty + at.slot * 8);": (
            f"if (lane == 0) mbarrier_arrive(ring.empty + at.slot * 8); {PAUSES} "
            "way.store(ring.data + at.slot * kResultBytes, product, i * kLeaving, 0, kLeaving);"
        ),
    },
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_show(mistake: str, tmp_path: Path) -> None:
    """So the other tests would find them. With the fewest slots somebody else is quick to write."""
    case = packed_matrix("plain", SHAPES["two groups"])
    x = activations(case, 130)
    own = form(case, 64, Out.VALUES, token_slots=1, most_weight_slots=1, most_result_slots=1)
    right = product(case, own, x, tmp_path / "right", 8)
    close(right, x.double() @ case.numbers.double().T, 3e-3)
    wrong = product(case, own, x, tmp_path / "wrong", 8, changes=MISTAKES[mistake])
    assert not torch.equal(wrong, right)


@pytest.mark.parametrize(
    ("kind", "out", "each", "tokens", "width"),
    [("plain", Out.VALUES, 4, 130, 64), ("plain", Out.WIDE, 3, 9, 8),
     ("int4", Out.VALUES, 2, 70, 64), ("int4", Out.ARRANGED, 4, 70, 64)],
)  # fmt: skip
def test_groups_may_have_a_slice_of_the_columns_each(
    kind: str, out: Out, each: int, tokens: int, width: int, tmp_path: Path
) -> None:
    """With several tiles to a block, whose sums go through the same shared memory."""
    case = packed_matrix(kind, SHAPES["gate and up" if out is Out.ARRANGED else "two groups"])
    x = activations(case, tokens)
    own = form(case, width, out, sliced=True, token_slots=SLICED_TOKEN_SLOTS)
    seen = product(case, own, x, tmp_path, each)
    wanted = x.double() @ case.numbers.double().T
    if out is Out.ARRANGED:
        gate, up = wanted.to(x.dtype).double().chunk(2, dim=1)
        wanted = torch.nn.functional.silu(gate) * up
        wanted = wanted[:, arranged_columns(wanted.shape[1])]
    close(seen, wanted, 6e-3)


@pytest.mark.parametrize("out", [Out.GATED, Out.ARRANGED])
@pytest.mark.parametrize("kind", ["plain", "int4"])
def test_gate_and_up_leave_as_neurons(kind: str, out: Out, tmp_path: Path) -> None:
    case = packed_matrix(kind, SHAPES["gate and up"])
    x = activations(case, 50)
    seen = product(case, form(case, 64, out), x, tmp_path, 4)
    gate, up = (x.double() @ case.numbers.double().T).to(x.dtype).double().chunk(2, dim=1)
    wanted = torch.nn.functional.silu(gate) * up
    if out is Out.ARRANGED:
        wanted = wanted[:, arranged_columns(wanted.shape[1])]
    close(seen, wanted, 6e-3)


@pytest.mark.parametrize("kind", ["plain", "int4"])
def test_bits_do_not_depend_on_the_tile(kind: str, tmp_path: Path) -> None:
    case = packed_matrix(kind, SHAPES["heads"])
    x = activations(case, 130)
    seen = [
        product(case, form(case, width, Out.VALUES), x[:count], tmp_path / str(i), each, seed=i)
        for i, (width, count, each) in enumerate([(64, 130, 8), (128, 130, 3), (8, 20, 5)])
    ]
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0][:20], seen[2])


@pytest.mark.parametrize(("kind", "parts"), [("plain", 2), ("plain", 4), ("int4", 4)])
def test_parts_of_the_columns_are_summed_apart(kind: str, parts: int, tmp_path: Path) -> None:
    case = packed_matrix(kind, SHAPES["one block"])
    x = activations(case, 20)
    seen = product(case, form(case, 64, Out.WIDE, parts=parts), x, tmp_path, 3)
    columns = case.operation.matrix.columns // parts
    for part, own in enumerate(seen.split(20)):
        here = slice(part * columns, (part + 1) * columns)
        close(own, x[:, here].double() @ case.numbers[:, here].double().T, 1e-5)
