"""How wide a pass may be while others stream: so wide that no stream waits longer than it should.

Pure: no clock, no device. Only for widths of which a prompt's bits do not depend on the choice.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

# From a stream's last token before a pass to its next one.
MOST_GAP_S = 0.03
# A row's products with weights take at least as long as its attention to so many keys.
_KEYS_OF_WEIGHTS = 4096
# Passes near in position tell more than those near in width.
_WIDTH_SHARE = 0.1


class _Pass(NamedTuple):
    stop: int  # the position behind it
    seconds: float  # without the round behind it


class PassPace:
    """Learns from passes what others take.

    A pass takes time for its rows, and for each of them for the keys that it sees. So one that is
    wider, or farther on, takes at most as many times longer as it has more of both. What is nearest
    to a pass says how long it takes.

    Args:
        widths: to choose from, ascending.
        most_s: that a pass and a round behind it may take; the narrowest width may take longer.
    """

    def __init__(self, widths: Sequence[int], most_s: float = MOST_GAP_S) -> None:
        assert widths, "something to choose"
        self._widths, self._most_s = tuple(widths), most_s
        self._round_s = 0.0
        self._seen: dict[int, _Pass] = {}  # the latest of each width

    def add_round(self, seconds: float) -> None:
        """A round of all streams took so long, behind another one."""
        self._round_s = seconds

    def add_pass(self, width: int, start: int, seconds: float) -> None:
        """A pass and the round behind it took so long."""
        self._seen[width] = _Pass(start + width, max(0.0, seconds - self._round_s))

    def widest(self, start: int) -> int:
        """Rows that the pass from position `start` on may have; before the first, as few as can."""
        fitting = (w for w in reversed(self._widths) if self._at_most_s(w, start) <= self._most_s)
        return next(fitting, self._widths[0])

    def _at_most_s(self, width: int, start: int) -> float:
        """What a pass and a round take."""
        if not self._seen:
            return math.inf
        keys = _KEYS_OF_WEIGHTS + start + width

        def ratios(seen: tuple[int, _Pass]) -> tuple[float, float]:
            return width / seen[0], keys / (_KEYS_OF_WEIGHTS + seen[1].stop)

        def distance(seen: tuple[int, _Pass]) -> float:
            of_width, of_keys = map(math.log, ratios(seen))
            return abs(of_keys) + _WIDTH_SHARE * abs(of_width)

        nearest = min(self._seen.items(), key=distance)
        of_width, of_keys = ratios(nearest)
        return self._round_s + nearest[1].seconds * max(1.0, of_width) * max(1.0, of_keys)
