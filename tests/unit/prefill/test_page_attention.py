"""Attention straight from KV pages: what the compiler makes of it, on a GPU what torch gives."""

import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from plan.shapes import LANEFORMER, MIXTURE, PUBLIC, SMALL, small_plan
from soloist.engine import Engine, EngineConfig
from soloist.errors import CudaMissing, ShapeUnsupported
from soloist.jit.bindings import nvrtc
from soloist.jit.compiler import compile_source, require_clean
from soloist.kv.layout import PAGE_POSITIONS, KvLayout
from soloist.kv.pool import PagePool
from soloist.megakernel.gpu import TYPICAL
from soloist.megakernel.plan import Plan, make_plan
from soloist.model.dtype import Dtype
from soloist.model.families import read_config
from soloist.model.kv_format import KV_FORMATS, PAGE_FORMATS, KvFormat
from soloist.model.torch_types import TORCH_DTYPES
from soloist.prefill.attention import visible
from soloist.prefill.elementwise import Chunk
from soloist.prefill.fragments import arranged_columns
from soloist.prefill.page_attention import PageAttention
from soloist.prefill.page_form import (
    ENTRY,
    MERGE_ENTRY,
    SPLIT_KEYS,
    PageForm,
    page_form,
)
from soloist.prefill.part import config_of
from soloist.prefill.upload import Upload
from unit.megakernel.code_sizes import INSTRUCTION_BYTES, KIND_BITS, section

HEADS = {
    "heads of 32": (2, 1, 32), "llama-3.2-1b": (8, 4, 64), "laneformer": (4, 6, 96),
    "llama-3.1-8b": (8, 4, 128), "qwen2.5-7b": (4, 7, 128), "one": (1, 16, 128),
    "glm-4.5-air": (8, 12, 128),
}  # fmt: skip
# A product of a group of warps with a factor in registers, in machine code of sm_90.
HGMMA = 0xDF0
LAYERS, LAYER = 2, 1
BOUNDS = {Dtype.BF16: 4e-3, Dtype.FP16: 6e-4}


def form_of(name: str, dtype: Dtype = Dtype.BF16) -> PageForm:
    kv_heads, group, dim = HEADS[name]
    return PageForm(KvLayout(LAYERS, kv_heads, dim, PAGE_FORMATS[dtype]), group, dtype)


def some(names: Sequence[str], quick: Sequence[str]) -> list[Any]:
    return [n if n in quick else pytest.param(n, marks=pytest.mark.slow) for n in names]


@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.FP16], ids=lambda d: d.value)
@pytest.mark.parametrize("name", some(list(HEADS), ("heads of 32", "llama-3.1-8b")))
def test_it_compiles_without_spills(name: str, dtype: Dtype) -> None:
    try:
        nvrtc()
    except CudaMissing as error:
        pytest.skip(f"no NVRTC: {error.message}")
    form = form_of(name, dtype)
    cubin, limit = compile_source(form.source, "sm_90a"), TYPICAL["sm_90a"].shared_bytes
    # What each thread has before groups of warps trade registers.
    assert require_clean(cubin, ENTRY, form.shared_bytes, limit).registers <= 168
    assert require_clean(cubin, MERGE_ENTRY, 0, limit).registers <= 128
    code = section(cubin.data, f".text.{ENTRY}")
    words = struct.unpack(f"<{len(code) // 8}Q", code)
    kinds = [word & KIND_BITS for word in words[:: INSTRUCTION_BYTES // 8]]
    assert kinds.count(HGMMA) == 2 * 128 // 16, "values of a tile, and those of a split's last one"


@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.FP16], ids=lambda d: d.value)
@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("name", [*PUBLIC, "laneformer-2b", "mixture"])
def test_hopper_has_the_kernel_where_nobody_says(name: str, ranks: int, dtype: Dtype) -> None:
    """Of mixtures too, on one GPU and on several; of lanes where somebody says so."""
    files = {"laneformer-2b": LANEFORMER, "mixture": MIXTURE}
    config = read_config(files[name]) if name in files else PUBLIC[name]
    plan = make_plan(config, dtype, TYPICAL["sm_90a"], ranks)
    form = page_form(plan, asked=True)
    assert form is not None
    assert page_form(plan) == (None if plan.shape.has_lanes else form)
    assert (form.layout, form.dtype) == (plan.kv_layout, dtype)
    a = config_of(plan.part_of(0)).layers[0].attention
    heads = form.layout.num_heads, form.layout.num_heads * form.group
    assert heads == (a.num_kv_heads, a.num_query_heads), "those of a pass"
    assert page_form(plan, asked=False) is None


