"""Requests whose steps take unequal times, in turn: each has as much time as any other. Pure."""

from collections.abc import Sequence

from soloist.engine.request import Request
from soloist.speculation.depth import PLAIN_COST


class Turns:
    """Who takes a step of a round, where a step with drafts takes longer than one without.

    A request goes ahead of none of the others by more than a step without drafts. So who drafts
    nothing has its step in every round, and waits for a step with drafts only as often as it would
    have waited for steps without. (Start-time fair queueing: Goyal, Vin and Cheng, 1996.)
    """

    def __init__(self) -> None:
        # What steps of the requests of the latest rounds cost so far.
        self._used: dict[Request, int] = {}

    def begin(self, requests: Sequence[Request]) -> None:
        """These take part from now on; one that joins has what the last of the others has."""
        least = min((self._used[r] for r in requests if r in self._used), default=0)
        self._used = {r: self._used.get(r, least) for r in requests}

    def due(self) -> set[Request]:
        """Who has a step in the next round: one at least."""
        least = min(self._used.values())
        return {r for r, used in self._used.items() if used < least + PLAIN_COST}

    def leave(self, request: Request) -> None:
        """It takes part no more."""
        self._used.pop(request, None)

    def spend(self, request: Request, cost: int) -> None:
        """Its step cost so much, in thousandths of one without drafts."""
        self._used[request] += cost
