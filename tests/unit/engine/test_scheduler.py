"""The scheduler against a model of itself: random requests come, wait, read, decode and leave."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from soloist.engine.scheduler import BURST_ROUNDS, Decode, Join, Read, Scheduler

COLUMNS, WAITING, ROOM = 3, 4, 10


class Requests(RuleBasedStateMachine):
    """A device of `ROOM` positions; a request takes some at first, and one more with each step.

    It is over when it has as many as it may have. Requests are numbered in the order they came.
    """

    def __init__(self):
        super().__init__()
        self.scheduler = Scheduler(COLUMNS, WAITING)
        self.number = 0
        self.size: dict[int, int] = {}
        self.most: dict[int, int] = {}
        self.chunks: dict[int, int] = {}
        self.waiting: list[int] = []
        self.reading: list[int] = []
        self.decoding: list[int] = []
        self.steps_since_decode = 0
        self.reads_of: dict[int, int] = {}

    @property
    def memory(self) -> int:
        return ROOM - sum(self.size[r] for r in self.reading + self.decoding)

    @rule(size=st.integers(1, ROOM), more=st.integers(0, ROOM), chunks=st.integers(1, 4))
    def submit(self, size, more, chunks):
        total = len(self.waiting + self.reading + self.decoding)
        assert self.scheduler.is_full == (total >= COLUMNS + WAITING)
        if self.scheduler.is_full:
            return
        self.number += 1
        self.size[self.number], self.chunks[self.number] = size, chunks
        self.most[self.number] = min(size + more, ROOM)
        self.reads_of[self.number] = 0
        self.scheduler.submit(self.number)
        self.waiting.append(self.number)

    @precondition(lambda self: self.waiting + self.reading + self.decoding)
    @rule(data=st.data())
    def cancel(self, data):
        self._leave(data.draw(st.sampled_from(self.waiting + self.reading + self.decoding)))

    def _leave(self, key):
        self.scheduler.leave(key)
        for place in (self.waiting, self.reading, self.decoding):
            if key in place:
                place.remove(key)

    def is_exhausted(self, keys) -> bool:
        """Whether there is no memory for these to grow; then the one that came last has to go."""
        grown = [key for key in keys if self.size[key] < self.most[key]]
        if self.memory >= len(grown):
            for key in grown:
                self.size[key] += 1
            return False
        running = self.reading + self.decoding
        preempted = self.scheduler.exhausted()
        assert preempted == max(running)
        (self.reading if preempted in self.reading else self.decoding).remove(preempted)
        self.waiting.insert(0, preempted)
        self.chunks[preempted], self.reads_of[preempted] = self.size[preempted], 0
        assert not self.scheduler.can_join, "until somebody leaves"
        return True

    @rule(data=st.data())
    def step(self, data):
        step = self.scheduler.next()
        running = self.reading + self.decoding
        match step:
            case Join(key):
                assert key == self.waiting[0], "first come, first served"
                assert len(running) < COLUMNS
                if self.size[key] > self.memory:
                    self.scheduler.blocked()
                    assert not self.scheduler.can_join
                    return
                self.scheduler.joined(key)
                self.reading.append(self.waiting.pop(0))
            case Read(key):
                assert key in self.reading
                if self.is_exhausted([key]):
                    return
                others = [self.reads_of[r] for r in self.reading if r != key]
                assert not self.decoding or self.steps_since_decode == 0, "streams pause once"
                self.steps_since_decode += 1
                self.chunks[key] -= 1
                self.reads_of[key] += 1
                assert all(self.reads_of[key] <= r + 4 for r in others)
                if not self.chunks[key]:
                    self.scheduler.was_read(key)
                    self.reading.remove(key)
                    self.decoding.append(key)
                    self.steps_since_decode = 1
            case Decode(keys, most):
                assert list(keys) == self.decoding
                assert most == (BURST_ROUNDS if self.reading else None)
                if self.is_exhausted(keys):
                    return
                self.steps_since_decode = 0
                if data.draw(st.booleans()):
                    self._leave(data.draw(st.sampled_from(self.decoding)))
            case None:
                assert not running
                assert not self.waiting, "nobody waits beside an idle device"

    @invariant()
    def counts(self):
        assert self.scheduler.num_waiting == len(self.waiting)
        assert self.scheduler.num_running == len(self.reading) + len(self.decoding)

    def teardown(self):
        """Without further requests everything ends."""
        for _ in range(2000):
            step = self.scheduler.next()
            match step:
                case Join(key):
                    if self.size[key] > self.memory:
                        self.scheduler.blocked()
                    else:
                        self.scheduler.joined(key)
                        self.reading.append(self.waiting.pop(0))
                case Read(key):
                    if self.is_exhausted([key]):
                        continue
                    self.chunks[key] -= 1
                    if self.chunks[key] <= 0:
                        self.scheduler.was_read(key)
                        self.reading.remove(key)
                        self.decoding.append(key)
                case Decode(keys, _):
                    if not self.is_exhausted(keys) and all(
                        self.size[k] == self.most[k] for k in keys
                    ):
                        self._leave(keys[0])
                case None:
                    return
        raise AssertionError("requests are left over")


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


def test_a_short_prompt_overtakes_a_long_one() -> None:
    scheduler = Scheduler(2, 0)
    for key in ("long", "short"):
        scheduler.submit(key)
        assert scheduler.next() == Join(key)
        scheduler.joined(key)
    assert [scheduler.next() for _ in range(3)] == [Read("long"), Read("short"), Read("long")]


def test_a_large_request_is_not_overtaken() -> None:
    scheduler = Scheduler(3, 3)
    for key in ("running", "large", "small"):
        scheduler.submit(key)
    scheduler.joined("running")
    scheduler.was_read("running")
    scheduler.blocked()
    assert scheduler.next() == Decode(("running",), None)
    assert not scheduler.can_join
    scheduler.leave("small")
    assert not scheduler.can_join
    scheduler.leave("running")
    assert scheduler.next() == Join("large")


def test_whoever_waits_behind_a_cancelled_one_may_join() -> None:
    scheduler = Scheduler(3, 3)
    for key in ("running", "large", "small"):
        scheduler.submit(key)
    scheduler.joined("running")
    scheduler.blocked()
    scheduler.leave("large")
    assert scheduler.next() == Join("small")


def test_whoever_came_last_is_preempted_and_comes_back_first() -> None:
    scheduler = Scheduler(3, 3)
    for key in ("first", "second", "third", "fourth"):
        scheduler.submit(key)
    for key in ("first", "second", "third"):
        scheduler.joined(key)
    scheduler.was_read("third")
    assert scheduler.exhausted() == "third"
    assert scheduler.exhausted() == "second"
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 3)
    assert scheduler.next() == Read("first")
    scheduler.leave("first")
    assert scheduler.next() == Join("second")
    scheduler.joined("second")
    assert scheduler.next() == Join("third")
