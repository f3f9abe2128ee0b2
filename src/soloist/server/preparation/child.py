"""A process that reads one request after the other, within the memory and time that each may take.

Beyond its memory Python raises MemoryError, which is told, and libraries abort, which the server
sees. Beyond its time on the processor the system ends the process.
"""

import os
import pickle
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from soloist.server.preparation.jobs import JOBS, run
from soloist.server.preparation.limits import (
    CONVERSATION_BYTES,
    LARGE_BYTES,
    SLOW_CPU_S,
    cpu_s,
    memory_bytes,
    too_much_memory,
)
from soloist.server.preparation.prepared import Prepared
from soloist.server.preparation.wire import REQUEST, receive, send_message
from soloist.server.problems import Problem
from soloist.text.processor import Processor

# A child that has grown by more ends after its request, and its memory comes back.
_GROWN_BYTES = 32 * 2**20

# How far requests stand behind streams that run: short ones, long ones, slow ones.
_NICE, _LARGE_NICE, _SLOW_NICE = 10, 14, 19

_RSS_UNIT = 1 if sys.platform == "darwin" else 1024

_NAMES = list(JOBS)

Outcome = Prepared | bytes | Problem  # type: ignore[type-arg]


def serve(connection: socket.socket, processor: Processor, names: Sequence[str]) -> None:
    """Answer requests until the server closes `connection`, or a request leaves a lot behind."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(_NICE)
    limits, gives_way = _Limits(), _GivesWay()
    while (head := receive(connection, REQUEST.size)) is not None:
        length, kind = REQUEST.unpack(head)
        gives_way.watch(is_large=length > LARGE_BYTES)
        limits.begin(length)
        if (body := receive(connection, length)) is None:
            return
        outcome = _outcome(kind, body, processor, names)
        del body
        # Nobody may become less nice again: who has given way stays for conversations alone.
        may_stay = length > CONVERSATION_BYTES or not gives_way.has_given
        stays = may_stay and limits.grown_bytes <= _GROWN_BYTES
        send_message(connection, pickle.dumps((outcome, stays), pickle.HIGHEST_PROTOCOL))
        if not stays:
            return


class _GivesWay:
    """Makes this process wait for others, once a request is long or has taken a while.

    Attributes:
        has_given: whether it does.
    """

    def __init__(self) -> None:
        self.has_given = False
        signal.signal(signal.SIGPROF, lambda *_: self._give(_SLOW_NICE))

    def watch(self, *, is_large: bool) -> None:
        """Begin with a request."""
        if is_large:
            self._give(_LARGE_NICE)
        else:
            signal.setitimer(signal.ITIMER_PROF, SLOW_CPU_S)

    def _give(self, nice: int) -> None:
        if not self.has_given:
            self.has_given = True
            os.nice(nice - _NICE)


class _Limits:
    """What this process may take for a request; set anew only where that differs."""

    def __init__(self) -> None:
        self._size_bytes, self._resident = _size_bytes(), _resident_bytes()
        self._most_bytes = 0

    def begin(self, body_bytes: int) -> None:
        """Allow what a request of this length may take."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        most_s = int(used.ru_utime + used.ru_stime) + 1 + cpu_s(body_bytes)
        resource.setrlimit(resource.RLIMIT_CPU, (most_s, resource.RLIM_INFINITY))
        most_bytes = memory_bytes(max(body_bytes, LARGE_BYTES)) + _GROWN_BYTES
        # Elsewhere the bound holds for stacks and code as well, or for nothing.
        if most_bytes != self._most_bytes and sys.platform == "linux":
            self._most_bytes = most_bytes
            _, hard = resource.getrlimit(resource.RLIMIT_AS)
            most = self._size_bytes + most_bytes
            if hard != resource.RLIM_INFINITY:
                most = min(most, hard)
            resource.setrlimit(resource.RLIMIT_AS, (most, hard))

    @property
    def grown_bytes(self) -> int:
        """More than at the beginning, at the most so far."""
        return _resident_bytes() - self._resident


def _outcome(kind: int, body: bytearray, processor: Processor, names: Sequence[str]) -> Outcome:
    try:
        return run(JOBS[_NAMES[kind]], processor, names, body)
    except Problem as problem:
        return problem
    except MemoryError:
        return too_much_memory(len(body))


def _resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT


def _size_bytes() -> int:
    """Of the address space."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return 0
    return pages * resource.getpagesize()
