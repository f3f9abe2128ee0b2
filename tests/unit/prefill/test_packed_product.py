"""Products with packed matrices: what the compiler makes of them, and on a GPU what torch gives."""

import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plan.shapes import PUBLIC
from soloist.errors import CudaMissing
from soloist.jit.bindings import nvrtc
from soloist.jit.compiler import Cubin, compile_source, require_clean
from soloist.megakernel.gpu import TYPICAL
from soloist.megakernel.partition import RowOrder
from soloist.megakernel.plan import make_plan
from soloist.megakernel.weight_format import format_of
from soloist.model.dtype import Dtype
from soloist.prefill.fragments import GROUP_FRAGMENTS, RowCut, arranged_columns, fragments, tiled
from soloist.prefill.packed_form import (
    ARCH,
    ENTRY,
    MOST_PARTED_TOKENS,
    QUANTIZE_ENTRY,
    ROWS_ENTRIES,
    SLICED_TOKEN_SLOTS,
    SLICED_WIDTH,
    TOKEN_SLOTS,
    WIDTHS,
    Form,
    Out,
    form_of,
    is_gated,
    parts_of,
    quantize_source,
    rows_source,
)
from soloist.prefill.packed_product import (
    PackedProduct,
    PackedQuantize,
    PackedRows,
    on_device,
)
from unit.megakernel.code_sizes import INSTRUCTION_BYTES, KIND_BITS, section
from unit.prefill.eight_bits import (
    fp8_numbers,
    in_order,
    product_in_eight_bits,
    quantised_rows,
)
from unit.prefill.in_flight import disassembler, overwritten
from unit.prefill.packed_matrices import KINDS, SHAPES, Packed, packed_matrix

# A product of a group of warps, in machine code of sm_90.
HGMMA, QGMMA = 0xDF0, 0xDF3
# Of the whole result's norm: sums are rounded to 16 bits, of neurons twice.
BOUNDS = {torch.bfloat16: 4e-3, torch.float16: 6e-4}


@pytest.fixture(scope="module", autouse=True)
def _needs_nvrtc() -> None:
    try:
        nvrtc()
    except CudaMissing as error:
        pytest.skip(f"no NVRTC: {error.message}")


def compiled(form: Form) -> Cubin:
    """Without spills, and with no product that waits for another (C7510)."""
    cubin = compile_source(form.source, ARCH)
    used = require_clean(cubin, ENTRY, form.shared_bytes, TYPICAL[ARCH].shared_bytes)
    # What each thread has before groups of warps trade registers.
    assert used.registers <= (168 if form.groups > 1 else 255)
    return cubin


