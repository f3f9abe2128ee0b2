"""What other processes did while something was measured, and processes that count beside it. Pure.

A figure of a CPU means little where another process had one of its cores.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from soloist.device import busy_seconds, usable_logical_cores

# Below, a machine counts as quiet: what an operating system does for itself.
QUIET_CORES = 0.1

# Ends with its parent, however that ends.
_COUNT = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


class Others:
    """Cores that others used since this was made, or between that and `stop`.

    The process itself and its descendants are no others.
    """

    def __init__(self) -> None:
        self._cores = usable_logical_cores()
        self._started = self._read()
        self._ended: tuple[float, float] | None = None

    def stop(self) -> None:
        """Look for the last time."""
        self._ended = self._read()

    @property
    def cores(self) -> float:
        """So many, rounded for reading; at most those that this process may use."""
        at_s, used_s = self._ended or self._read()
        took_s = max(1e-9, at_s - self._started[0])
        used = (used_s - self._started[1]) / took_s
        return round(min(len(self._cores), max(0.0, used)), 2)

    def _read(self) -> tuple[float, float]:
        """Now, and the seconds that others were busy, from any beginning."""
        return time.perf_counter(), busy_seconds(self._cores) - _own_seconds()


@contextmanager
def others_counted(num_busy: int = 0) -> Iterator[Others]:
    """Count what others do from now on, with so many processes of our own that only count."""
    with _busy(num_busy):
        others = Others()
        try:
            yield others
        finally:
            others.stop()


@contextmanager
def _busy(num: int) -> Iterator[None]:
    # A group of their own, as the processes of another user or terminal are scheduled.
    counting = [
        subprocess.Popen([sys.executable, "-S", "-c", _COUNT], start_new_session=True)  # noqa: S603
        for _ in range(num)
    ]
    try:
        if counting:
            time.sleep(0.3)
        yield
    finally:
        for process in counting:
            process.kill()
            process.wait()


def _own_seconds() -> float:
    """Of this process and its descendants, those that are over included."""
    times = os.times()
    total = times.user + times.system + times.children_user + times.children_system
    for child in psutil.Process().children(recursive=True):
        try:
            t = child.cpu_times()
        except psutil.Error:
            continue  # over meanwhile: it counts as ours once it was waited for
        total += (
            t.user + t.system + getattr(t, "children_user", 0) + getattr(t, "children_system", 0)
        )
    return total
