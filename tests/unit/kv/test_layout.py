"""Every number of a page has one place, and it is where kernels have always looked."""

import numpy as np
import pytest

from soloist.errors import ShapeUnsupported
from soloist.kv.layout import HALF_PAGE_POSITIONS, KEYS, PAGE_HALVES, VALUES, KvLayout
from soloist.model.dtype import Dtype
from soloist.model.kv_format import KV_FORMATS, PAGE_FORMATS, KvFormat, KvName

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


# Codes ------------------------------------------------------------------------------------------

CODED_DIMS = [32, 64, 96, 128]
NAMES = pytest.mark.parametrize("name", KV_FORMATS)
DIMS = pytest.mark.parametrize("head_dim", CODED_DIMS)


def coded(name: KvName, head_dim: int) -> KvLayout:
    return KvLayout(LAYERS, HEADS, head_dim, KV_FORMATS[name](head_dim))


@NAMES
@DIMS
def test_every_byte_of_a_half_page_is_of_one_position(name: KvName, head_dim: int) -> None:
    layout = coded(name, head_dim)
    places = [layout.stored_places(part) for part in (KEYS, VALUES)]
    for of_part in places:
        assert of_part.shape == (32, layout.format.num_bytes(head_dim))
    used = sorted(np.concatenate([p.flatten() for p in places]))
    assert used == list(range(layout.shape(1)[-1]))
    assert layout.shape(1)[-1] == 2 * layout.half_page_bytes
    assert layout.page_bytes == np.prod(layout.shape(1))


@NAMES
@DIMS
def test_codes_and_scales_lie_where_words_say(name: KvName, head_dim: int) -> None:
    layout = coded(name, head_dim)
    keys, values = layout.stored_places(KEYS), layout.stored_places(VALUES)
    row_bytes = head_dim // 2 if name == "int4" else head_dim
    block = row_bytes * 32 // head_dim
    scales = head_dim // 32 if name == "int4" else 1
    for row in range(32):
        for byte in range(row_bytes):
            turned = byte // block ^ layout.key_turn(row)
            assert keys[row, byte] == row * row_bytes + turned * block + byte % block
            assert values[row, byte] == 32 * row_bytes + byte * 32 + row
        for scale in range(scales):
            for byte in range(2):
                at = 64 * row_bytes + (scale * 32 + row) * 2 + byte
                assert keys[row, row_bytes + 2 * scale + byte] == at
                assert values[row, row_bytes + 2 * scale + byte] == at + scales * 64


@NAMES
@pytest.mark.parametrize("head_dim", [64, 128])
def test_rows_that_are_read_at_once_share_few_banks(name: KvName, head_dim: int) -> None:
    """A lane (g, q) has 8 numbers of row 8 (g / 2) + g % 2; 32 lanes, or 16 of 8 bytes, at once."""
    layout = coded(name, head_dim)
    places = layout.stored_places(KEYS)
    lane_bytes = 4 if name == "int4" else 8
    for block in range(head_dim // 32):
        for first in range(0, 8, 8 if name == "int4" else 4):
            hit: dict[int, int] = {}
            for g in range(first, first + (8 if name == "int4" else 4)):
                row = 8 * (g // 2) + g % 2
                for q in range(4):
                    at = int(places[row, (block * 4 + q) * lane_bytes])
                    for bank in {at // 4 % 32, (at + lane_bytes - 4) // 4 % 32}:
                        hit[bank] = hit.get(bank, 0) + 1
            # In 4 bits a head of 64 numbers has two blocks for four rows.
            assert max(hit.values()) == (2 if (name, head_dim) == ("int4", 64) else 1)


def test_codes_need_whole_blocks() -> None:
    with pytest.raises(ShapeUnsupported, match="int8 with a head dimension of 48"):
        coded("int8", 48)


@NAMES
@DIMS
def test_the_text_of_codes_says_the_same(name: KvName, head_dim: int) -> None:
    layout = coded(name, head_dim)
    text = layout.cuda
    bits = 4 if name == "int4" else 8
    for part in (
        f"kHalfPageBytes = {layout.half_page_bytes}u", f"kCodeBits = {bits}u",
        f"kCodeBytes = {head_dim * 32 * bits // 8}u", f"kKeyRowBytes = {head_dim * bits // 8}u",
        f"kValueRowBytes = {32 * bits // 8}u", f"kFloatCodes = {int(name == 'fp8')}u",
        f"kScales = {head_dim // 32 if name == 'int4' else 1}u", "(kKvParts * kHalfPageBytes / 2)",
    ):  # fmt: skip
        assert part in text
    turn = text[text.index("key_turn(u32 row) { return ") :].split("return ")[1].split(";")[0]
    for row in range(32):
        assert eval(turn, {"row": row}) == layout.key_turn(row)  # noqa: S307 - text of ours
