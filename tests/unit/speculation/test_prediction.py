"""A prediction is followed through every kind of edit."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from soloist.speculation.prediction import Prediction


def text(count: int, seed: int = 0) -> list[int]:
    """Tokens of which few occur twice."""
    rng = random.Random(seed)
    return [rng.randrange(10_000) for _ in range(count)]


def follow(predicted: list[int], answer: list[int]) -> list[bool]:
    """Of each token of the answer, whether it was expected next."""
    prediction = Prediction(np.array(predicted, np.int32))
    right = []
    for token_id in answer:
        right.append(prediction.next_ids(1).tolist() == [token_id])
        prediction.take(token_id)
    return right


def test_a_text_is_followed_from_its_first_token_to_its_last() -> None:
    predicted = text(100)
    assert all(follow(predicted, predicted))
    prediction = Prediction(np.array(predicted, np.int32))
    for token_id in predicted:
        assert not prediction.is_over
        prediction.take(token_id)
    assert prediction.is_over
    assert not len(prediction.next_ids(7))


EDITS = {
    "replaced": (lambda a: [*a[:40], 77_777, *a[41:]], 1),
    "two replaced": (lambda a: [*a[:40], 77_777, 77_778, *a[42:]], 2),
    "one inserted": (lambda a: [*a[:40], 77_777, *a[40:]], 3),
    "many inserted": (lambda a: [*a[:40], *range(80_000, 80_030), *a[40:]], 32),
    "one deleted": (lambda a: [*a[:40], *a[41:]], 3),
    "many deleted": (lambda a: [*a[:40], *a[70:]], 3),
    "replaced by more": (lambda a: [*a[:40], *range(80_000, 80_009), *a[45:]], 11),
    "moved": (lambda a: [*a[60:], *a[:60]], 6),
    "another beginning": (lambda a: [80_000, 80_001, 80_002, *a], 5),
}


@pytest.mark.parametrize(("edit", "most_wrong"), EDITS.values(), ids=EDITS)
def test_the_place_is_found_again_after(edit, most_wrong) -> None:
    predicted = text(100)
    right = follow(predicted, edit(predicted))
    assert right.count(False) <= most_wrong


def test_replaced_tokens_cost_nothing_but_themselves() -> None:
    predicted, rng = text(400), random.Random(1)
    answer = [80_000 + i if rng.random() < 0.25 else t for i, t in enumerate(predicted)]
    right = follow(predicted, answer)
    same = [a == b for a, b in zip(answer, predicted, strict=True)]
    assert sum(right) >= 0.93 * sum(same)


def test_nothing_is_expected_of_a_text_that_is_not_followed() -> None:
    right = follow(text(100), text(300, 1))
    assert not any(right)
    prediction = Prediction(np.array(text(100), np.int32))
    for token_id in text(300, 1):
        prediction.take(token_id)
    assert not len(prediction.next_ids(7))


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), max_size=40))
def test_a_place_is_always_inside_the_text(predicted, answer) -> None:
    prediction = Prediction(np.array(predicted, np.int32))
    for token_id in answer:
        prediction.take(token_id)
        assert 0 <= prediction.at <= len(predicted)
        assert prediction.next_ids(7).tolist() in ([], predicted[prediction.at :][:7])


def test_a_token_below_zero_is_not_what_lies_before_the_beginning() -> None:
    """A predicted text may have tokens that no model has."""
    prediction = Prediction(np.array([*[-1] * 15, 5, 6], np.int32))
    prediction.take(5)
    assert prediction.next_ids(1).tolist() == [-1], "the first token was replaced, none left out"


def test_tokens_of_one_round_look_for_the_place_once() -> None:
    """As long as they follow, and where the last alone does not, as if they came one by one."""
    predicted = text(60)
    for made in ([*predicted[:5]], [*predicted[:4], 77_777], [77_777], predicted):
        at_once, one_by_one = (Prediction(np.array(predicted, np.int32)) for _ in range(2))
        at_once.take(*made)
        for token_id in made:
            one_by_one.take(token_id)
        assert (at_once.at, at_once.is_good) == (one_by_one.at, one_by_one.is_good)
    elsewhere = Prediction(np.array(predicted, np.int32))
    elsewhere.take(77_777, *predicted[30:37])
    assert elsewhere.next_ids(2).tolist() == predicted[37:39]