def kinds(cubin: Cubin) -> list[int]:
    code = section(cubin.data, f".text.{ENTRY}")
    words = struct.unpack(f"<{len(code) // 8}Q", code)
    return [word & KIND_BITS for word in words[:: INSTRUCTION_BYTES // 8]]


def some(names: Sequence[str], quick: Sequence[str]) -> list[Any]:
    """Compiling takes seconds each: all but a few are slow."""
    return [n if n in quick else pytest.param(n, marks=pytest.mark.slow) for n in names]


@pytest.mark.parametrize("kind", some(KINDS, ("plain", "int4", "fp8-block")))
def test_every_format_compiles_without_spills(kind: str) -> None:
    matrix = packed_matrix(kind, SHAPES["one block"]).operation.matrix
    for out in (Out.VALUES, Out.WIDE, Out.ARRANGED):
        # Two chunks of four products in the loop, and the last two.
        assert kinds(compiled(form_of(matrix, Dtype.BF16, 256, out))).count(HGMMA) == 16
    compiled(form_of(matrix, Dtype.FP16, 8, Out.WIDE))
    compiled(form_of(matrix, Dtype.BF16, 128, Out.GATED))


@pytest.mark.parametrize("tokens", WIDTHS)
@pytest.mark.parametrize("name", some(list(PUBLIC), ("qwen3-1.7b",)))
def test_every_matrix_of_public_shapes_compiles(name: str, tokens: int) -> None:
    plan = make_plan(PUBLIC[name], Dtype.BF16, TYPICAL[ARCH])
    operations = plan.image.kinds[0].operations
    for short in ("qkv", "attention_output", "down"):
        compiled(form_of(operations[short].matrix, Dtype.BF16, tokens, Out.VALUES))
    if tokens <= MOST_PARTED_TOKENS:
        down = operations["down"].matrix
        for parts in parts_of(down.columns)[1:]:
            compiled(replace(form_of(down, Dtype.BF16, tokens, Out.WIDE), parts=parts))
    if tokens > WIDTHS[0]:
        compiled(form_of(operations["gate_up"].matrix, Dtype.BF16, tokens, Out.ARRANGED))


@pytest.mark.parametrize("tokens", some(WIDTHS, (256, 8)))
def test_products_in_eight_bits_compile_without_spills(tokens: int, tmp_path: Path) -> None:
    matrix = packed_matrix("fp8", SHAPES["one block"]).operation.matrix
    for out in (Out.VALUES, Out.WIDE, *([Out.ARRANGED] if tokens > WIDTHS[0] else [])):
        form = replace(form_of(matrix, Dtype.BF16, tokens, out), eight_bits=True)
        cubin = compiled(form)
        # Four products a span, two spans in the loop, and the last two.
        assert kinds(cubin).count(QGMMA) == 16
        assert kinds(cubin).count(HGMMA) == 0
        if (nvdisasm := disassembler()) is not None:
            file = tmp_path / "product.cubin"
            file.write_bytes(cubin.data)
            assert overwritten(file, nvdisasm) == []
    if tokens in (64, 128):
        gated = form_of(matrix, Dtype.FP16, tokens, Out.GATED)
        compiled(replace(gated, eight_bits=True))
        parted = form_of(matrix, Dtype.BF16, tokens, Out.WIDE)
        compiled(replace(parted, eight_bits=True, parts=4))


def test_the_kernel_that_quantizes_compiles() -> None:
    for dtype in (Dtype.BF16, Dtype.FP16):
        cubin = compile_source(quantize_source(dtype), ARCH)
        require_clean(cubin, QUANTIZE_ENTRY, 0, TYPICAL[ARCH].shared_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kind", ["plain", "int4", "fp8-block"])
def test_variants_to_be_timed_compile(kind: str, groups: int) -> None:
    matrix = packed_matrix(kind, SHAPES["one block"]).operation.matrix
    for tokens in WIDTHS[1:]:
        for out in (Out.VALUES, Out.ARRANGED):
            form = form_of(matrix, Dtype.BF16, tokens, out)
            compiled(replace(form, groups=groups))


@pytest.mark.parametrize("kind", some(["plain", "int4", "fp8-block", "int8-zeros"], ("plain",)))
def test_no_operand_changes_under_a_product(kind: str, tmp_path: Path) -> None:
    if (nvdisasm := disassembler()) is None:
        pytest.skip("no nvdisasm: pip install nvidia-cuda-nvdisasm")
    matrix = packed_matrix(kind, SHAPES["one block"]).operation.matrix
    for tokens, groups, out in (
        (256, 2, Out.VALUES), (256, 1, Out.VALUES), (64, 2, Out.VALUES), (128, 2, Out.ARRANGED),
        (256, 2, Out.ARRANGED), (192, 2, Out.VALUES), (64, 2, Out.WIDE),
    ):  # fmt: skip
        form = form_of(matrix, Dtype.BF16, tokens, out)
        file = tmp_path / "product.cubin"
        file.write_bytes(compiled(replace(form, groups=groups)).data)
        assert overwritten(file, nvdisasm) == []


def sliced(form: Form) -> Form:
    return replace(form, sliced=True, token_slots=SLICED_TOKEN_SLOTS)


@pytest.mark.parametrize("kind", some(["plain", "int4", "fp8-block", "int8-zeros"], ("plain",)))
def test_no_operand_changes_where_groups_have_slices(kind: str, tmp_path: Path) -> None:
    if (nvdisasm := disassembler()) is None:
        pytest.skip("no nvdisasm: pip install nvidia-cuda-nvdisasm")
    matrix = packed_matrix(kind, SHAPES["one block"]).operation.matrix
    for out in (Out.VALUES, Out.WIDE, Out.ARRANGED):
        form = sliced(form_of(matrix, Dtype.BF16, SLICED_WIDTH, out))
        file = tmp_path / "product.cubin"
        file.write_bytes(compiled(form).data)
        assert overwritten(file, nvdisasm) == []


def test_slices_have_slots_of_their_own() -> None:
    matrix = packed_matrix("plain", SHAPES["one block"]).operation.matrix
    form = sliced(form_of(matrix, Dtype.BF16, SLICED_WIDTH, Out.VALUES))
    assert form.weight_slots % 2 == form.token_slots % 2 == 0
    assert form.fragments == GROUP_FRAGMENTS
    assert form.shared_bytes <= TYPICAL[ARCH].shared_bytes - 1024


def test_kernels_beside_them_compile() -> None:
    for dtype in (Dtype.BF16, Dtype.FP16):
        cubin = compile_source(rows_source(format_of(dtype), dtype, 4), ARCH)
        for entry in ROWS_ENTRIES:
            require_clean(cubin, entry, 0, 0)


def test_slots_fill_shared_memory() -> None:
    matrix = packed_matrix("plain", SHAPES["one block"]).operation.matrix
    form = form_of(matrix, Dtype.BF16, 256, Out.VALUES)
    # 32 KB of 64 columns of 256 tokens, 16 KB of as many of 128 rows; of results 66 KB, or half.
    by_slots = [replace(form, token_slots=n) for n in TOKEN_SLOTS]
    assert [one.weight_chunks for one in by_slots] == [1, 1]
    assert [one.weight_slots for one in by_slots] == [4, 2]
    fewer = replace(form, most_result_slots=4)
    assert (fewer.weight_chunks, fewer.weight_slots) == (2, 3)
    assert replace(form, most_weight_slots=3).weight_slots == 3
    left = TYPICAL[ARCH].shared_bytes - form.shared_bytes
    assert 0 <= left < form.weight_slot_bytes + 1024


def multiplied(case: Packed, form: Form, x: Tensor, each: int, folder: Path) -> Tensor:
    """On the GPU, with rows behind the result that must not be touched."""
    matrix, gated = case.operation.matrix, is_gated(form.out)
    stream = torch.cuda.current_stream().cuda_stream
    results = matrix.rows // (2 if gated else 1)
    found = fragments(case.plan.shape, case.operation, case.image.shape[1], gated=gated)
    tiling, table = tiled(found, RowCut(each), results)
    device, image = torch.device("cuda"), case.image.cuda()
    dtype = torch.float32 if form.out is Out.WIDE else x.dtype
    rows = form.parts * len(x)
    out = torch.full((rows + 3, results), float("nan"), device=device, dtype=dtype)
    arranged, scales = torch.empty_like(x), None
    beside = PackedRows(rows_source(format_of(form.dtype), form.dtype, 1), folder)
    beside.arrange(x, None, arranged, stream)
    if form.eight_bits:
        codes = torch.empty(x.shape, device=device, dtype=torch.uint8)
        scales = torch.full((len(x) + 1,), float("nan"), device=device)
        quantize = PackedQuantize(form.dtype, folder)
        quantize(arranged, None, codes, scales, stream, arranged=True)
        arranged = codes
    kernel = PackedProduct(form, folder)
    words = on_device(table, device)
    written = out[:rows].view(-1, len(x), results) if form.parts > 1 else out[:rows]
    kernel.launch(arranged, image.data_ptr(), words, tiling, written, stream, scales)
    if form.parts > 1:
        summed = torch.empty(len(x), results, device=device, dtype=x.dtype)
        beside.add_parts(written, summed, stream)
    torch.cuda.synchronize()
    assert out[rows:].isnan().all()
    return summed if form.parts > 1 else written


def needs_hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["halves left over", "two groups", "heads", "an odd vocabulary"])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_what_unpacking_gives_on_the_gpu(kind: str, shape: str, tmp_path: Path) -> None:
    """A one in each row of activations: every sum is one number, bit by bit."""
    needs_hopper()
    case = packed_matrix(kind, SHAPES[shape])
    columns = case.operation.matrix.columns
    x = torch.eye(columns, dtype=torch.bfloat16, device="cuda")
    form = form_of(case.operation.matrix, Dtype.BF16, 256, Out.WIDE)
    seen = multiplied(case, form, x, 8, tmp_path)
    assert torch.equal(seen.cpu(), case.numbers.float().T)


@pytest.mark.gpu
@pytest.mark.parametrize(("groups", "token_slots"), [(1, 4), (2, 4), (2, 3)])
@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.FP16], ids=lambda d: d.value)
@pytest.mark.parametrize("kind", ["plain", "int4", "fp8-block", "int8-zeros"])
def test_products_are_those_of_torch_on_the_gpu(
    kind: str, dtype: Dtype, groups: int, token_slots: int, tmp_path: Path
) -> None:
    """A row has the same bits among any number of rows, in tiles of any width."""
    needs_hopper()
    case = packed_matrix(kind, (4096, 2048, SHAPES["one block"][2], 100, 3), dtype)
    draw = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(2048, 2048, generator=draw, device="cuda").to(case.numbers.dtype)
    wanted = x.double() @ case.numbers.cuda().double().T
    first = None
    for tokens, width in ((2048, 256), (1500, 128), (64, 64), (300, 256), (1, 8)):
        form = form_of(case.operation.matrix, dtype, width, Out.VALUES)
        form = replace(form, groups=groups, token_slots=token_slots)
        seen = multiplied(case, form, x[:tokens].contiguous(), form.fragments, tmp_path)
        first = seen if first is None else first
        assert torch.equal(seen, first[:tokens])
    assert (first.double() - wanted).norm() <= BOUNDS[x.dtype] * wanted.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("each", [3, 4, 5])
