"""Tokens of one sequence on their way into its cache: passes that follow each other by a block.

A pass may attend in a layer once the pass before it has. So several passes can be under way, each
in a thread of its own, and a thread that lost its core holds up nobody but those behind it.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Literal

import torch

from soloist.reference.cache import KVCache, Scratch
from soloist.reference.device import LogitRows, Reference
from soloist.reference.memory import MOST_READERS
from soloist.reference.passes import Pass
from soloist.reference.threads import Threads

# How many passes may be under way for each of these threads.
_PASSES_PER_READER = 2


@dataclass(slots=True, eq=False)
class _Part:
    """A pass, and whether a thread is at it."""

    work: Pass
    is_taken: bool = False


class Reading:
    """Consecutive tokens of one sequence that are to be read; `Readers` go on with it.

    Args:
        reference: the model.
        cache: of the sequence; holds everything before `start`.
        token_ids: at least one.
        start: position of the first.
        pass_tokens: of every pass but the last one.
        rows: for which tokens logits are wanted; 'last' is the last of all.
    """

    def __init__(
        self,
        reference: Reference,
        cache: KVCache,
        token_ids: Sequence[int],
        start: int,
        pass_tokens: int,
        rows: Literal["last", "all"] = "last",
    ) -> None:
        self._reference, self._cache = reference, cache
        self._ids, self._start, self._pass_tokens, self._rows = token_ids, start, pass_tokens, rows
        self._num_begun = 0
        self._parts: deque[_Part] = deque()
        self._changed = threading.Condition()
        self._has_failed = False

    @property
    def is_over(self) -> bool:
        """Whether all passes are over, and were given out."""
        return self._num_begun == len(self._ids) and not self._parts

    @property
    def num_passes(self) -> int:
        """Passes that are not over."""
        left = len(self._ids) - self._num_begun
        return len(self._parts) + -(-left // self._pass_tokens)

    def finished(self) -> list[Pass]:
        """Passes that are over, in order; each is given out once."""
        done = []
        while self._parts and self._parts[0].work.is_over:
            done.append(self._parts.popleft().work)
        return done

    def work(self, scratch: Scratch, most_passes: int, until: float) -> Iterator[int]:
        """Compute parts of passes, in any number of threads at once, at least one in all.

        Yields the rows of its smallest product before each part, so that the thread can get ready.

        Args:
            scratch: the thread's own.
            most_passes: that may be under way.
            until: when to begin no further part, by `time.perf_counter`.
        """
        is_first = True
        while (part := self._claim(most_passes, until, is_first=is_first)) is not None:
            is_first, done = False, False
            try:
                yield self._reference.least_rows(part.work.num_tokens)
                part.work.advance(scratch)
                if part.work.logits is not None:
                    part.work.logits = part.work.logits.clone()  # the scratch is used again
                done = True
            finally:
                with self._changed:
                    part.is_taken, self._has_failed = False, self._has_failed or not done
                    self._changed.notify_all()

    def _claim(self, most_passes: int, until: float, *, is_first: bool) -> _Part | None:
        """A part for the calling thread, waiting for one; None where there is nothing to do."""
        with self._changed:
            while not self._has_failed:
                left_s = until - time.perf_counter()
                if left_s <= 0 and not is_first:
                    break
                if (part := self._ready(most_passes)) is not None:
                    part.is_taken = True
                    return part
                if left_s <= 0 or all(part.work.is_over for part in self._parts):
                    break
                self._changed.wait(left_s)
        return None

    def _ready(self, most_passes: int) -> _Part | None:
        """The last pass that can go on: so all are over at about the same time.

        None where all are taken or too close behind another.
        """
        works = [part.work for part in self._parts]
        may_begin = not works or works[-1].num_done > 0
        if may_begin and self._num_begun < len(self._ids) and len(works) < most_passes:
            return self._begin()
        for i in reversed(range(len(works))):
            is_behind = i == 0 or works[i - 1].is_over or works[i - 1].num_done > works[i].num_done
            if is_behind and not self._parts[i].is_taken and not works[i].is_over:
                return self._parts[i]
        return None

    def _begin(self) -> _Part:
        first = self._num_begun
        ids = self._ids[first : first + self._pass_tokens]
        self._num_begun += len(ids)
        is_last = self._num_begun == len(self._ids)
        rows: LogitRows = "none" if self._rows == "last" and not is_last else self._rows
        tensor = torch.tensor(ids, dtype=torch.int64, device=self._reference.device)
        part = _Part(self._reference.begin(tensor, self._start + first, self._cache, rows))
        self._parts.append(part)
        return part


class Readers:
    """Go on with readings: pass by pass with all threads, or each with a pass of its own.

    Args:
        reference: the model.
        threads: how many there are, and may be used now.
    """

    def __init__(self, reference: Reference, threads: Threads) -> None:
        self._threads, self._device = threads, reference.device
        self._scratch = self._new_scratch()
        self._pool: ThreadPoolExecutor | None = None

    def advance(self, reading: Reading, until: float) -> list[Pass]:
        """Go on until a pass is over or it is time, at least by one part; one reading at a time.

        Returns:
            The passes that are over since the last time, in order.
        """
        most, free = self._threads.most, self._threads.num_free
        # Of more cores, one that is lost is missed less: the threads that are left read together.
        # Many passes are quicker side by side in any case, since no thread waits within a block.
        is_long = reading.num_passes >= _PASSES_PER_READER * most
        is_quicker = most <= MOST_READERS and (is_long or free < most)
        if most > 1 and (is_quicker or not self._threads.may_vary):
            self._read_side_by_side(reading, until, min(most, MOST_READERS))
        else:
            self._read(reading, self._scratch[0], 1, free, until)
        if reading.is_over:
            self._scratch = self._new_scratch()
        return reading.finished()

    def _new_scratch(self) -> list[Scratch]:
        return [Scratch(self._device) for _ in range(min(self._threads.most, MOST_READERS))]

    def _read_side_by_side(self, reading: Reading, until: float, num_readers: int) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(num_readers - 1, "soloist-reader")
        passes = num_readers * _PASSES_PER_READER
        others = [
            self._pool.submit(self._read, reading, scratch, passes, 1, until)
            for scratch in self._scratch[1:]
        ]
        try:
            self._read(reading, self._scratch[0], passes, 1, until)
        finally:
            wait(others)
        for other in others:
            other.result()

    @torch.inference_mode()
    def _read(
        self, reading: Reading, scratch: Scratch, passes: int, num_threads: int, until: float
    ) -> None:
        for num_rows in reading.work(scratch, passes, until):
            self._threads.use(num_rows, num_threads)