def plan_of(
    arch: str = "sm_90a", head_dim: int = 64, group: int = 4,
    stored: KvFormat = PAGE_FORMATS[Dtype.BF16],
) -> Plan:  # fmt: skip
    """What the choice looks at, shapes that the decode kernel does not run included."""
    made = SimpleNamespace(
        gpu=replace(TYPICAL["sm_90a"], arch=arch), dtype=Dtype.BF16,
        kv_layout=KvLayout(LAYERS, 2, head_dim, stored),
        shape=SimpleNamespace(group=group, has_lanes=False),
    )  # fmt: skip
    return cast("Plan", made)


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        *((plan_of(arch=arch), f"on {arch}") for arch in TYPICAL if arch != "sm_90a"),
        *((plan_of(stored=KV_FORMATS[name](64)), f"in {name}") for name in KV_FORMATS),
        (plan_of(head_dim=80), "for 80 numbers a head"),
        (plan_of(head_dim=256), "for 256 numbers a head"),
        (plan_of(group=129), "for 129 query heads to a KV head"),
    ],
    ids=str,
)
def test_others_have_the_library(plan: Plan, why: str) -> None:
    """Without a word, unless the kernel was asked for."""
    assert page_form(plan) is page_form(plan, asked=False) is None
    allowed = "sm_90a; 16 bits; 32, 64, 96, 128 numbers a head; a GPU for each rank"
    with pytest.raises(ShapeUnsupported, match=f"from KV pages {why} .*{allowed}"):
        page_form(plan, asked=True)
    assert page_form(plan_of()) is not None


def test_ranks_that_share_a_gpu_have_the_library() -> None:
    """The kernel takes an SM whole, and a rank that waits may hold a part of it."""
    plan = small_plan(SMALL, 13, ranks=2)
    assert page_form(plan) is not None
    assert page_form(plan, shares_gpu=True) is None
    with pytest.raises(ShapeUnsupported, match="by ranks that share a GPU"):
        page_form(plan, asked=True, shares_gpu=True)
    assert not EngineConfig(rank_devices=(0, 1)).shares_gpu
    assert EngineConfig(rank_devices=(0, 0, 1, 1)).shares_gpu


@pytest.mark.parametrize(
    ("way", "told"),
    [("page_attention", "from KV pages on cpu"), ("packed_prompts", "packed weights on cpu")],
)
def test_the_reference_refuses_what_it_has_not(way: str, told: str) -> None:
    with pytest.raises(ShapeUnsupported, match=told):
        Engine.load(EngineConfig("etude-draft", "cpu", **{way: True}))


def test_a_copy_takes_each_number_of_a_half_page_once() -> None:
    """Half of a pool's numbers are keys, half are values."""
    for name in HEADS:
        form, pages = form_of(name), 3
        places = set[int]()
        for boxes in (*form.keys(pages), form.values(pages)):
            (inner, *sizes), strides = boxes.sizes, boxes.strides
            at = torch.arange(inner) * 2 + boxes.offset
            for size, stride in zip(sizes, strides, strict=True):
                at = (torch.arange(size)[:, None] * stride + at[None]).flatten()
            if boxes.box[1] != form.head_dim:  # sixteen rows are keys, the next ones values
                half_page = form.layout.half_page_bytes
                at = at[at % (2 * half_page) < half_page]
            places.update(at.tolist())
        assert places == set(range(0, form.layout.pool_bytes(pages), 2)), name


