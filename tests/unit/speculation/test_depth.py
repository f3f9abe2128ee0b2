"""How many tokens are drafted, and when drafting pauses."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soloist.errors import SettingError
from soloist.speculation import Archive, Costs, Drafter, Drafting
from soloist.speculation.depth import ONE, Depth, best_depth

FLAT, STEEP = Costs((1080,) * 7), Costs((1600, 1900, 2200, 2550, 2900, 3200, 3500))


def tokens_for_cost(acceptance: float, drafts: int, costs: Costs) -> float:
    cost = 1000 if drafts == 0 else costs.of_drafts[drafts - 1]
    return sum(acceptance**i for i in range(drafts + 1)) / cost


@given(st.integers(0, ONE), st.sampled_from((FLAT, STEEP)))
def test_the_best_depth_has_the_most_tokens_for_its_cost(acceptance, costs) -> None:
    share = acceptance / ONE
    best = max(tokens_for_cost(share, k, costs) for k in range(8))
    found = tokens_for_cost(share, best_depth(acceptance, costs.of_drafts), costs)
    assert found >= best * (1 - 1e-3)


def test_what_is_always_right_is_drafted_as_deep_as_may_be() -> None:
    assert best_depth(ONE, FLAT.of_drafts) == best_depth(ONE, STEEP.of_drafts) == 7
    assert best_depth(0, FLAT.of_drafts) == 0
    assert best_depth(ONE // 2, STEEP.of_drafts) == 0, "a step of two costs more than 1.5"


def test_wrong_drafts_lead_to_pauses_that_grow_and_a_right_one_ends_them() -> None:
    depth, tried = Depth(STEEP, ONE // 2), []
    for number in range(2000):
        if most := depth.most:
            tried.append(number)
            depth.judge(most, 0)
        else:
            depth.skip()
    pauses = [b - a - 1 for a, b in pairwise(tried)]
    assert pauses[:6] == [8, 16, 32, 64, 128, 256]
    assert set(pauses[6:]) == {256}
    while not depth.most:
        depth.skip()
    for _ in range(12):
        assert depth.most
        depth.judge(depth.most, depth.most)
    assert depth.most > 1


def test_costs_are_positive() -> None:
    with pytest.raises(SettingError, match="at least 1"):
        Costs((1000, 0))


def rounds_of(drafting: Drafting, answer: list[int], **more: object) -> tuple[int, int]:
    """Rounds that a model takes which answers so, and drafts that were wrong."""
    drafter = Drafter(drafting, [1, 2, 3], **more)  # type: ignore[arg-type]
    made, rounds, wrong = answer[:1], 0, 0
    while len(made) < len(answer):
        rounds += 1
        draft = drafter.draft(made, min(7, len(answer) - len(made) - 1))
        accepted = 0
        if draft is not None:
            assert len(draft.ids) <= 7
            rest = answer[len(made) :]
            while accepted < len(draft.ids) and draft.ids[accepted] == rest[accepted]:
                accepted += 1
            drafter.judge(draft, len(draft.ids), accepted)
            wrong += len(draft.ids) - accepted
        made += answer[len(made) :][: accepted + 1]
    return rounds, wrong


def random_text(count: int) -> list[int]:
    rng = random.Random(count)
    return [rng.randrange(5000) for _ in range(count)]


def test_a_whole_prediction_takes_an_eighth_of_the_rounds() -> None:
    answer = random_text(801)
    assert rounds_of(Drafting(FLAT, looks_up=False), answer, prediction_ids=answer) == (100, 0)


def test_a_text_that_never_repeats_has_no_drafts() -> None:
    assert rounds_of(Drafting(FLAT, looks_up=True), list(range(10, 500))) == (489, 0)


def test_a_loop_is_found_and_followed() -> None:
    rounds, wrong = rounds_of(Drafting(FLAT, looks_up=True), [7, 8, 9, 10] * 100)
    assert rounds < 400 / 6
    assert wrong < 8


def test_an_earlier_answer_is_followed() -> None:
    answer = random_text(400)
    archive = Archive()
    archive.add(answer)
    rounds, _ = rounds_of(Drafting(FLAT, looks_up=True), answer, archive=archive)
    assert rounds < 400 / 6


def test_a_third_of_wrong_tokens_still_pays_where_columns_are_cheap() -> None:
    rng = random.Random(5)
    answer = random_text(1000)
    predicted = [6000 if rng.random() < 0.25 else t for t in answer]
    rounds, _ = rounds_of(Drafting(FLAT, looks_up=False), answer, prediction_ids=predicted)
    assert 1000 / rounds > 3.2, "1 + ¾ + ¾² + … + ¾⁷ is 3.6"
