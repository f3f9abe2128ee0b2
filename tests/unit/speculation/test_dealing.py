"""Which drafts a step has queries for, and what others may lose by them."""

import random

import pytest

from soloist.speculation import deal, most_beside

MOST = 8


def test_queries_are_dealt_one_each_in_turn() -> None:
    assert deal([7, 7, 7], MOST, MOST) == [2, 2, 1]
    assert deal([1, 7], MOST, MOST) == [1, 5]
    assert deal([7], MOST, 2) == [7]
    assert deal([], MOST, MOST) == []


def test_who_has_no_draft_is_beside_fewer_queries() -> None:
    assert deal([7, 0, 0], MOST, 5) == [2, 0, 0]
    assert deal([7, 3, 0], MOST, 5) == [1, 1, 0]
    assert deal([7, 0, 0], MOST, 3) == [0, 0, 0]
    assert deal([7, 1, 1], MOST, 3) == [3, 1, 1], "each has one"
    assert deal([1, 1, 1, 1, 1], MOST, 6) == [1, 0, 0, 0, 0], "there are none for two of them"


@pytest.mark.parametrize("seed", range(300))
def test_a_step_has_no_more_queries_than_it_may(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(1, MOST)
    limit = rng.randint(count, MOST)
    offered = [rng.randrange(MOST) for _ in range(count)]
    dealt = deal(offered, MOST, limit)
    assert all(0 <= x <= most for x, most in zip(dealt, offered, strict=True))
    assert count + sum(dealt) <= (MOST if all(dealt) else limit)
    left = sum(offered) - sum(dealt)
    assert not left or count + sum(dealt) in (MOST, limit), "none is left out for nothing"


def test_who_has_no_draft_keeps_95_per_cent_of_its_speed() -> None:
    assert most_beside([1000] * 8) == (8,) * 8
    # A query more costs 2 per cent of the first one's step, then of two.
    assert most_beside([1000, 1020, 1040, 1060, 1080, 1100, 1120, 1140]) == (3, 4, 5, 6, 7, 8, 8, 8)
    # Each query reads weights of its own.
    assert most_beside([1000, 2000, 3000, 4000]) == (1, 2, 3, 4)
    for costs in ([1000, 1010, 1100, 1200, 1210], [5, 9, 9, 10, 12]):
        for answers, most in enumerate(most_beside(costs), 1):
            alone = costs[answers - 1]
            assert alone / costs[most - 1] >= 0.95
            assert all(alone / cost < 0.95 for cost in costs[most:])
