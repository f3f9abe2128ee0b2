"""Looks whether the engine gets on: not even a call that never returns goes unseen."""

import threading
import time
from collections.abc import Callable

from soloist.engine.loop import EngineLoop, Progress

_LOOK_S = 1.0


class Watchdog:
    """A thread that says so once nothing has moved for too long.

    Only times count in which it could look itself, so that a process that was stopped for a while,
    or a machine that slept, is not taken for a stuck engine.

    Args:
        loop: the engine's.
        stall_s: how long something may run without anything moving.
        on_stall: called once, in the watchdog's thread.
    """

    def __init__(
        self, loop: EngineLoop, stall_s: float, on_stall: Callable[[Progress], None]
    ) -> None:
        self._loop, self._stall_s, self._on_stall = loop, stall_s, on_stall
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="soloist-watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._is_over.set()

    def _run(self) -> None:
        look_s = min(_LOOK_S, self._stall_s / 8)
        looked_at, stalled_s = time.perf_counter(), 0.0
        while not self._is_over.wait(look_s):
            now, progress = time.perf_counter(), self._loop.progress
            since_s, looked_at = now - looked_at, now
            has_moved = progress.age_s < since_s
            stalled_s = 0.0 if has_moved else stalled_s + min(since_s, 2 * look_s)
            if stalled_s >= self._stall_s:
                self._on_stall(progress)
                return
