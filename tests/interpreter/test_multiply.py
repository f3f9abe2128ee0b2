"""A block's quantised rows times activations, as the kernel multiplies them."""

from collections.abc import Mapping
from itertools import product as pairs

import pytest
import torch
from torch import Tensor

from interpreter.models import gpu
from interpreter.quantised import FORMATS, random_parts
from plan.shapes import SMALL
from soloist.megakernel.interpreter.multiply import meant, product
from soloist.megakernel.interpreter.tiles import Numbers, unpacked
from soloist.megakernel.layer_kind import Operation
from soloist.megakernel.limits import MAX_QUERIES
from soloist.megakernel.partition import Matrix, RowOrder
from soloist.megakernel.plan import make_plan
from soloist.megakernel.tile import STEP_COLUMNS
from soloist.megakernel.weight_format import quantized_format
from soloist.model.dtype import Dtype
from soloist.model.quantized import OFFSETS, SCALES, Codes
from soloist.model.torch_types import TORCH_DTYPES
from soloist.weights.numbers import numbers
from soloist.weights.packing import pack

# Activations of a permuted matrix come in the order of its columns, as those of any other.
KINDS = [kind for kind, stored in FORMATS.items() if not stored.permuted]
INTEGERS = [kind for kind in KINDS if FORMATS[kind].codes is not Codes.FP8]
SUPER = [kind for kind in KINDS if FORMATS[kind].super_block]
DTYPES = pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.FP16], ids=lambda d: d.value)


def operation(kind: str, rows: int, columns: int, group_tiles: int = 2) -> Operation:
    """A matrix of one block."""
    stored = quantized_format(FORMATS[kind])
    matrix = Matrix("any", rows, columns, RowOrder.NATURAL, blocks=1, format=stored)
    return Operation(matrix, group_tiles, gpu(9))


def read(op: Operation, parts: Mapping[str, Tensor], dtype: Dtype) -> Numbers:
    """What the interpreter finds in packed tensors."""
    packed = pack(make_plan(SMALL, dtype, gpu(9)), op, parts)
    return unpacked(packed.flatten(), op, op.matrix.rows, TORCH_DTYPES[dtype])


def activations(columns: int, dtype: Dtype, seed: int = 0) -> Tensor:
    """[columns with padding, 8] of sizes that differ by query."""
    x = torch.randn(columns, MAX_QUERIES, generator=torch.Generator().manual_seed(seed))
    x = (x * torch.logspace(-3, 3, MAX_QUERIES)).to(TORCH_DTYPES[dtype]).float()
    return torch.nn.functional.pad(x, (0, 0, 0, -columns % STEP_COLUMNS))


@DTYPES
@pytest.mark.parametrize("columns", [96, 1056, 1536, 2048])
@pytest.mark.parametrize("rows", [8, 16, 24, 72])
@pytest.mark.parametrize("kind", KINDS)
def test_places_of_codes_scales_and_zeros(kind: str, rows: int, columns: int, dtype: Dtype) -> None:
    """Tiles, 8 rows left over in an even and in an odd number of steps, two groups of tiles."""
    op, parts = operation(kind, rows, columns), random_parts(rows, columns, FORMATS[kind])
    found = meant(read(op, parts, dtype), op.matrix.format)
    assert torch.equal(found[:, :columns], numbers(FORMATS[kind], parts))


# Rows and columns: 8 rows left over in an odd number of steps; tiles of pairs of steps.
SIZES = pytest.mark.parametrize(("rows", "columns"), [(40, 1056), (48, 2048)])


def test_integers_in_wide_groups_pair_their_steps() -> None:
    paired = {kind for kind in KINDS if operation(kind, 48, 2048).matrix.pairs_steps}
    assert paired == {"int4", "int4-wide", "int8", *SUPER}
    assert not any(
        operation(kind, *size).matrix.pairs_steps
        for kind in KINDS
        for size in ((40, 2048), (48, 1536))
    )


@SIZES
@DTYPES
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_near(kind: str, dtype: Dtype, rows: int, columns: int) -> None:
    """To within half a unit of the integers that activations become, and what fp32 rounds."""
    op, half = operation(kind, rows, columns), TORCH_DTYPES[dtype]
    parts, x = random_parts(rows, columns, FORMATS[kind]), activations(columns, dtype)
    found = read(op, parts, dtype)
    seen = product(found, op.matrix, x, half, rounds=True)
    require_near(seen, meant(found, op.matrix.format), x, op.matrix)


