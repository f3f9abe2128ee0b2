"""Answers that end before less indented lines, and those that took long enough."""

import random

import pytest

from soloist.server.early_end import EarlyEnd

CODE = " = 1\n    if x:\n\n        y()\n\treturn x\n\ndef g():\n    pass\n"


@pytest.mark.parametrize(
    ("least_indent", "shown"),
    [
        (0, CODE),
        (1, CODE[: CODE.index("\n\ndef")]),
        (2, CODE[: CODE.index("\n\treturn")]),
        (4, CODE[: CODE.index("\n\treturn")]),
        (5, " = 1"),
    ],
)
def test_indentation_however_the_text_is_cut(least_indent: int, shown: str) -> None:
    rng = random.Random(1)
    for _ in range(50):
        follower, told, place = EarlyEnd(least_indent, None), "", 0
        while place < len(CODE) and not follower.is_over:
            size = rng.randrange(1, 9)
            told += follower.push(CODE[place : place + size])
            place += size
            assert shown.startswith(told)
        assert told + follower.finish() == shown
        assert follower.is_cut == (shown != CODE)


def test_white_space_at_the_end_is_shown_at_the_end() -> None:
    follower = EarlyEnd(4, None)
    assert follower.push("x\n\n  ") == "x"
    assert follower.finish() == "\n\n  "


def test_time_counts_from_the_first_text_and_only_after_a_line() -> None:
    now = 10.0
    follower = EarlyEnd(0, 2.0, lambda: now)
    assert follower.push("") == ""
    now = 20.0
    follower.push("a = 1")
    now = 30.0
    assert not follower.is_over, "there is no line break yet"
    follower.push("\n")
    assert follower.is_over
    follower = EarlyEnd(0, 2.0, lambda: now)
    follower.push("a\nb")
    now = 31.9
    assert not follower.is_over
    now = 32.0
    assert follower.is_over
