"""Requests whose steps take unequal times have as much time as each other."""

import random
from typing import cast

import pytest

from soloist.engine.request import Request
from soloist.engine.turns import Turns


def requests(count: int) -> list[Request]:
    return [cast("Request", object()) for _ in range(count)]


def run(turns: Turns, costs: dict[Request, int], rounds: int) -> dict[Request, int]:
    """Steps of each; who has one in a round."""
    steps = dict.fromkeys(costs, 0)
    for _ in range(rounds):
        for one in turns.due():
            steps[one] += 1
            turns.spend(one, costs[one])
    return steps


def test_who_drafts_nothing_waits_for_no_more_steps_than_without_drafts() -> None:
    turns, (first, second, third) = Turns(), requests(3)
    turns.begin([first, second, third])
    costs = {first: 3500, second: 1000, third: 1000}
    steps = run(turns, costs, 700)
    assert steps[second] == steps[third] == 700, "a step in each round"
    assert steps[first] == pytest.approx(200, abs=1)


def test_steps_alike_come_in_every_round() -> None:
    for cost in (1000, 3500):
        turns, some = Turns(), requests(4)
        turns.begin(some)
        assert set(run(turns, dict.fromkeys(some, cost), 10).values()) == {10}


def test_somebody_has_a_step_in_every_round() -> None:
    rng, turns, some = random.Random(1), Turns(), requests(5)
    for _ in range(200):
        turns.begin(rng.sample(some, rng.randint(1, 5)))
        for _ in range(rng.randrange(20)):
            due = turns.due()
            assert due
            for one in due:
                turns.spend(one, rng.choice((1000, 1600, 3500)))


def test_who_left_is_kept_by_nobody() -> None:
    turns, (first, second) = Turns(), requests(2)
    turns.begin([first, second])
    turns.spend(first, 1000)
    turns.leave(second)
    turns.leave(second)
    assert turns.due() == {first}


def test_who_was_away_has_no_steps_to_make_up_for() -> None:
    turns, (first, second) = Turns(), requests(2)
    turns.begin([first, second])
    run(turns, {first: 1000, second: 1000}, 5)
    turns.begin([first])
    run(turns, {first: 1000}, 500)
    turns.begin([first, second])
    assert run(turns, {first: 1000, second: 1000}, 50) == {first: 50, second: 50}
    joined = requests(1)[0]
    turns.begin([first, second, joined])
    assert set(run(turns, dict.fromkeys((first, second, joined), 1000), 50).values()) == {50}
