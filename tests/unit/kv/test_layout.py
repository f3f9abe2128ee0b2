"""Every number of a page has one place, and it is where kernels have always looked."""

import numpy as np
import pytest

from soloist.errors import ShapeUnsupported
from soloist.kv.layout import HALF_PAGE_POSITIONS, PAGE_HALVES, KvLayout
from soloist.model.dtype import Dtype
from soloist.model.kv_format import PAGE_FORMATS, KvFormat

FORMAT = PAGE_FORMATS[Dtype.BF16]
HEAD_DIMS = [8, 24, 32, 64, 96, 128, 192]
LAYERS, HEADS = 3, 2


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_places_of_a_half_page_are_a_permutation(head_dim: int) -> None:
    layout = KvLayout(LAYERS, HEADS, head_dim, FORMAT)
    for places in (layout.key_places(), layout.value_places()):
        assert places.shape == (HALF_PAGE_POSITIONS, head_dim)
        assert sorted(places.flat) == list(range(layout.half_page_values))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_places_are_those_of_the_formulas_in_words(head_dim: int) -> None:
    layout = KvLayout(LAYERS, HEADS, head_dim, FORMAT)
    keys, values = layout.key_places(), layout.value_places()
    for row in range(32):
        for d in range(head_dim):
            chunk = d // 8 ^ (row & 1) << 2 if head_dim % 64 == 0 else d // 8
            assert keys[row, d] == row * head_dim + chunk * 8 + d % 8
            assert values[row, d] == d * 32 + row


@pytest.mark.parametrize("head_dim", [24, 64])
def test_half_pages_fill_a_page_in_the_order_of_a_pool(head_dim: int) -> None:
    layout = KvLayout(LAYERS, HEADS, head_dim, FORMAT)
    pool = np.arange(layout.page_values * 2).reshape(layout.shape(2))
    for layer in range(LAYERS):
        for head in range(HEADS):
            for half_page in range(PAGE_HALVES):
                first = pool[1, layer, head, half_page, 0, 0]
                place = layout.half_page_place(layer, head, half_page)
                assert first == layout.page_values + place
                old = ((layer * HEADS + head) * 2 + half_page) * 2 * 32 * head_dim
                assert place == old


def test_bytes_come_from_the_format() -> None:
    layout = KvLayout(LAYERS, HEADS, 64, FORMAT)
    assert layout.half_page_bytes == 32 * 64 * 2
    assert layout.page_bytes == LAYERS * HEADS * 2 * 64 * 64 * 2
    assert layout.pool_bytes(5) == 5 * layout.page_bytes
    assert [f.num_bytes(64) for f in PAGE_FORMATS.values()] == [128, 128]
    assert KvFormat("8 bits", 8, scale_values=32, scale_bits=16).num_bytes(64) == 64 + 2 * 2


def test_the_text_says_the_same() -> None:
    text = KvLayout(LAYERS, HEADS, 64, FORMAT).cuda
    for part in (
        "kPagePositions = 64u", "kHalfPageBytes = 4096u", "kHalfPageValues = 2048u",
        "kKeyRowBytes = 128u", "kSwappedKeyBytes = 64u",
        "chunk ^ (row & 1) << 2", "d ^ (row & 1) << 5", "d * kHalfPagePositions + row",
    ):  # fmt: skip
        assert part in text
    plain = KvLayout(LAYERS, HEADS, 96, FORMAT).cuda
    assert "{ return chunk; }" in plain
    assert "kSwappedKeyBytes = 0u" in plain


def test_a_head_that_is_no_whole_number_of_chunks_is_refused() -> None:
    with pytest.raises(ShapeUnsupported, match="head dimension 12"):
        KvLayout(LAYERS, HEADS, 12, FORMAT)