class OnGpu:
    """A sequence's queries [T, Q, D], and its keys and values in pages among others."""

    def __init__(self, form: PageForm, tokens: int, stop: int, folder: Path) -> None:
        self.form, self.tokens, self.stop = form, tokens, stop
        layout, dtype = form.layout, TORCH_DTYPES[form.dtype]
        draw = torch.Generator("cuda").manual_seed(0)
        self.queries, self.keys, self.values = (
            torch.randn(n, heads, form.head_dim, generator=draw, device="cuda").to(dtype)
            for n, heads in (
                (tokens, layout.num_heads * form.group),
                (stop, layout.num_heads), (stop, layout.num_heads),
            )
        )  # fmt: skip
        num_pages = -(-stop // PAGE_POSITIONS) + 3
        device = self.queries.device
        self.pool = PagePool(
            LAYERS, layout.num_heads, form.head_dim, num_pages, dtype, device
        )  # fmt: skip
        self.pool.tensor.fill_(float("nan"))  # what others left in pages
        self.table = torch.randperm(num_pages, generator=draw, device="cuda")
        self.table = self.table[: -(-stop // PAGE_POSITIONS)].int()
        self.pool.write(LAYER, self.table, 0, self.keys, self.values)
        self.upload = Upload(num_pages, tokens, device)
        self.folder = folder
        self.kernel = PageAttention(form, self.pool, folder)
        # Without memory for sums of splits a pair's splits are one item's.
        self.unsplit = PageAttention(form, self.pool, folder, splits=False)

    def chunk(self, first: int, stop: int) -> Chunk:
        return self.upload.chunk(torch.zeros(stop - first).int(), first, self.table, stop - first)

    def attend(
        self, first: int, stop: int, window: int | None = None, *, splits: bool = True,
        arranged: bool = False,
    ) -> Tensor:  # fmt: skip
        begin = self.stop - self.tokens
        queries = self.queries[first - begin : stop - begin].contiguous()
        chunk, out = self.chunk(first, stop), torch.full_like(queries, float("nan"))
        kernel = self.kernel if splits else self.unsplit
        stream = torch.cuda.current_stream().cuda_stream
        kernel.launch(
            queries, chunk, chunk.query_bounds, LAYER, window, out, stream, arranged=arranged
        )
        return out

    def exact(self, window: int | None) -> Tensor:
        queries, keys, values = (
            x.float().transpose(0, 1) for x in (self.queries, self.keys, self.values)
        )
        seen = visible(self.tokens, self.stop, window, queries.device)
        mixed = []
        for head, own in enumerate(queries):
            k, v = keys[head // self.form.group], values[head // self.form.group]
            scores = (own @ k.mT * self.form.head_dim**-0.5).masked_fill(~seen, float("-inf"))
            mixed.append(scores.softmax(-1) @ v)
        return torch.stack(mixed, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.FP16], ids=lambda d: d.value)
@pytest.mark.parametrize("name", HEADS)
def test_it_does_what_torch_does(name: str, dtype: Dtype, tmp_path: Path) -> None:
    """Few queries on many keys, many on few, first passes; in splits and without: the same bits."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    for tokens, stop in ((1, 1), (300, 300), (2048, 2048), (40, 9001), (700, 3 * SPLIT_KEYS + 77)):
        case = OnGpu(form_of(name, dtype), tokens, stop, tmp_path)
        for window in (None, 100, 5000):
            found = case.attend(stop - tokens, stop, window)
            wanted = case.exact(window)
            difference = (found.float() - wanted).norm()
            assert difference <= BOUNDS[dtype] * wanted.norm(), (tokens, stop, window)
            assert torch.equal(found, case.attend(stop - tokens, stop, window, splits=False))


@pytest.mark.gpu
@pytest.mark.parametrize("name", HEADS)
def test_bits_do_not_depend_on_how_a_prompt_was_cut(name: str, tmp_path: Path) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    stop = 2 * SPLIT_KEYS + 500
    case = OnGpu(form_of(name), 2048, stop, tmp_path)
    begin = stop - case.tokens
    for window in (None, 3000):
        whole = case.attend(begin, stop, window)
        for first, end in (
            (stop - 1, stop), (stop - 16, stop), (begin + 3, begin + 260), (begin, stop - 500),
            (2 * SPLIT_KEYS - 1, 2 * SPLIT_KEYS + 1), (2 * SPLIT_KEYS, stop),
        ):  # fmt: skip
            assert torch.equal(case.attend(first, end, window), whole[first - begin : end - begin])


@pytest.mark.gpu
@pytest.mark.parametrize("name", HEADS)
def test_results_may_leave_as_products_take_them(name: str, tmp_path: Path) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    for tokens, stop in ((128, 128), (40, 3 * SPLIT_KEYS + 77)):
        case = OnGpu(form_of(name), tokens, stop, tmp_path)
        plain = case.attend(stop - tokens, stop).flatten(1)
        arranged = case.attend(stop - tokens, stop, arranged=True).flatten(1)
        assert torch.equal(arranged, plain[:, arranged_columns(plain.shape[1])])


@pytest.mark.gpu
def test_a_captured_launch_finds_its_place_on_the_device(tmp_path: Path) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    case = OnGpu(form_of("llama-3.1-8b"), 256, 9000, tmp_path)
    chunk, out = case.chunk(0, 256), torch.full_like(case.queries, float("nan"))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream = torch.cuda.current_stream().cuda_stream
        case.kernel.launch(case.queries, chunk, chunk.query_bounds, LAYER, None, out, stream)
    case.chunk(9000 - 256, 9000)
    graph.replay()
    assert torch.equal(out, case.attend(9000 - 256, 9000))


@pytest.mark.parametrize("positions", [100_000, 1_000_000])
def test_sums_of_splits_have_room_where_passes_are_short(positions: int) -> None:
    """Of 256 tokens of llama-3.1-8b, whose pool takes 64 times as much at least."""
    form, pages = form_of("llama-3.1-8b"), -(-positions // PAGE_POSITIONS)
    form = replace(form, layout=replace(form.layout, num_layers=32))
    items = -(-256 // form.item_tokens) * form.layout.num_heads * -(-positions // SPLIT_KEYS)
    room = form.partials_bytes(pages)
    assert items * form.partial_bytes <= room <= form.layout.pool_bytes(pages) / 64


def test_a_short_pool_has_little_or_no_room_for_sums_of_splits() -> None:
    form = form_of("llama-3.1-8b")
    assert form.partials_bytes(SPLIT_KEYS // PAGE_POSITIONS) == 0
    assert form.partials_bytes(8192 // PAGE_POSITIONS) == 2 * 128 * form.partial_bytes
    assert form.partials_bytes(32768 // PAGE_POSITIONS) <= 112 * 1024 * 1024
