"""How the engine's thread wakes the event loop: once for all streams that have something."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable

log = logging.getLogger(__name__)


class Bell:
    """Runs callbacks in the event loop; those rung for together share one wake-up.

    Args:
        loop: in which they run.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due: deque[Callable[[], None]] = deque()
        self._is_rung = False

    def ring(self, callback: Callable[[], None]) -> None:
        """Have `callback` run soon; from any thread.

        Raises:
            RuntimeError: the event loop has ended.
        """
        self._due.append(callback)
        if not self._is_rung:
            self._is_rung = True
            try:
                self._loop.call_soon_threadsafe(self._answer)
            except RuntimeError:
                self._is_rung = False  # whoever rings next is told, too
                raise

    def _answer(self) -> None:
        # In this order: what is appended from here on rings again.
        self._is_rung = False
        while self._due:
            try:
                self._due.popleft()()
            except Exception:  # the others are due as well
                log.exception("a callback failed")
