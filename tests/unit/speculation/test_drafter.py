"""One request's drafts, and what is known of the next one."""

import random
from dataclasses import replace

import pytest

from soloist.speculation import Costs, Drafter, Drafting
from soloist.speculation.depth import ONE
from soloist.speculation.drafter import RIGHT_GUESSES, WAIT_ROUNDS

FLAT = Drafting(Costs((1300,) * 7), looks_up=False)


def test_what_is_behind_a_right_draft_is_drafted_once_the_answer_is_there() -> None:
    """For every number of drafts that costs lead to, until the prediction ends."""
    num_known = 0
    for seed in range(300):
        rng = random.Random(seed)
        costs = Costs(tuple(sorted(rng.randint(900, 4000) for _ in range(7))))
        text = [rng.randrange(50) for _ in range(rng.randint(1, 60))]
        drafter = Drafter(Drafting(costs, looks_up=rng.random() < 0.5), [1, 2, 3], text)
        answer: list[int] = []
        for _ in range(12):
            draft = drafter.draft(answer, rng.randint(0, 7))
            if draft is None:
                answer.append(text[len(answer)] if len(answer) < len(text) else 99)
                continue
            most = rng.randint(-1, 7)
            found = drafter.behind(draft, most)
            assert found == drafter.behind(draft, most), "nothing changes"
            right = text[len(answer) : len(answer) + len(draft.ids) + 1]
            if found is None or rng.random() < 0.2:
                drafter.judge(draft, 1, 0)
                answer.append(98)
                continue
            num_known += 1
            token_id, following = found
            assert [*draft.ids, token_id] == right
            drafter.judge(draft, len(draft.ids), len(draft.ids))
            answer += right
            assert drafter.draft(answer, most) == following
    assert num_known > 300


def lost(right_guesses: int = RIGHT_GUESSES) -> tuple[Drafter, list[int]]:
    """A drafter whose prediction the answer has left, and the answer."""
    drafting = replace(FLAT, right_guesses=right_guesses)
    drafter, answer = Drafter(drafting, [1, 2, 3], [*range(100, 200)]), [50]
    while (draft := drafter.draft(answer, 7)) is not None:
        assert not drafter.is_idle
        drafter.judge(draft, 1, 0)
        answer.append(50)
    return drafter, answer


def test_drafts_rest_once_nothing_was_known_for_some_rounds() -> None:
    drafter, answer = lost()
    for _ in range(WAIT_ROUNDS - 1):
        answer.append(50)
        assert drafter.draft(answer, 7) is None
        assert not drafter.is_idle
    answer.append(50)
    assert drafter.draft(answer, 7) is None
    assert drafter.is_idle


def test_a_long_pause_is_not_waited_through_and_a_short_one_is() -> None:
    """A text that goes on and on, and an answer that is wrong at every other token of it."""
    drafter, answer = Drafter(FLAT, [1, 2, 3], [7] * 500), [7]
    pauses: list[tuple[int, bool]] = []
    for _ in range(60):
        draft = drafter.draft(answer, 7)
        if draft is None:
            answer.append(7)
            pauses.append((drafter.state.depths[0][2], drafter.is_idle))
            continue
        assert not drafter.is_idle
        drafter.judge(draft, 1, 0)
        answer += [7]
    assert {is_idle for left, is_idle in pauses if left > WAIT_ROUNDS} == {True}
    assert pauses[0] == (WAIT_ROUNDS - 1, False)


@pytest.mark.parametrize("right_guesses", [RIGHT_GUESSES, 9])
def test_right_guesses_end_a_rest_and_raise_the_share(right_guesses: int) -> None:
    drafter, answer = lost(right_guesses)
    drafter.rest()
    for token_id in [50, 51, 120, 52, 130, 131]:
        answer.append(token_id)
        assert not drafter.watch(answer)
    before = drafter.state.depths[0][0]
    for token_id in range(132, 132 + right_guesses):
        assert drafter.is_resting
        answer.append(token_id)
        is_over = drafter.watch(answer)
    assert is_over
    assert not drafter.is_resting
    assert before < drafter.state.depths[0][0] < ONE
    draft = drafter.draft(answer, 7)
    assert draft is not None
    assert draft.ids == tuple(range(132 + right_guesses, 139 + right_guesses))


def test_wrong_guesses_do_not_end_a_rest() -> None:
    drafter, answer = Drafter(FLAT, [1, 2, 3], [7] * 500), [7]
    drafter.rest()
    for number in range(200):
        answer.append(7 if number % 2 else 8)
        assert not drafter.watch(answer), "never twice in a row"