@pytest.mark.parametrize("out", [Out.VALUES, Out.WIDE])
def test_groups_without_rows_give_back_what_comes_on_the_gpu(
    out: Out, each: int, tmp_path: Path
) -> None:
    """In all tiles, in the last one, or in none."""
    needs_hopper()
    case = packed_matrix("plain", (4096 + 64, 2048, SHAPES["one block"][2], 100, 3))
    draw = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(700, 2048, generator=draw, device="cuda").to(torch.bfloat16)
    wanted = x.double() @ case.numbers.cuda().double().T
    form = form_of(case.operation.matrix, Dtype.BF16, 128, out)
    for _ in range(20):
        seen = multiplied(case, form, x, each, tmp_path)
        assert (seen.double() - wanted).norm() <= 4e-3 * wanted.norm()


@pytest.mark.gpu
def test_products_await_the_kernel_beside_which_they_begin(tmp_path: Path) -> None:
    """Tokens and results are in the same memory all the time, and kernels follow at once."""
    needs_hopper()
    case = packed_matrix("plain", (4096, 2048, SHAPES["one block"][2], 100, 3))
    image, stream = case.image.cuda(), torch.cuda.current_stream().cuda_stream
    draw = torch.Generator("cuda").manual_seed(0)
    xs = torch.randn(40, 2048, 2048, generator=draw, device="cuda").to(torch.bfloat16)
    form = form_of(case.operation.matrix, Dtype.BF16, 256, Out.VALUES)
    found = fragments(case.plan.shape, case.operation, case.image.shape[1], gated=False)
    tiling, words = tiled(found, RowCut(8, whole=8, rest=4), case.operation.matrix.rows)
    table, kernel = on_device(words, image.device), PackedProduct(form, tmp_path)
    beside = PackedRows(rows_source(format_of(Dtype.BF16), Dtype.BF16, 1), tmp_path)
    arranged = torch.empty_like(xs[0])
    out = torch.empty(len(xs[0]), tiling.results, dtype=torch.bfloat16, device="cuda")

    def all_products(*, waits: bool) -> Tensor:
        kept = torch.empty(len(xs), *out.shape, dtype=out.dtype, device="cuda")
        for x, to in zip(xs, kept, strict=True):
            for step in (
                lambda x=x: beside.arrange(x, None, arranged, stream),
                lambda: kernel.launch(arranged, image.data_ptr(), table, tiling, out, stream),
                lambda to=to: to.copy_(out),
            ):
                step()
                if waits:
                    torch.cuda.synchronize()
        torch.cuda.synchronize()
        return kept

    assert torch.equal(all_products(waits=False), all_products(waits=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.FP16], ids=lambda d: d.value)
