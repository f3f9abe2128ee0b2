"""Which request does what next. Pure: requests are any hashable keys, no clock, no device.

A request waits, gets a batch slot, reads its prompt chunk by chunk, and decodes with the others
until it leaves. Prompts are read in turns, and while some decode, a burst of rounds follows every
chunk: so a running stream pauses for one chunk at most, and a short prompt overtakes a long one.

Requests take memory as they grow. When it is used up, the one that came last is preempted: it
goes back to the head of the queue, and nobody joins until a request has left. So the first
one always goes on.
"""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

# Rounds between two chunks of other requests' prompts.
BURST_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Join(Generic[Key]):
    """Try to open this request, or to resume it; tell `joined` or `blocked`."""

    key: Key


@dataclass(frozen=True, slots=True)
class Read(Generic[Key]):
    """Read a chunk of this request's prompt; tell `was_read` after the last one, or `exhausted`."""

    key: Key


@dataclass(frozen=True, slots=True)
class Decode(Generic[Key]):
    """Run rounds for these requests, at most `most` if it is not None, or until there is news.

    Or tell `exhausted`.
    """

    keys: tuple[Key, ...]
    most: int | None


Step = Join[Key] | Read[Key] | Decode[Key]


class Scheduler(Generic[Key]):
    """The queue, the batch and whose turn it is.

    Args:
        max_running: requests that may be open at once.
        most_waiting: further ones that may wait.
    """

    def __init__(self, max_running: int, most_waiting: int) -> None:
        self.max_running, self.most_waiting = max_running, most_waiting
        self._waiting: deque[Key] = deque()
        self._reading: deque[Key] = deque()
        self._decoding: list[Key] = []
        self._running: list[Key] = []  # in the order they came
        self._is_blocked = self._decode_is_due = False

    @property
    def num_waiting(self) -> int:
        """Requests without a batch slot."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests with a batch slot."""
        return len(self._running)

    @property
    def is_full(self) -> bool:
        """Whether nothing more may be submitted."""
        return self.num_waiting + self.num_running >= self.max_running + self.most_waiting

    @property
    def can_join(self) -> bool:
        """Whether the next step is somebody's joining."""
        return bool(self._waiting) and self.num_running < self.max_running and not self._is_blocked

    def submit(self, key: Key) -> None:
        """Append a request to the queue; the caller asked `is_full`."""
        assert not self.is_full, "the caller refuses what does not fit"
        self._waiting.append(key)

    def joined(self, key: Key) -> None:
        """The first in the queue has a batch slot and will read its prompt."""
        assert self._waiting[0] == key, "requests join in the order they came"
        self._waiting.popleft()
        self._reading.append(key)
        self._running.append(key)

    def blocked(self) -> None:
        """There is no memory for the first in the queue until a request leaves.

        Others do not overtake it: a large request would wait for ever.
        """
        assert self.num_running, "a request that fits the context fits an empty device"
        self._is_blocked = True

    def exhausted(self) -> Key:
        """There is no memory for the next step: the request that is to be preempted.

        It waits, before all others, and joins again once a request has left.
        """
        assert self.num_running > 1, "a request that fits the context fits an empty device"
        key = self._running.pop()
        (self._reading if key in self._reading else self._decoding).remove(key)
        self._waiting.appendleft(key)
        self._is_blocked = True
        self._decode_is_due = True  # streams that wait have not gone on
        return key

    def was_read(self, key: Key) -> None:
        """The prompt is read, and the first token known; or all that was before preemption."""
        self._reading.remove(key)
        self._decoding.append(key)

    def leave(self, key: Key) -> None:
        """A request is over, wherever it is."""
        if key in self._waiting:
            was_first = self._waiting[0] == key
            self._waiting.remove(key)
            self._is_blocked = self._is_blocked and not was_first
            return
        (self._reading if key in self._reading else self._decoding).remove(key)
        self._running.remove(key)
        self._is_blocked = False

    def next(self) -> Step[Key] | None:
        """What to do now; None if there is nothing to do."""
        if self.can_join:
            return Join(self._waiting[0])
        if self._reading and not (self._decoding and self._decode_is_due):
            self._decode_is_due = True
            key = self._reading.popleft()
            self._reading.append(key)
            return Read(key)
        self._decode_is_due = False
        if self._decoding:
            return Decode(tuple(self._decoding), BURST_ROUNDS if self._reading else None)
        return None
