"""How many tokens to draft, from what was accepted so far and what columns cost. Integers only.

A round that checks k drafts, each accepted with probability a, makes 1 + a + a² + … + a^k tokens.
The best k is that with the most tokens for its cost; if that is none at all, drafting pauses, and
tries again with a single draft after some rounds: twice as many each time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from soloist.errors import SettingError

# Probabilities are in steps of 1 / 65,536, what a round costs is in thousandths of a plain one.
ONE = 1 << 16
PLAIN_COST = 1000

# How far one token moves the running acceptance: an eighth of the way.
SHIFT = 3
FIRST_PAUSE, LONGEST_PAUSE = 8, 256


@dataclass(frozen=True, slots=True)
class Costs:
    """What a step costs with k drafts, in thousandths of a step with none.

    Attributes:
        of_drafts: by k, from 1 on; as many as a step may have.
    """

    of_drafts: tuple[int, ...]

    def __post_init__(self) -> None:
        if any(cost < 1 for cost in self.of_drafts):
            raise SettingError("costs", self.of_drafts, "whole numbers of at least 1")

    @property
    def most(self) -> int:
        """Drafts that a step may have."""
        return len(self.of_drafts)


def best_depth(acceptance: int, costs: Sequence[int]) -> int:
    """The number of drafts with the most tokens for its cost; of equal ones the least."""
    best, best_tokens, best_cost = 0, ONE, PLAIN_COST
    tokens = share = ONE
    for drafts, cost in enumerate(costs, 1):
        share = share * acceptance >> 16
        tokens += share
        if tokens * best_cost > best_tokens * cost:
            best, best_tokens, best_cost = drafts, tokens, cost
    return best


class Depth:
    """The running acceptance of one kind of drafts, and what follows from it.

    Args:
        costs: of a step.
        acceptance: to begin with, in steps of 1 / 65,536.
    """

    def __init__(self, costs: Costs, acceptance: int) -> None:
        self._costs, self.acceptance = costs, acceptance
        self._pause, self._num_left = FIRST_PAUSE, 0
        self._best = best_depth(acceptance, costs.of_drafts)

    @property
    def most(self) -> int:
        """How many to draft now; 0 in a pause."""
        if self._best:
            return self._best
        return 0 if self._num_left else min(1, self._costs.most)

    @property
    def pays(self) -> bool:
        """Whether drafts are right often enough for what they cost."""
        return self._best > 0

    @property
    def num_left(self) -> int:
        """Rounds that are left of a pause."""
        return 0 if self._best else self._num_left

    @property
    def state(self) -> tuple[int, int, int, int]:
        """Acceptance, the next pause, rounds left of this one, and the best number of drafts."""
        return self.acceptance, self._pause, self._num_left, self._best

    def skip(self) -> None:
        """A round went by in which this kind had a draft and was paused."""
        self._num_left = max(0, self._num_left - 1)

    def judge(self, num_drafted: int, num_accepted: int) -> None:
        """So many were drafted, and so many accepted before the first wrong one."""
        for _ in range(num_accepted):
            self.acceptance += ONE - self.acceptance >> SHIFT
        if num_accepted < num_drafted:
            self.acceptance -= self.acceptance >> SHIFT
        self._best = best_depth(self.acceptance, self._costs.of_drafts)
        if self._best or num_accepted:
            self._pause, self._num_left = FIRST_PAUSE, 0
        else:
            self._num_left = self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
