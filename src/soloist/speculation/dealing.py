"""Several answers whose drafts a step checks together: how many of them there is room for."""

from collections.abc import Sequence


def deal(offered: Sequence[int], room: int) -> list[int]:
    """How many drafted tokens of each answer are checked.

    One each in turn, the first answers first, so that nobody's drafts leave another without any.

    Args:
        offered: tokens that each has drafted.
        room: tokens that the step may check in all.
    """
    dealt = [0] * len(offered)
    for turn in range(1, max(offered, default=0) + 1):
        for number, count in enumerate(offered):
            if count >= turn and room:
                dealt[number] += 1
                room -= 1
    return dealt
