"""Prompts through a small model's packed matrices; the kernels are those for the GPU, by g++."""

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from interpreter.quantised import FORMATS, alike, formats_of, quantised
from plan.shapes import PUBLIC
from soloist.engine.memory import Footprint
from soloist.errors import SettingError, ShapeUnsupported
from soloist.jit.source import Source
from soloist.kv.layout import PAGE_POSITIONS
from soloist.kv.pool import PagePool
from soloist.megakernel.gpu import TYPICAL, Gpu
from soloist.megakernel.packed_weights import PackedWeights
from soloist.megakernel.plan import Plan, make_plan
from soloist.model.config import Attention, ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.families.dense import decoder_tensors
from soloist.model.quantized import Codes, Quantized
from soloist.parallel.share import Share
from soloist.prefill import packed_choice, packed_matrices
from soloist.prefill.buffers import prefill_bytes
from soloist.prefill.fragments import RowCut, Shares, Tiling, arranged_column
from soloist.prefill.packed_choice import FormChoice, forms_of_passes, widths_for
from soloist.prefill.packed_form import (
    Form,
    Out,
    arranged_bytes,
    gates_all,
    quantize_source,
    rows_source,
)
from soloist.prefill.packed_matrices import PackedMatrices
from soloist.prefill.packed_prompts import (
    packs_prompts,
    require_eight_bit_prompts,
    require_packed_prompts,
)
from soloist.prefill.part import Part
from soloist.prefill.products import Matrices, Products
from soloist.prefill.runner import Prefill
from soloist.weights.packed import pack_weights
from soloist.weights.sharding import shard_all
from soloist.weights.unpacking import Unpacked, tables_of_columns
from unit.prefill.models import model, random_weights, vectors
from unit.prefill.packed_on_host import built, built_quantize, built_rows

CPU = torch.device("cpu")
PAGES, TOKENS = [2, 0], 70
HEADS = Attention(4, 2, 32)
# Columns are multiples of 32; the vocabulary is odd.
SMALL = model(HEADS, HEADS, ffn=96, hidden_size=64)
MODELS = {
    "untied": SMALL,
    "tied": replace(SMALL, tied_head=True),
    "biases": model(*[replace(HEADS, qkv_bias=True)] * 2, ffn=96, hidden_size=64, mlp_bias=True),
}


class OnHost:
    """`PackedProduct` of the same form, by coroutines."""

    folder: Path
    libraries: ClassVar[dict[Form, ctypes.CDLL]] = {}  # of all tests

    def __init__(self, form: Form, _: Path | None) -> None:
        self.form = form
        if form not in self.libraries:
            self.libraries[form] = built(form, self.folder / str(len(self.libraries)))

    def launch(
        self, x: Tensor, image: int, table: Tensor, tiling: Tiling, out: Tensor, _: int,
        scales: Tensor | None,
    ) -> None:  # fmt: skip
        assert self.form.eight_bits == (scales is not None) == (x.dtype is torch.uint8)
        assert out.shape[-1] == tiling.results
        places = [x.data_ptr(), image, table.data_ptr(), out.data_ptr()]
        results = tiling.results
        numbers = (len(x), x.shape[1], tiling.count, results, results, 2, 1)
        run = self.libraries[self.form].run
        read = ctypes.c_void_p(None if scales is None else scales.data_ptr())
        assert run(*map(ctypes.c_void_p, places), *map(ctypes.c_uint32, numbers), read)