@pytest.mark.parametrize("kind", ["plain", "int4", "fp8-block", "int8-zeros"])
def test_slices_are_added_on_the_gpu(kind: str, dtype: Dtype, tmp_path: Path) -> None:
    """With one tile to a block and with several; the same bits whatever lies beside a row."""
    needs_hopper()
    draw = torch.Generator("cuda").manual_seed(0)
    for rows in (1024, 8192 + 64):
        case = packed_matrix(kind, (rows, 2048, SHAPES["one block"][2], 100, 3), dtype)
        x = torch.randn(128, 2048, generator=draw, device="cuda").to(case.numbers.dtype)
        wanted = x.double() @ case.numbers.cuda().double().T
        form = sliced(form_of(case.operation.matrix, dtype, SLICED_WIDTH, Out.VALUES))
        whole = multiplied(case, form, x, form.fragments, tmp_path)
        assert (whole.double() - wanted).norm() <= BOUNDS[x.dtype] * wanted.norm()
        for tokens, each in ((128, 3), (70, 4), (1, 2)):
            seen = multiplied(case, form, x[:tokens].contiguous(), each, tmp_path)
            assert torch.equal(seen, whole[:tokens])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["plain", "int4", "fp8-block"])
def test_parts_of_the_columns_are_added_on_the_gpu(kind: str, tmp_path: Path) -> None:
    needs_hopper()
    case = packed_matrix(kind, (1024, 2048, SHAPES["one block"][2], 100, 3))
    draw = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(128, 2048, generator=draw, device="cuda").to(torch.bfloat16)
    wanted = x.double() @ case.numbers.cuda().double().T
    for tokens, parts in ((128, 2), (100, 8), (8, 4)):
        width = next(width for width in WIDTHS if width >= tokens)
        form = form_of(case.operation.matrix, Dtype.BF16, width, Out.WIDE)
        seen = multiplied(case, replace(form, parts=parts), x[:tokens].contiguous(), 8, tmp_path)
        assert (seen.double() - wanted[:tokens]).norm() <= 4e-3 * wanted[:tokens].norm()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.FP16], ids=lambda d: d.value)
