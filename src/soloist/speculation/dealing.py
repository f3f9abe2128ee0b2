"""Several answers whose drafts a step checks together: how many of them there is room for."""

from collections.abc import Sequence

# Of the speed that it has when nobody drafts, per cent that an answer without drafts keeps beside
# others that have some.
_KEPT = 95


def deal(offered: Sequence[int], most: int, most_beside: int) -> list[int]:
    """How many drafted tokens of each answer are checked.

    One each in turn, the first answers first, so that nobody's drafts leave another without any. An
    answer that gets none loses by those of others. Beside it a step has fewer queries.

    Args:
        offered: tokens that each has drafted.
        most: queries that a step may have, of all answers.
        most_beside: the same where an answer has no draft that is checked.
    """
    dealt = _in_turn(offered, most - len(offered))
    return dealt if all(dealt) else _in_turn(offered, most_beside - len(offered))


def _in_turn(offered: Sequence[int], room: int) -> list[int]:
    dealt = [0] * len(offered)
    for turn in range(1, max(offered, default=0) + 1):
        for number, count in enumerate(offered):
            if count >= turn and room:
                dealt[number] += 1
                room -= 1
    return dealt


def most_beside(costs: Sequence[int]) -> tuple[int, ...]:
    """By the number of answers, from 1 on: queries of a step where one of them has no drafts.

    Args:
        costs: of steps of one query, two, …; in any unit.
    """
    return tuple(
        max(n for n, cost in enumerate(costs, 1) if cost * _KEPT <= alone * 100 or n == answers)
        for answers, alone in enumerate(costs, 1)
    )