class RowsOnHost:
    """`PackedRows`, one thread after the other."""

    folder: Path

    def __init__(self, source: Source, _: Path | None) -> None:
        self._library = built_rows(source, self.folder / "rows")

    def arrange(self, x: Tensor, columns: Tensor | None, out: Tensor, _: int) -> None:
        table = None if columns is None else columns.data_ptr()
        places = map(ctypes.c_void_p, (x.data_ptr(), table, out.data_ptr()))
        self._library.run_arrange(*places, x.shape[1], x.numel() // 8)

    def add_parts(self, parts: Tensor, out: Tensor, _: int) -> None:
        places = map(ctypes.c_void_p, (parts.data_ptr(), out.data_ptr()))
        self._library.run_add_parts(*places, len(parts), out.numel(), out.dtype is torch.float32)

    def look_up(self, image: int, table: Tensor, ids: Tensor, residual: Tensor, _: int) -> None:
        places = (image, table.data_ptr(), ids.data_ptr(), residual.data_ptr())
        self._library.run_look_up(*map(ctypes.c_void_p, places), residual.shape[1], len(ids))


class QuantizeOnHost:
    """`PackedQuantize`, one row after the other."""

    folder: Path

    def __init__(self, dtype: Dtype, _: Path | None) -> None:
        self._library = built_quantize(quantize_source(dtype), self.folder / "quantize")

    def __call__(
        self, x: Tensor, columns: Tensor | None, codes: Tensor, scales: Tensor, _: int,
        *, arranged: bool,
    ) -> None:  # fmt: skip
        table = None if columns is None else columns.data_ptr()
        places = map(ctypes.c_void_p, (x.data_ptr(), table, codes.data_ptr(), scales.data_ptr()))
        assert self._library.run_quantize(*places, *x.shape, arranged)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    OnHost.libraries.clear()
    return tmp_path_factory.mktemp("products")


@pytest.fixture(autouse=True)
def on_host(monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path) -> None:
    OnHost.folder, RowsOnHost.folder, QuantizeOnHost.folder = folder, tmp_path, tmp_path
    monkeypatch.setattr(packed_matrices, "PackedProduct", OnHost)
    monkeypatch.setattr(packed_matrices, "PackedRows", RowsOnHost)
    monkeypatch.setattr(packed_matrices, "PackedQuantize", QuantizeOnHost)
    monkeypatch.setattr(PackedMatrices, "_stream", 0)
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.device("cpu"))


def packed_model(config: ModelConfig, kind: str | None) -> tuple[Plan, PackedWeights, dict]:
    weights = shard_all(Share(config, 1, 0), random_weights(config))
    names = [f"layers.{i}.{n}" for i in (0, 1) for n in ("qkv", "attention_output", "gate_up")]
    stored = {} if kind is None else alike(config, kind, [*names, "layers.0.down"])
    held = {n: x.to(torch.bfloat16) if x.ndim == 2 else x.float() for n, x in weights.items()}
    parts, _ = quantised(held, stored)
    plan = make_plan(config, Dtype.BF16, Gpu("sm_90a", 5, 227 * 1024), 1, formats_of(stored))
    return plan, pack_weights(plan, dict(parts), CPU), vectors(weights)


def logits(config: ModelConfig, own: dict, matrices: Matrices | Products) -> Tensor:
    a = config.layers[0].attention
    pool = PagePool(config.num_layers, a.num_kv_heads, a.head_dim, 3, torch.bfloat16, CPU)
    run = Prefill([Part(Share(config, 1, 0), matrices, own, pool, most_tokens=TOKENS)])
    ids = torch.randint(config.vocab_size, (TOKENS,), generator=torch.Generator().manual_seed(1))
    found = run.run(ids, 0, PAGES)
    assert found is not None
    return found


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "kind"),
    [("untied", None), ("tied", None), ("biases", None), ("untied", "int4"),
     ("untied", "fp8-block"), ("untied", "int4-permuted"), ("untied", "int4-offsets"),
     ("untied", "super-mixed")],
)  # fmt: skip
def test_prompts_read_what_decoding_reads(name: str, kind: str | None) -> None:
    config = MODELS[name]
    plan, packed, own = packed_model(config, kind)
    columns, choice = tables_of_columns(plan, packed), FormChoice(plan)
    products = PackedMatrices(choice, packed, columns, TOKENS, None)
    seen = logits(config, own, products)
    # Logits are fp32 on a GPU.
    head, _ = choice.of(plan.image.head, 1, Out.VALUES)
    assert {*products.forms} <= {*forms_of_passes(choice, [TOKENS]), head}, "compiled ahead"
    wanted = logits(config, own, Unpacked(plan, packed))
    assert (seen - wanted).norm() <= 0.03 * wanted.norm()  # both round to bf16 again and again