def test_rows_become_codes_on_the_gpu(dtype: Dtype, tmp_path: Path) -> None:
    """Of activations in their order, in that of products in 16 bits, and in that of a table."""
    needs_hopper()
    stream = torch.cuda.current_stream().cuda_stream
    draw = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(300, 4640, generator=draw, device="cuda")
    x[2], x[3] = 0.0, x[3] * 100
    x = x.to(torch.bfloat16 if dtype is Dtype.BF16 else torch.float16)
    quantize = PackedQuantize(dtype, tmp_path)
    arranged = torch.empty_like(x)
    beside = PackedRows(rows_source(format_of(dtype), dtype, 1), tmp_path)
    beside.arrange(x, None, arranged, stream)
    order = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(0))
    wanted, wanted_scales = quantised_rows(x.cpu())
    for given, table in ((x, None), (arranged, None), (x, order.to(torch.uint16).cuda())):
        codes = torch.empty(x.shape, device="cuda", dtype=torch.uint8)
        scales = torch.empty(len(x), device="cuda")
        quantize(given, table, codes, scales, stream, arranged=given is arranged)
        torch.cuda.synchronize()
        assert torch.equal(scales.cpu(), wanted_scales)
        assert torch.equal(
            codes.cpu(), in_order(wanted if table is None else wanted.view(torch.uint8)[:, order])
        )


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [1024, 2048, 640])
def test_products_in_eight_bits_on_the_gpu(columns: int, tmp_path: Path) -> None:
    """As defined, but for the tensor cores' short sums; the same bits in tiles of any width."""
    needs_hopper()
    shape = (4096 + 72, columns, SHAPES["one block"][2], 100, 3)
    case = packed_matrix("fp8", shape)
    draw = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(2048, columns, generator=draw, device="cuda").to(torch.bfloat16)
    wanted = product_in_eight_bits(x, fp8_numbers("fp8", shape).cuda())
    first = None
    for tokens, width in ((2048, 256), (1501, 128), (64, 64), (300, 256), (1, 8)):
        form = replace(
            form_of(case.operation.matrix, Dtype.BF16, width, Out.VALUES), eight_bits=True
        )
        seen = multiplied(case, form, x[:tokens].contiguous(), form.fragments, tmp_path)
        first = seen if first is None else first
        assert torch.equal(seen, first[:tokens])
    assert (first.double() - wanted).norm() <= 1e-2 * wanted.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [2, 4])
