"""A text of token ids that grows."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]


class Tokens:
    """Token ids in one array, with room for more.

    Args:
        ids: the first ones.
    """

    def __init__(self, ids: Sequence[int] | NDArray[np.int32 | np.int64] = ()) -> None:
        self._held = np.array(ids, np.int32)
        self._count = len(self._held)

    def __len__(self) -> int:
        """How many there are."""
        return self._count

    @property
    def ids(self) -> Ids:
        """All of them; valid until the next `extend`."""
        return self._held[: self._count]

    def extend(self, ids: Sequence[int]) -> None:
        """Append some."""
        count = self._count + len(ids)
        if count > len(self._held):
            grown = np.empty(max(256, 2 * count), np.int32)
            grown[: self._count] = self.ids
            self._held = grown
        self._held[self._count : count] = ids
        self._count = count

    def keep_last(self, count: int) -> None:
        """Forget all but the last ones."""
        if count < self._count:
            self._held = self.ids[self._count - count :].copy()
            self._count = count
