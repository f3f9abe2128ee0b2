"""The pool's layout, against the design's words spelled out as loops."""

import pytest
import torch
from torch import Tensor

from soloist.errors import ShapeUnsupported
from soloist.kv.codes import bytes_of, codes_of, numbers_of
from soloist.kv.layout import KEYS, VALUES
from soloist.kv.pool import PagePool
from soloist.model.kv_format import KV_FORMATS, KvName

CPU = torch.device("cpu")
LAYERS, HEADS, PAGES = 3, 2, 7
TABLE = torch.tensor([4, 1, 6, 0], dtype=torch.int32)
HEAD_DIMS = [8, 24, 32, 64, 96, 128, 192]
RANGES = [(0, 1), (0, 64), (0, 200), (31, 33), (32, 64), (63, 65), (77, 256), (255, 256)]


def pool(head_dim: int, dtype: torch.dtype = torch.float32) -> PagePool:
    return PagePool(LAYERS, HEADS, head_dim, PAGES, dtype, CPU)


def heads(num_tokens: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Keys and values [T, K, D], every number another one and none of them 0."""
    values = torch.arange(1.0, 2 * num_tokens * HEADS * head_dim + 1)
    keys, values = values.view(2, num_tokens, HEADS, head_dim)
    return keys, values


def key_offset(row: int, d: int, head_dim: int) -> int:
    chunk = d // 8
    if head_dim % 64 == 0:
        chunk ^= (row & 1) << 2
    return row * head_dim + chunk * 8 + d % 8


def value_offset(row: int, d: int) -> int:
    return d * 32 + row


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("start", "stop"), [(0, 5), (27, 70), (120, 131)])
def test_every_number_lies_where_the_kernel_reads_it(head_dim: int, start: int, stop: int) -> None:
    layer = 1
    keys, values = heads(stop - start, head_dim)
    wanted = torch.zeros(PAGES, LAYERS, HEADS, 2, 2, 32 * head_dim)
    for p in range(start, stop):
        half_pages = wanted[int(TABLE[p // 64]), layer, :, p % 64 // 32]
        for head in range(HEADS):
            for d in range(head_dim):
                key, value = keys[p - start, head, d], values[p - start, head, d]
                half_pages[head, 0, key_offset(p % 32, d, head_dim)] = key
                half_pages[head, 1, value_offset(p % 32, d)] = value
    written = pool(head_dim)
    written.write(layer, TABLE, start, keys, values)
    assert torch.equal(written.tensor, wanted)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("start", "stop"), RANGES)
def test_what_is_written_is_read(head_dim: int, start: int, stop: int) -> None:
    keys, values = heads(256, head_dim)
    written = pool(head_dim)
    for first, last in ((0, 50), (50, 64), (64, 223), (223, 256)):
        written.write(2, TABLE, first, keys[first:last], values[first:last])
    seen_keys, seen_values = written.read(2, TABLE, start, stop)
    assert torch.equal(seen_keys, keys[start:stop].transpose(0, 1))
    assert torch.equal(seen_values, values[start:stop].transpose(0, 1))


def test_two_sequences_share_a_pool() -> None:
    keys, values = heads(64, 64)
    shared = pool(64)
    shared.write(0, TABLE[:1], 0, keys, values)
    shared.write(0, torch.tensor([2], dtype=torch.int32), 0, -keys, -values)
    assert torch.equal(shared.read(0, TABLE[:1], 0, 64)[0], keys.transpose(0, 1))


def test_values_are_rounded_to_the_pool() -> None:
    keys, values = heads(40, 64)
    rounded = pool(64, torch.bfloat16)
    rounded.write(0, TABLE, 0, keys, values)
    assert torch.equal(rounded.read(0, TABLE, 0, 40)[1], values.bfloat16().transpose(0, 1))


def test_a_head_that_is_no_whole_number_of_chunks_is_refused() -> None:
    with pytest.raises(ShapeUnsupported, match="head dimension 12"):
        pool(12)


# Codes ------------------------------------------------------------------------------------------

NAMES = pytest.mark.parametrize("name", KV_FORMATS)
CODED_DIMS = [32, 64, 96, 128]


def coded(name: KvName, head_dim: int, dtype: torch.dtype = torch.float32) -> PagePool:
    stored = KV_FORMATS[name](head_dim)
    return PagePool(LAYERS, HEADS, head_dim, PAGES, dtype, CPU, stored)


def random_heads(num_tokens: int, head_dim: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(head_dim)
    keys, values = torch.randn(2, num_tokens, HEADS, head_dim, generator=draw)
    return keys * torch.logspace(-3, 3, num_tokens)[:, None, None], values


@NAMES
@pytest.mark.parametrize("head_dim", CODED_DIMS)
@pytest.mark.parametrize(("start", "stop"), RANGES)
def test_what_is_read_of_codes_is_what_they_stand_for(
    name: KvName, head_dim: int, start: int, stop: int
) -> None:
    keys, values = random_heads(256, head_dim)
    written, stored = coded(name, head_dim), KV_FORMATS[name](head_dim)
    for first, last in ((0, 50), (50, 64), (64, 223), (223, 256)):
        written.write(2, TABLE, first, keys[first:last], values[first:last])
    for seen, exact in zip(written.read(2, TABLE, start, stop), (keys, values), strict=True):
        wanted = numbers_of(*codes_of(exact[start:stop], stored), stored, torch.float32)
        assert torch.equal(seen, wanted.transpose(0, 1))
        assert torch.equal(written.rounded(exact[start:stop]), wanted)


@NAMES
def test_of_a_position_nothing_else_changes(name: KvName) -> None:
    """All bytes of neighbours stay, and those of the position are its codes and scales."""
    keys, values = random_heads(128, 64)
    written, stored = coded(name, 64), KV_FORMATS[name](64)
    written.write(0, TABLE, 0, keys, values)
    before, position = written.tensor.clone(), 77
    written.write(0, TABLE, position, -values[:1], keys[:1])
    half_page = written.tensor[TABLE[1], 0, :, 0]
    changed = before[TABLE[1], 0, :, 0].clone()
    for part, x in ((KEYS, -values[0]), (VALUES, keys[0])):
        places = written.layout.stored_places(part)[position % 32]
        assert torch.equal(half_page[:, places], bytes_of(x, stored))
        changed[:, places] = half_page[:, places]
    before[TABLE[1], 0, :, 0] = changed
    assert torch.equal(written.tensor, before)


@NAMES
def test_a_pool_of_codes_takes_the_formats_bytes(name: KvName) -> None:
    pool = coded(name, 128, torch.bfloat16)
    assert pool.dtype == torch.bfloat16
    assert pool.tensor.numel() == pool.layout.pool_bytes(PAGES)
    stored = KV_FORMATS[name](128)
    assert pool.layout.page_bytes == stored.num_bytes(LAYERS * HEADS * 2 * 64 * 128)


@NAMES
def test_a_filled_pool_holds_numbers(name: KvName) -> None:
    pool = coded(name, 64, torch.bfloat16)
    pool.fill()
    for read in pool.read(1, TABLE, 0, 256):
        assert read.isfinite().all()
        assert 0.9 < float(read.float().std()) < 1.1
