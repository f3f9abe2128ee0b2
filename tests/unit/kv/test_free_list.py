import pytest

from soloist.kv.free_list import FreeList


def test_pages_are_allocated_once_and_come_back() -> None:
    pages = FreeList(5)
    first, second = pages.allocate(2), pages.allocate(3)
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert pages.num_free == 0
    pages.free(second)
    assert pages.num_free == 3
    assert sorted(pages.allocate(3)) == sorted(second)


def test_allocating_nothing_from_a_full_pool() -> None:
    pages = FreeList(0)
    assert pages.allocate(0) == []


def test_more_than_is_free_is_our_mistake() -> None:
    pages = FreeList(2)
    with pytest.raises(AssertionError, match="3 pages asked for, 2 free"):
        pages.allocate(3)
    assert pages.num_free == 2


def test_freeing_twice_is_our_mistake() -> None:
    pages = FreeList(2)
    pages.free(pages.allocate(1))
    with pytest.raises(AssertionError, match="page 0 is not allocated"):
        pages.free([0])