def require_near(
    seen: Tensor, weights: Tensor, x: Tensor, matrix: Matrix, most_error: float = 2e-4
) -> None:
    wanted = weights.double() @ x.double()
    assert ((seen - wanted).norm(dim=0) <= most_error * wanted.norm(dim=0)).all()
    most = weights.double().abs() @ x.double().abs() * 1e-6
    if matrix.format.is_integer:
        width = 128 if matrix.pairs_steps else 64  # columns of a warp that have one power of two
        largest = x.view(-1, width, MAX_QUERIES).abs().amax(1)
        unit = torch.exp2(torch.frexp(largest).exponent - 14.0)
        of_warps = weights.double().abs().unflatten(1, (-1, width)).sum(2)
        most = most + of_warps @ unit.double() / 2
    assert ((seen - wanted).abs() <= most).all()


@SIZES
@DTYPES
@pytest.mark.parametrize("kind", KINDS)
def test_a_channel_far_above_the_others(kind: str, dtype: Dtype, rows: int, columns: int) -> None:
    """It takes digits from the others of its warp and step, or pair, from no more than them."""
    op, half = operation(kind, rows, columns), TORCH_DTYPES[dtype]
    parts, x = random_parts(rows, columns, FORMATS[kind]), activations(columns, dtype)
    found = read(op, parts, dtype)
    for factor in (100, 1000):
        loud = x.clone()
        loud[200] = (x.abs().amax(0) * factor).clamp(max=6e4).to(half).float()
        seen = product(found, op.matrix, loud, half, rounds=True)
        weights = meant(found, op.matrix.format)
        require_near(seen, weights, loud, op.matrix, most_error=1e-3)


@SIZES
@DTYPES
@pytest.mark.parametrize("kind", KINDS)
def test_a_query_has_the_same_bits_alone(kind: str, dtype: Dtype, rows: int, columns: int) -> None:
    op, half = operation(kind, rows, columns), TORCH_DTYPES[dtype]
    parts, x = random_parts(rows, columns, FORMATS[kind]), activations(columns, dtype)
    found = read(op, parts, dtype)
    together = product(found, op.matrix, x, half, rounds=True)
    for query in range(MAX_QUERIES):
        alone = torch.zeros_like(x)
        alone[:, query] = x[:, query]
        seen = product(found, op.matrix, alone, half, rounds=True)
        assert torch.equal(seen[:, query], together[:, query])
        assert not seen[:, :query].any()


@DTYPES
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_infinite_gives_no_number(kind: str, dtype: Dtype) -> None:
    """All products of that query, and none of another."""
    op, half = operation(kind, 24, 1056), TORCH_DTYPES[dtype]
    found, x = read(op, random_parts(24, 1056, FORMATS[kind]), dtype), activations(1056, dtype)
    x[700, 3] = torch.inf
    seen = product(found, op.matrix, x, half, rounds=True)
    assert not seen[:, 3].isfinite().any()
    assert seen[:, [0, 1, 2, 4, 5, 6, 7]].isfinite().all()


@pytest.mark.parametrize("kind", INTEGERS)
def test_activations_of_every_exponent(kind: str) -> None:
    """From the smallest to the largest of bf16; below that of the smallest power all are near 0."""
    op, half = operation(kind, 16, 512), torch.bfloat16
    found = read(op, random_parts(16, 512, FORMATS[kind]), Dtype.BF16)
    weights = meant(found, op.matrix.format)
    x = activations(512, Dtype.BF16)[:, :1].expand(-1, MAX_QUERIES).to(half).float()
    x = x / x.abs().amax()
    for exponent in (-100, -60, 0, 60, 100):
        scaled = x * 2.0**exponent
        seen = product(found, op.matrix, scaled, half, rounds=True)
        require_near(seen, weights, scaled, op.matrix)
    assert not product(found, op.matrix, x * 2.0**-133, half, rounds=True).isnan().any()
    zeros = product(found, op.matrix, torch.zeros_like(x), half, rounds=True)
    assert not zeros.any()


@pytest.mark.parametrize("columns", [512, 1024])
@pytest.mark.parametrize(("kind", "sign"), list(pairs(INTEGERS, (1, -1))))
def test_digits_hold_the_largest_activations(kind: str, sign: int, columns: int) -> None:
    """Activations that are all largest are exact, in a step and in a pair: nothing overflows."""
    op, half = operation(kind, 16, columns), torch.float16
    parts = random_parts(16, columns, FORMATS[kind])
    least = -32 if FORMATS[kind].codes is Codes.INT6 else -128
    parts[""] = torch.full_like(parts[""], 255 if parts[""].dtype is torch.uint8 else least)
    if kind in SUPER:
        parts[SCALES] = torch.full_like(parts[SCALES], 63 if OFFSETS in parts else -128)
    if kind == "super-mixed":  # rows of Q6_K
        parts[SCALES].fill_(-128)
        parts[OFFSETS].zero_()
    found = read(op, parts, Dtype.FP16)
    x = torch.full((columns, MAX_QUERIES), sign * torch.finfo(half).max)
    seen = product(found, op.matrix, x, half, rounds=True)
    wanted = meant(found, op.matrix.format).double() @ x.double()
    torch.testing.assert_close(seen.double(), wanted, rtol=1e-6, atol=0)
