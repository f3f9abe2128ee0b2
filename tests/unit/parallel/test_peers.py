"""Which GPUs can work together, from who reaches whom."""

import pytest

from soloist.errors import NoPeerAccess
from soloist.parallel.peers import allow_access, largest_group, require_access


def linked(*pairs: tuple[int, int]):
    return lambda a, b: (a, b) in pairs or (b, a) in pairs


def test_all_that_reach_each_other_are_one_group() -> None:
    assert largest_group([0, 1, 2, 3], lambda *_: True) == [0, 1, 2, 3]


def test_the_largest_group_is_found() -> None:
    reaches = linked((0, 1), (2, 3), (2, 4), (3, 4))
    assert largest_group([0, 1, 2, 3, 4], reaches) == [2, 3, 4]


def test_both_directions_count() -> None:
    assert largest_group([0, 1], lambda a, b: a < b) == [0]


def test_one_gpu_is_always_enough() -> None:
    assert largest_group([5], lambda *_: False) == [5]
    require_access([5], lambda *_: False)


def test_gpus_apart_are_refused_with_those_that_are_not() -> None:
    with pytest.raises(NoPeerAccess, match=r"GPUs \[0, 1, 2\].*largest group that does: \[1, 2\]"):
        require_access([0, 1, 2], linked((1, 2)))


@pytest.mark.gpu
def test_a_gpu_reaches_itself() -> None:
    allow_access([0])
    allow_access([0])
