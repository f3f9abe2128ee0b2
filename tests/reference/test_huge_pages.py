"""Matrices in huge pages: the same numbers, where the system has such pages and where not."""

import mmap
import re
import sys
from pathlib import Path

import pytest
import torch

from soloist.reference import huge_pages
from soloist.reference.blocks import by_columns

HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.parametrize("shape", [(3, 5), (1024, 1024), (4, 512, 768)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrices_by_columns_have_the_same_numbers(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    weight = torch.randn(*shape).to(dtype)
    found = by_columns(weight)
    assert found.is_contiguous()
    assert torch.equal(found, weight.mT)


def test_large_ones_have_a_mapping_of_their_own_and_keep_it() -> None:
    large = huge_pages.empty((2048, 1024), torch.float32)
    assert large.data_ptr() % mmap.PAGESIZE == 0
    part = large[1:].fill_(3)
    del large
    assert float(part.sum()) == 3 * 2047 * 1024


@pytest.mark.skipif(
    sys.platform != "linux" or not HUGE.exists(), reason="needs Linux with transparent huge pages"
)
def test_huge_pages_are_asked_for() -> None:
    large = huge_pages.empty((4096, 4096), torch.float32).zero_()
    start = large.data_ptr()
    maps = Path("/proc/self/smaps").read_text(encoding="utf-8")
    for entry in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", maps):
        first, end = (int(x, 16) for x in entry.split(" ", 1)[0].split("-"))
        if first <= start < end:
            assert " hg" in entry[entry.index("VmFlags") :], "the kernel was advised"
            return
    raise AssertionError("its memory is mapped")


def test_a_system_without_them_gives_memory_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert huge_pages.empty((2048, 1024), torch.float32).shape == (2048, 1024)