@pytest.mark.parametrize("kind", ["int4", "int4-permuted"])
def test_norms_leave_as_products_take_them(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention's are arranged apart, and factors of codes in an order of their own."""
    plan, packed, own = packed_model(MODELS["untied"], kind)
    columns, choice = tables_of_columns(plan, packed), FormChoice(plan)
    products = PackedMatrices(choice, packed, columns, TOKENS, None)
    seen, arrange = list[tuple[int, ...]](), RowsOnHost.arrange

    def counted(self: RowsOnHost, x: Tensor, columns: Tensor | None, out: Tensor, to: int) -> None:
        seen.append(tuple(x.shape))
        arrange(self, x, columns, out, to)

    monkeypatch.setattr(RowsOnHost, "arrange", counted)
    logits(MODELS["untied"], own, products)
    of_attention = [(TOKENS, 128), (1, 128)]
    if kind == "int4":
        assert seen == of_attention
    else:
        assert len(seen) > len(of_attention)


def test_gate_and_up_have_no_room_where_nobody_writes_them() -> None:
    for name, gates in (("untied", True), ("biases", False)):
        plan, packed, own = packed_model(MODELS[name], None)
        products = PackedMatrices(FormChoice(plan), packed, {}, TOKENS, None)
        assert products.gates_all == gates
        pool = PagePool(2, 2, 32, 3, torch.bfloat16, CPU)
        part = Part(Share(MODELS[name], 1, 0), products, own, pool, most_tokens=TOKENS)
        assert (part.work.buffers.gate_up.numel() == 0) == gates
        assert gates_all(plan) == gates
        of_both = [
            prefill_bytes(MODELS[name], plan, 3, attends_pages=True, gates=on)
            for on in (False, True)
        ]
        assert of_both[0] - of_both[1] == min(2048, 3 * PAGE_POSITIONS) * 2 * 96 * 2


def test_a_words_place_is_that_of_its_columns(folder: Path) -> None:
    plan, _, _ = packed_model(SMALL, None)
    head = plan.image.head.matrix
    library = built_rows(rows_source(head.format, plan.dtype, head.steps), folder / "places")
    places = [library.place_of_word(word) for word in range(48)]
    assert [arranged_column(2 * place) for place in places] == [2 * word for word in range(48)]


def test_bits_do_not_depend_on_the_cut() -> None:
    config = MODELS["untied"]
    plan, packed, _ = packed_model(config, None)
    products = PackedMatrices(FormChoice(plan), packed, {}, TOKENS, None)
    assert products.behaviour("layers.0.qkv") == products.behaviour("layers.1.qkv")
    x = torch.randn(TOKENS, 64, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    whole, some = (torch.empty(n, 256, dtype=x.dtype) for n in (TOKENS, 5))
    products.multiply(x, "layers.1.qkv", whole)
    products.multiply(x[20:25].contiguous(), "layers.1.qkv", some)
    assert torch.equal(whole[20:25], some)


def test_few_tokens_and_many_columns_are_multiplied_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = model(HEADS, ffn=512, hidden_size=64)
    weights = {n: x.to(torch.bfloat16) for n, x in random_weights(config).items()}
    plan = make_plan(config, Dtype.BF16, Gpu("sm_90a", 5, 227 * 1024))
    packed = pack_weights(plan, shard_all(Share(config, 1, 0), dict(weights)), CPU)

    def most_parts(*_: object, parts: Sequence[int], **__: object) -> Shares:
        return Shares(RowCut(8), parts[-1], 1.0)

    monkeypatch.setattr(packed_choice, "best_shares", most_parts)
    products = PackedMatrices(FormChoice(plan), packed, {}, TOKENS, None)
    x = torch.randn(20, 512, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float32):
        out = torch.empty(20, 64, dtype=dtype)
        products.multiply(x, "layers.0.down", out)
        wanted = x.double() @ weights["layers.0.down"].double().T
        assert (out.double() - wanted).norm() <= 4e-3 * wanted.norm()
        parts = products.multiply_in_parts(x, "layers.0.down", out)
        assert parts.shape == (4, 20, 64)
        assert torch.equal(parts.sum(0).to(dtype), out)
    assert {form.parts for form in OnHost.libraries} >= {4}


# Its heads' columns are 128; those of `down` are not 128 times a number, and stay in 16 bits.
EIGHT_BITS = model(HEADS, HEADS, ffn=96, hidden_size=128)


@pytest.mark.parametrize("kind", ["fp8", "fp8-permuted"])
def test_prompts_in_eight_bits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Near those in 16; the head and narrow matrices have the same products as these."""
    monkeypatch.setitem(FORMATS, "fp8-permuted", Quantized(Codes.FP8, 0, Dtype.BF16, permuted=True))
    plan, packed, own = packed_model(EIGHT_BITS, kind)
    tables = tables_of_columns(plan, packed)
    products = PackedMatrices(FormChoice(plan, eight_bits=True), packed, tables, TOKENS, None)
    seen = logits(EIGHT_BITS, own, products)
    used = {(form.columns, form.stored.is_plain): form.eight_bits for form in products.forms}
    assert used == {
        (128, False): True, (96, False): False, (96, True): False, (128, True): False,
    }  # fmt: skip
    wanted = logits(EIGHT_BITS, own, Unpacked(plan, packed))
    difference = (seen - wanted).norm() / wanted.norm()
    assert 1e-4 < difference <= 0.15  # codes have 4 bits


def test_eight_bits_do_not_depend_on_the_cut() -> None:
    plan, packed, _ = packed_model(EIGHT_BITS, "fp8")
    products = PackedMatrices(FormChoice(plan, eight_bits=True), packed, {}, TOKENS, None)
    x = torch.randn(TOKENS, 128, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    whole = torch.empty(TOKENS, plan.image.operation(0, "qkv").matrix.rows, dtype=x.dtype)
    products.multiply(x, "layers.0.qkv", whole)
    for cut in (slice(0, 9), slice(9, 70)):
        seen = torch.empty_like(whole[cut])
        products.multiply(x[cut].contiguous(), "layers.0.qkv", seen)
        assert torch.equal(seen, whole[cut])


@pytest.mark.parametrize("kind", [None, "int4", "fp8-block"])
def test_eight_bits_of_other_matrices_are_refused(kind: str | None) -> None:
    plan, packed, _ = packed_model(EIGHT_BITS, kind)
    with pytest.raises(SettingError, match="FP8 with one scale per row"):
        require_eight_bit_prompts(plan)
    with pytest.raises(SettingError, match="--eight-bit-prompts is 'on, with layers in"):
        PackedMatrices(FormChoice(plan, eight_bits=True), packed, {}, TOKENS, None)


def test_what_it_does_not_do_is_refused() -> None:
    def plan(config: ModelConfig, arch: str = "sm_90a", ranks: int = 1) -> Plan:
        return make_plan(config, Dtype.BF16, Gpu(arch, 9, 227 * 1024), ranks)

    require_packed_prompts(plan(SMALL))
    with pytest.raises(ShapeUnsupported, match="sm_80"):
        require_packed_prompts(make_plan(SMALL, Dtype.BF16, Gpu("sm_80", 9, 163 * 1024)))
    with pytest.raises(ShapeUnsupported, match="several GPUs"):
        require_packed_prompts(plan(SMALL, ranks=2))
    with pytest.raises(ShapeUnsupported, match="40 columns of down"):
        require_packed_prompts(plan(model(HEADS, ffn=40, hidden_size=64)))


def test_prompts_are_packed_where_products_can_read_them() -> None:
    hopper, ampere = Gpu("sm_90a", 9, 227 * 1024), Gpu("sm_80", 9, 163 * 1024)
    plain, other = (make_plan(SMALL, Dtype.BF16, gpu) for gpu in (hopper, ampere))
    int4 = make_plan(SMALL, Dtype.BF16, hopper, formats=formats_of(alike(SMALL, "int4")))
    assert [packs_prompts(p) for p in (plain, other, int4, None)] == [True, False, True, False]
    untied = replace(SMALL, tied_head=False)
    blocks = make_plan(untied, Dtype.BF16, hopper, formats=formats_of(alike(untied, "super-int4")))
    assert packs_prompts(blocks)
    assert not packs_prompts(plain, unpacks=True)
    assert not packs_prompts(plain, asked=False)
    assert packs_prompts(plain, asked=True)


def test_tiles_are_as_wide_as_tokens_are_many() -> None:
    def found(tokens: int, out: Out = Out.VALUES, row_tiles: int = 32) -> tuple[int, ...]:
        return tuple(widths_for(tokens, out, row_tiles, 132))

    assert [found(n) for n in (1, 8, 9, 65, 128, 129, 192, 193, 256)] == [
        (8,), (8,), (64,), (128, 64), (128, 64), (192,), (192,), (256,), (256,),
    ]  # fmt: skip
    assert found(1, Out.ARRANGED) == (64,)
    assert found(2048, Out.GATED) == (128,)


@pytest.mark.parametrize(
    ("row_tiles", "width"),
    # 192 tiles of 256 tokens are a round and a half of 132 SMs, 264 of 192 are two.
    [(24, 192), (32, 256), (16, 256), (128, 256), (48, 256)],
)
def test_tiles_are_so_wide_that_sms_are_done_together(row_tiles: int, width: int) -> None:
    assert widths_for(2048, Out.VALUES, row_tiles, 132) == (width,)


def test_one_copy_takes_no_room_to_unpack_while_it_runs() -> None:
    """What the head takes on its way to the kernel's order is more, and comes before the rest."""
    config = PUBLIC["llama-3.1-8b"]
    plan, specs = make_plan(config, Dtype.BF16, TYPICAL["sm_90a"]), tuple(decoder_tensors(config))
    rows = Footprint(config, specs, Dtype.BF16, plan).estimate(8192)
    packed = Footprint(config, specs, Dtype.BF16, plan, packed_prompts=True).estimate(8192)
    head = 3 * 128256 * 4096 * 2
    assert packed.scratch_bytes == head < rows.scratch_bytes
    assert packed.weights_bytes == rows.weights_bytes
    assert arranged_bytes(plan, 2048) == 2048 * 14336 * 2
