import pytest

from soloist.prefill.page_list import PageList


def test_pages_are_taken_once_and_come_back() -> None:
    pages = PageList(5)
    first, second = pages.take(2), pages.take(3)
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert pages.num_free == 0
    pages.give_back(second)
    assert pages.num_free == 3
    assert sorted(pages.take(3)) == sorted(second)


def test_taking_nothing_from_a_full_pool() -> None:
    pages = PageList(0)
    assert pages.take(0) == []


def test_more_than_is_free_is_our_mistake() -> None:
    pages = PageList(2)
    with pytest.raises(AssertionError, match="3 pages asked for, 2 free"):
        pages.take(3)
    assert pages.num_free == 2


def test_giving_back_twice_is_our_mistake() -> None:
    pages = PageList(2)
    pages.give_back(pages.take(1))
    with pytest.raises(AssertionError, match="page 0 was not taken"):
        pages.give_back([0])
