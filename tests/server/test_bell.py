"""Waking the event loop: nothing is lost, and many share one wake-up."""

import asyncio
import threading

import pytest

from soloist.server.bell import Bell


class CountedLoop:
    """Stands between a bell and the loop, and counts what wakes it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.num_wakes = 0
        self._loop = loop

    def call_soon_threadsafe(self, callback) -> None:
        self.num_wakes += 1
        self._loop.call_soon_threadsafe(callback)


def test_what_rings_together_wakes_once() -> None:
    async def ring() -> None:
        loop, heard = CountedLoop(asyncio.get_running_loop()), []
        bell = Bell(loop)
        for number in range(8):
            bell.ring(lambda number=number: heard.append(number))
        assert not heard
        await asyncio.sleep(0)
        assert heard == list(range(8))
        assert loop.num_wakes == 1
        bell.ring(lambda: heard.append(8))
        await asyncio.sleep(0)
        assert heard[-1] == loop.num_wakes + 6 == 8

    asyncio.run(ring())


def test_nothing_is_lost_between_threads() -> None:
    async def ring() -> None:
        heard, done = [], asyncio.Event()
        bell = Bell(asyncio.get_running_loop())

        def from_outside() -> None:
            for number in range(20_000):
                bell.ring(lambda number=number: heard.append(number))
            bell.ring(done.set)

        thread = threading.Thread(target=from_outside)
        thread.start()
        await asyncio.wait_for(done.wait(), 30)
        thread.join()
        assert heard == list(range(20_000))

    asyncio.run(ring())


def test_a_loop_that_has_ended_is_said_so() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    bell = Bell(loop)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            bell.ring(lambda: None)


def test_a_callback_that_fails_keeps_no_other_from_its_turn(caplog) -> None:
    async def ring() -> None:
        bell, heard = Bell(asyncio.get_running_loop()), []
        for callback in (lambda: heard.append(1), lambda: 1 / 0, lambda: heard.append(2)):
            bell.ring(callback)
        await asyncio.sleep(0)
        assert heard == [1, 2]
        assert "ZeroDivisionError" in caplog.text

    asyncio.run(ring())
