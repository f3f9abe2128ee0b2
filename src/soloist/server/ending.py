"""The end of the process, by a time that nothing moves: no call that never returns, no loop.

A thread cannot be ended from outside. So what does not end by itself is ended with the process.
"""

import faulthandler
import logging
import os
import sys
import threading
import time
from queue import SimpleQueue
from typing import NoReturn

import psutil

from soloist.errors import EndForced, SoloistError, Stalled
from soloist.server.host import Host

log = logging.getLogger(__name__)

# Beyond the time that requests have to end by themselves: for replies that say that they were cut,
# then for closing.
LAST_WORDS_S, CLOSING_S = 2.0, 3.0

# Somebody may have stopped reading stderr.
_TELLING_S = 0.5


class Ending:
    """Sees to it that the process ends, once it was asked to, in its bound.

    Args:
        host: is told.
        shutdown_s: requests may go on for so long.
    """

    def __init__(self, host: Host, shutdown_s: float) -> None:
        self._host, self._shutdown_s = host, shutdown_s
        # The one way to another thread that is safe in a signal handler, and twice in each other.
        self._asked: SimpleQueue[SoloistError] = SimpleQueue()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="soloist-end", daemon=True)

    @property
    def bound_s(self) -> float:
        """From being asked to the end of the process."""
        return self._shutdown_s + LAST_WORDS_S + CLOSING_S

    def start(self) -> None:
        """From now on whoever asks for the end gets it."""
        self._thread.start()

    def ask(self, error: SoloistError | None = None) -> None:
        """End; from any thread or a signal handler, any number of times.

        Args:
            error: what the process ends with if it has to be forced to; default: `EndForced`.
        """
        self._asked.put(error or EndForced(self.bound_s))

    def forget(self) -> None:
        """The end has come by itself, or goes on to where nothing can hold it up."""
        self._is_over.set()
        self.ask()

    def _run(self) -> None:
        error, waits = self._asked.get(), self._is_over.wait
        until = time.monotonic() + self.bound_s
        if isinstance(error, Stalled):  # its requests have failed: only last words are waited for
            until = time.monotonic() + LAST_WORDS_S
        else:
            self._host.stop()
            if not waits(self._shutdown_s + LAST_WORDS_S / 2):
                self._host.abandon()
        if not waits(max(0.0, until - time.monotonic())):
            end_by_force(error)


def end_by_force(error: SoloistError) -> NoReturn:
    """End the process as it stands; stderr tells why, and what every thread was in."""
    try:
        teller = threading.Thread(target=_tell, args=[error], daemon=True)
        teller.start()
        teller.join(_TELLING_S)
    finally:
        leave(error.exit_status)


def leave(status: int) -> NoReturn:
    """End the process and those that it started, without the interpreter's own clearing up.

    This is for threads in calls that do not return: taking the interpreter down around them may
    crash, or wait for ever.
    """
    try:
        for child in psutil.Process().children(recursive=True):
            child.kill()
    finally:
        os._exit(status)


def _tell(error: SoloistError) -> None:
    log.critical("error: %s", error)
    faulthandler.dump_traceback(sys.__stderr__ or 2)
