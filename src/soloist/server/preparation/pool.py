"""The server's side of preparation: hands bodies to children and waits, never longer than bounded.

What a few milliseconds bound is done at once. Other short bodies go to children that stay. A
request that turns out to be slow keeps its child, and its place is given to the next one. Few long
bodies are read at once. Conversations go to children of their own, which stay however slow they
were: an agent sends its conversation again with every step, and a child knows the tokens of what it
has read.
"""

import asyncio
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

from soloist.device import usable_cores
from soloist.errors import PreparationFailed
from soloist.server.preparation.jobs import JOBS, Job, run
from soloist.server.preparation.limits import (
    CONVERSATION_BYTES,
    LARGE_BYTES,
    QUICK_BYTES,
    SLOW_WALL_S,
    ended_early,
    too_much_time,
    wall_s,
)
from soloist.server.preparation.prepared import Prepared, Wanted
from soloist.server.preparation.quick import QuickProcessor, TakesLonger
from soloist.server.preparation.wire import (
    COMMAND,
    FORK,
    KILL,
    LENGTH,
    READY,
    REQUEST,
    receive,
    send_message,
)
from soloist.server.problems import Problem
from soloist.settings import environment_of_preparation
from soloist.text.processor import Processor

# At once: of short bodies, of those that turned out to be slow, and of long ones.
_MOST_SHORT, _MOST_SLOW, _MOST_LONG = 4, 12, 2
# Children that wait for conversations: each may hold some memory.
_MOST_WAITING = 4

_START_S = 60.0
_END_S = 2.0

_NUMBERS = {name: number for number, name in enumerate(JOBS)}


class _Child:
    """One process that reads requests, as the event loop sees it."""

    def __init__(self, number: int, connection: socket.socket) -> None:
        self.number, self.connection = number, connection

    async def ask(self, kind: int, parts: Sequence[bytes], length: int) -> tuple[object, bool]:
        """Send a body; what comes of it, and whether the child stays. None if it has ended."""
        loop, connection = asyncio.get_running_loop(), self.connection
        try:
            head = REQUEST.pack(length, kind)
            if length <= LARGE_BYTES:
                await loop.sock_sendall(connection, b"".join([head, *parts]))
            else:
                await loop.sock_sendall(connection, head)
                for part in parts:
                    await loop.sock_sendall(connection, part)
            return await self._told()
        except (ConnectionError, EOFError):
            return None, False

    async def _told(self) -> tuple[object, bool]:
        loop, held = asyncio.get_running_loop(), bytearray()
        length = 0
        while len(held) < LENGTH.size + length or not length:
            if not (more := await loop.sock_recv(self.connection, 2**18)):
                raise EOFError
            held += more
            if not length and len(held) >= LENGTH.size:
                (length,) = LENGTH.unpack_from(held)
        told = pickle.loads(memoryview(held)[LENGTH.size :])  # noqa: S301 - from our own process
        return cast("tuple[object, bool]", told)


