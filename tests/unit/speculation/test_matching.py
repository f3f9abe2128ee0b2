"""The longest match against a definition of a few lines."""

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from soloist.speculation.lookup import LEAST_MATCH, Archive, following, look_up
from soloist.speculation.matching import MOST_MATCH, Match, longest_match

TEXT = st.lists(st.integers(0, 2), max_size=80)


def ids(text: list[int]) -> np.ndarray:
    return np.array(text, np.int32)


def length_at(text: list[int], end: list[int], at: int) -> int:
    length = 0
    while length < min(at, len(end), MOST_MATCH) and text[at - length - 1] == end[-length - 1]:
        length += 1
    return length


def by_definition(text: list[int], end: list[int], least: int) -> Match | None:
    found = [(length_at(text, end, at), at) for at in range(1, len(text))]
    length, at = max(found, default=(0, 0))
    return Match(length, at) if length >= max(1, least) else None


@given(TEXT, TEXT, st.integers(1, 5))
def test_a_match_is_the_longest_and_of_equal_ones_the_latest(text, end, least) -> None:
    assert longest_match(ids(text), ids(end), least) == by_definition(text, end, least)


@given(TEXT)
def test_the_end_of_a_text_is_no_match_of_itself(text) -> None:
    found = longest_match(ids(text), ids(text), LEAST_MATCH)
    assert found == by_definition(text, text, LEAST_MATCH)
    assert found is None or found.at < len(text)


def test_matches_beyond_the_most_are_cut() -> None:
    loop = [1, 2, 3] * 40
    assert longest_match(ids(loop), ids(loop), 2) == Match(MOST_MATCH, len(loop) - 3)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 7))
def test_what_follows_in_a_loop_is_the_loop(period, count) -> None:
    text = ids(period * 5)
    wanted = (period * 10)[len(text) % len(period) :][:count]
    assert following(text, len(text) - len(period), count) == wanted


def test_an_earlier_answer_helps_only_with_a_longer_match() -> None:
    archive = Archive()
    archive.add([5, 6, 7, 8, 9])
    history = ids([1, 6, 7, 2, 3, 6, 7])
    match, text = look_up(history, archive.ids) or (None, None)
    assert (match, text is history) == (Match(2, 3), True), "of equal ones its own"
    history = ids([1, 6, 7, 2, 5, 6, 7])
    match, text = look_up(history, archive.ids) or (None, None)
    assert match == Match(3, 3)
    assert following(text, 3, 7) == [8, 9], "nothing comes from behind a gap"


def test_an_archive_is_bounded_and_keeps_the_latest() -> None:
    archive, rng = Archive(100), random.Random(0)
    for _ in range(50):
        answer = [rng.randrange(10) for _ in range(rng.randrange(40))]
        archive.add(answer)
        assert len(archive.ids) <= 200
        assert archive.ids[-len(answer) - 1 : -1].tolist() == answer
    archive.add([1] * 1000)
    assert len(archive.ids) == 100