def test_parts_in_eight_bits_are_added_on_the_gpu(parts: int, tmp_path: Path) -> None:
    needs_hopper()
    shape = (1024, 2048, SHAPES["one block"][2], 100, 3)
    case = packed_matrix("fp8", shape)
    draw = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(101, 2048, generator=draw, device="cuda").to(torch.bfloat16)
    wanted = product_in_eight_bits(x, fp8_numbers("fp8", shape).cuda())
    form = form_of(case.operation.matrix, Dtype.BF16, 128, Out.WIDE)
    seen = multiplied(case, replace(form, parts=parts, eight_bits=True), x, 8, tmp_path)
    assert (seen.double() - wanted).norm() <= 1e-2 * wanted.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("out", [Out.ARRANGED, Out.GATED])
def test_neurons_in_eight_bits_on_the_gpu(out: Out, tmp_path: Path) -> None:
    needs_hopper()
    shape = (2 * 2048, 1024, RowOrder.PAIRED, 100, 2)
    case = packed_matrix("fp8", shape)
    draw = torch.Generator("cuda").manual_seed(0)
    # Codes go up to 448.
    x = (torch.randn(500, 1024, generator=draw, device="cuda") * 1e-4).to(torch.bfloat16)
    sums = product_in_eight_bits(x, fp8_numbers("fp8", shape).cuda())
    gate, up = sums.to(x.dtype).double().chunk(2, dim=1)
    wanted = torch.nn.functional.silu(gate) * up
    if out is Out.ARRANGED:
        wanted = wanted[:, arranged_columns(wanted.shape[1])]
    form = replace(form_of(case.operation.matrix, Dtype.BF16, 128, out), eight_bits=True)
    seen = multiplied(case, form, x, 8, tmp_path)
    assert (seen.double() - wanted).norm() <= 2e-2 * wanted.norm()
