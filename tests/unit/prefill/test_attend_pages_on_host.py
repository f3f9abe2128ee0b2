"""Attention straight from KV pages, compiled by g++, against the definition and against itself."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from soloist.kv.layout import PAGE_POSITIONS, KvLayout
from soloist.kv.pool import PagePool
from soloist.model.dtype import Dtype
from soloist.model.kv_format import PAGE_FORMATS
from soloist.model.torch_types import TORCH_DTYPES
from soloist.prefill.attention import visible
from soloist.prefill.fragments import arranged_columns
from soloist.prefill.page_form import PageForm
from unit.prefill.pages_on_host import HostPages, built

LAYERS, LAYER, SPLIT_KEYS, STOP = 2, 1, 256, 620
BOUNDS = {Dtype.BF16: 4e-3, Dtype.FP16: 6e-4}
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shape:
    """Heads of a case, and the pass that it is tried with."""

    kv_heads: int
    group: int
    dim: int
    dtype: Dtype
    tokens: int


# Two items of rows that no number of tokens divides; odd rows of keys swap columns, or do not.
SHAPES = {
    "one in a group": Shape(2, 1, 32, Dtype.BF16, 150),
    "swapped": Shape(1, 4, 64, Dtype.FP16, 40),
    "three in a group": Shape(2, 3, 128, Dtype.BF16, 50),
    "three boxes": Shape(1, 2, 96, Dtype.BF16, 70),
    "twelve in a group": Shape(1, 12, 128, Dtype.BF16, 14),
}


@dataclass(frozen=True)
class Case:
    """A sequence's queries, keys and values [positions, heads, D], and the last two in pages."""

    shape: Shape
    pages: HostPages
    queries: Tensor
    keys: Tensor
    values: Tensor

    def attend(self, first: int, stop: int = STOP, rows: int | None = None, **how: int) -> Tensor:
        """Of the queries from `first` on to `stop`, in a pass of so many rows."""
        queries = self.queries[first:stop]
        padding = (rows or len(queries)) - len(queries)
        padded = torch.cat([queries, queries.new_full((padding, *queries.shape[1:]), 3.0)])
        out = self.pages.attend(padded, stop, tokens=len(queries), layer=LAYER, **how)
        assert out[len(queries) :].isnan().all(), "padding is not written"
        assert not out[: len(queries)].isnan().any()
        return out[: len(queries)]


@pytest.fixture(scope="module", params=SHAPES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    shape = SHAPES[request.param]
    draw = torch.Generator().manual_seed(1)
    dtype = TORCH_DTYPES[shape.dtype]

    def random(heads: int) -> Tensor:
        return torch.randn(STOP, heads, shape.dim, generator=draw).to(dtype)

    query_heads = shape.kv_heads * shape.group
    queries, keys, values = random(query_heads), random(shape.kv_heads), random(shape.kv_heads)
    num_pages = -(-STOP // PAGE_POSITIONS) + 2
    pool = PagePool(LAYERS, shape.kv_heads, shape.dim, num_pages, dtype, CPU)
    pool.tensor.fill_(float("nan"))  # what others left in pages
    table = torch.randperm(num_pages, generator=draw)[: -(-STOP // PAGE_POSITIONS)]
    pool.write(LAYER, table, 0, keys, values)
    layout = KvLayout(LAYERS, shape.kv_heads, shape.dim, PAGE_FORMATS[shape.dtype])
    form = PageForm(layout, shape.group, shape.dtype, SPLIT_KEYS)
    library = built(form, tmp_path_factory.mktemp("pages"))
    return Case(shape, HostPages(form, pool, table.tolist(), library), queries, keys, values)


def exact(case: Case, window: int | None) -> Tensor:
    queries, keys, values = (
        x.float().transpose(0, 1) for x in (case.queries, case.keys, case.values)
    )
    keys, values = (x.repeat_interleave(case.shape.group, 0) for x in (keys, values))
    scores = queries @ keys.mT * case.shape.dim**-0.5
    seen = visible(STOP, STOP, window, CPU)
    return (scores.masked_fill(~seen, float("-inf")).softmax(-1) @ values).transpose(0, 1)


@pytest.mark.parametrize("window", [None, 100, 300])
def test_it_is_the_definition_whoever_sums_what(case: Case, window: int | None) -> None:
    """As a whole, or in splits that meet in memory; in any order of what runs by itself."""
    first = STOP - case.shape.tokens
    whole = case.attend(first, rows=case.shape.tokens + 9, window=window)
    wanted = exact(case, window)[first:]
    assert (whole.float() - wanted).norm() <= BOUNDS[case.shape.dtype] * wanted.norm()
    items = -(-case.shape.tokens // case.pages.form.item_tokens) * case.shape.kv_heads
    slots, blocks = items * 3, 12
    assert case.pages.library.is_split(case.shape.tokens, STOP, 0, blocks, slots)
    assert not case.pages.library.is_split(case.shape.tokens, STOP, 0, blocks, slots - 1)
    split = case.attend(first, window=window, blocks=blocks, slots=slots, seed=2)
    assert torch.equal(split, whole)


def test_results_may_leave_as_products_take_them(case: Case) -> None:
    """Of whole items, and of splits that meet in memory."""
    first = STOP - case.shape.tokens
    plain = case.attend(first).flatten(1)
    wanted = plain[:, arranged_columns(plain.shape[1])]
    for how in ({}, {"blocks": 12, "slots": 99}):
        assert torch.equal(case.attend(first, arranged=True, **how).flatten(1), wanted)


@pytest.mark.parametrize("window", [None, 150])
def test_bits_do_not_depend_on_how_a_prompt_was_cut(case: Case, window: int | None) -> None:
    whole = case.attend(SPLIT_KEYS - 10, window=window)[10:]
    for first, stop, slots in (
        (SPLIT_KEYS, SPLIT_KEYS + 1, 0), (SPLIT_KEYS + 5, STOP - 3, 0), (STOP - 1, STOP, 12),
        (STOP - 130, STOP - 100, 24),
    ):  # fmt: skip
        part = case.attend(first, stop, window=window, blocks=5, slots=slots)
        assert torch.equal(part, whole[first - SPLIT_KEYS : stop - SPLIT_KEYS]), (first, stop)


def test_a_pass_of_no_token_writes_nothing(case: Case) -> None:
    """Captured graphs run over one first, when there is no sequence."""
    queries = case.queries[:40]
    assert case.pages.attend(queries, 1, tokens=0).isnan().all()
