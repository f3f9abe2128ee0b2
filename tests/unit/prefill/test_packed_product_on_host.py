"""The kernel of products with packed matrices, compiled by g++, against torch."""

import ctypes
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from soloist.model.dtype import Dtype
from soloist.prefill.fragments import arranged_columns, fragments, tiled
from soloist.prefill.packed_form import Form, Out, form_of
from unit.prefill.packed_matrices import SHAPES, Packed, packed_matrix
from unit.prefill.packed_on_host import built

UNTOUCHED = -7.0
BLOCKS = 4


def form(case: Packed, tokens: int, out: Out, **changes: object) -> Form:
    own = form_of(case.operation.matrix, case.plan.dtype, tokens, out)
    return replace(own, most_slots=3, **changes)


def product(case: Packed, own: Form, x: Tensor, folder: Path, each: int, seed: int = 1) -> Tensor:
    """The kernel's result, with a row and a column behind it that it must not touch."""
    matrix = case.operation.matrix
    gated = own.out in (Out.GATED, Out.ARRANGED)
    results = matrix.rows // 2 if gated else matrix.rows
    pitch = results if gated else results + (5 if results % 8 else 8)
    dtype = torch.float32 if own.out is Out.WIDE else x.dtype
    out = torch.full((own.parts * len(x) + 1, pitch), UNTOUCHED, dtype=dtype)
    found = fragments(case.plan.shape, case.operation, case.image.shape[1], gated=gated)
    tiling, words = tiled(found, each, results, own.cluster)
    table = torch.frombuffer(bytearray(words), dtype=torch.uint8)
    arranged = x[:, arranged_columns(matrix.columns)].contiguous()
    image = case.image.contiguous()
    places = [ctypes.c_void_p(t.data_ptr()) for t in (arranged, image, table, out)]
    library = built(own, folder)
    numbers = (len(x), matrix.columns, tiling.count, pitch, results, BLOCKS, seed)
    assert library.run(*places, *map(ctypes.c_uint32, numbers)), "somebody waits forever"
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
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("plain", "an odd vocabulary", Dtype.BF16), ("int4", "halves left over", Dtype.BF16),
            ("int4-wide", "one block", Dtype.FP16), ("int4-zeros-64", "heads", Dtype.BF16),
            ("int8", "one block", Dtype.BF16), ("fp8", "two groups", Dtype.BF16),
            ("fp8-32", "halves left over", Dtype.FP16),
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


@pytest.mark.parametrize(
    "direct", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["slots", "direct"]
)
@pytest.mark.parametrize(
    ("kind", "groups", "each", "tokens", "width"),
    [("plain", 2, 8, 70, 64), ("plain", 1, 3, 9, 8), ("int4", 2, 5, 130, 128),
     ("fp8-block", 2, 8, 64, 64), ("int8-zeros", 1, 4, 64, 64)],
)  # fmt: skip
def test_products_are_those_of_torch(
    kind: str, groups: int, each: int, tokens: int, width: int, direct: bool, tmp_path: Path
) -> None:
    case = packed_matrix(kind, SHAPES["halves left over"])
    x = activations(case, tokens)
    own = form(case, width, Out.VALUES, groups=groups, direct=direct)
    seen = product(case, own, x, tmp_path, each)
    close(seen, x.double() @ case.numbers.double().T, 3e-3)


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


@pytest.mark.parametrize(
    ("kind", "cluster", "out", "each", "parts"),
    [
        ("plain", 2, Out.VALUES, 8, 1), ("plain", 4, Out.VALUES, 3, 1),
        ("int4", 2, Out.VALUES, 5, 1), ("plain", 2, Out.WIDE, 3, 2),
        pytest.param("fp8-block", 4, Out.VALUES, 8, 1, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_blocks_of_a_cluster_share_the_copying_of_tokens(
    kind: str, cluster: int, out: Out, each: int, parts: int, tmp_path: Path
) -> None:
    """Also where the last cluster has fewer tiles of rows than blocks."""
    case = packed_matrix(kind, SHAPES["one block" if parts > 1 else "heads"])
    x = activations(case, 130)
    alone, together = (
        product(
            case, form(case, 64, out, parts=parts, cluster=count), x, tmp_path / str(count), each
        )
        for count in (1, cluster)
    )
    assert torch.equal(alone, together)


@pytest.mark.parametrize(("kind", "parts"), [("plain", 2), ("plain", 4), ("int4", 4)])
def test_parts_of_the_columns_are_summed_apart(kind: str, parts: int, tmp_path: Path) -> None:
    case = packed_matrix(kind, SHAPES["one block"])
    x = activations(case, 20)
    seen = product(case, form(case, 64, Out.WIDE, parts=parts), x, tmp_path, 3)
    columns = case.operation.matrix.columns // parts
    for part, own in enumerate(seen.split(20)):
        here = slice(part * columns, (part + 1) * columns)
        close(own, x[:, here].double() @ case.numbers[:, here].double().T, 1e-5)