class Preparation:
    """Processes that read requests.

    Args:
        processor: of the model, as this process has it.
        names: of the model, as clients may write it.
    """

    def __init__(self, processor: Processor, names: tuple[str, ...]) -> None:
        self._files, self._names = processor.files, names
        self._quick = QuickProcessor(processor)
        self._lock = threading.Lock()
        self._idle: list[_Child] = []
        self._idle_conversations: list[_Child] = []
        self._num_children = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        # Several on one core would together take as much of it as the streams.
        self._short = asyncio.Semaphore(min(_MOST_SHORT, usable_cores()))
        self._num_slow = 0
        self._long = asyncio.Semaphore(_MOST_LONG)
        self._closed = threading.Event()

    def start(self) -> None:
        """Start the fork server and wait until it is ready; blocks.

        Raises:
            PreparationFailed: it does not start.
        """
        with self._lock:
            is_running = self._process is not None and self._process.poll() is None
            if is_running or self._closed.is_set():
                return
            if self._control is not None:
                self._control.close()
            ours, theirs = socket.socketpair()
            module = "soloist.server.preparation.fork_server"
            command = [sys.executable, "-P", "-m", module, str(theirs.fileno())]
            self._process = subprocess.Popen(  # noqa: S603 - this very program
                command, pass_fds=[theirs.fileno()], env=environment_of_preparation()
            )
            theirs.close()
            if self._closed.is_set():  # meanwhile
                self._process.kill()
            try:
                _load(self._process, ours, pickle.dumps((self._files, self._names)))
            except PreparationFailed:
                ours.close()
                self._process.kill()
                raise
            self._control = ours

    async def prepare(self, job: Job[Wanted], parts: Sequence[bytes]) -> Prepared[Wanted] | bytes:
        """Read a request.

        Args:
            job: its kind.
            parts: of its body, in order.

        Raises:
            Problem: it cannot be answered, or takes too much.
            PreparationFailed: there is no process to read it.
        """
        length = sum(map(len, parts))
        if length <= QUICK_BYTES and (self._quick.renders or not job.has_template):
            with suppress(TakesLonger):
                return run(job, self._quick, self._names, b"".join(parts))
        if length > LARGE_BYTES:
            async with self._long:
                told = await self._by_any(job, parts, length)
        else:
            told = await self._in_turn(job, parts, length)
        if isinstance(told, Problem):
            raise told
        return cast("Prepared[Wanted] | bytes", told)

    async def _in_turn(self, job: Job[Any], parts: Sequence[bytes], length: int) -> object:
        """Read a short body; one that is slow leaves its place to the next."""
        await self._short.acquire()
        is_slow = False

        def leave_early() -> None:
            """Go on among the slow ones, if there is room."""
            nonlocal is_slow
            if self._num_slow < _MOST_SLOW:
                is_slow = True
                self._num_slow += 1
                self._short.release()

        slow = asyncio.get_running_loop().call_later(SLOW_WALL_S, leave_early)
        try:
            return await self._by_any(job, parts, length)
        finally:
            slow.cancel()
            if is_slow:
                self._num_slow -= 1
            else:
                self._short.release()

    async def _by_any(self, job: Job[Any], parts: Sequence[bytes], length: int) -> object:
        """Read a body by a child that waits for such ones, if one does; else by a new one."""
        has_conversations = length > CONVERSATION_BYTES
        idle = self._idle_conversations if has_conversations else self._idle
        told = await self._ask(idle.pop(), idle, job, parts, length) if idle else None
        if told is not None:
            return told
        # There was none, or it had ended before.
        child, began = await self._fork(), time.monotonic()
        told = await self._ask(child, idle, job, parts, length)
        return ended_early(length, time.monotonic() - began) if told is None else told

    async def _ask(
        self, child: _Child, idle: list[_Child], job: Job[Any], parts: Sequence[bytes], length: int
    ) -> object:
        """What came of a body; None where the child has ended, which else waits among `idle`."""
        stays = False
        try:
            async with asyncio.timeout(wall_s(length)):
                told, stays = await child.ask(_NUMBERS[job.name], parts, length)
        except TimeoutError:
            told = too_much_time(length)
        finally:
            # Also where the client has gone or the server ends: nobody waits for it any more.
            has_place = idle is self._idle or len(idle) < _MOST_WAITING
            if stays and has_place and not self._closed.is_set():
                idle.append(child)
            else:
                self._end(child)
        return told

    async def _fork(self) -> _Child:
        for _ in range(2):
            ours, theirs = socket.socketpair()
            number = self._num_children
            self._num_children += 1
            try:
                assert self._control is not None, "it was started"
                socket.send_fds(self._control, [COMMAND.pack(FORK, number)], [theirs.fileno()])
            except OSError:  # it has ended; whatever ended it, a new one is as good
                ours.close()
                await asyncio.to_thread(self.start)
                continue
            finally:
                theirs.close()
            ours.setblocking(False)
            return _Child(number, ours)
        raise PreparationFailed(None)

    def _end(self, child: _Child) -> None:
        child.connection.close()
        if self._control is None:
            return
        with suppress(OSError):
            self._control.sendall(COMMAND.pack(KILL, child.number))

    def close(self) -> None:
        """End every process; blocks for a moment. Also while `start` waits, from another thread."""
        self._closed.set()
        process, control = self._process, self._control
        if process is None:
            return
        for idle in (self._idle, self._idle_conversations):
            for child in idle:
                child.connection.close()
            idle.clear()
        if control is None:
            process.kill()  # it is still loading
        else:
            control.close()  # the fork server ends its children, and itself
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _load(process: subprocess.Popen[bytes], control: socket.socket, files: bytes) -> None:
    """Wait until a fork server has loaded what it is told to.

    Raises:
        PreparationFailed: it has not.
    """
    control.settimeout(_START_S)
    try:
        send_message(control, files)
        is_ready = receive(control, len(READY)) is not None
    except OSError as error:
        raise PreparationFailed(None) from error
    if not is_ready:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        raise PreparationFailed(process.returncode)
    control.settimeout(_END_S)
