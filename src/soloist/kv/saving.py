"""Chunks of prompts on their way to a folder and back, beside the work.

A thread of its own writes, as long as anything waits. What waits is bounded, and what does not fit
is dropped: nobody waits for a drive. Other threads read ahead what a prompt will need next. Pure:
who offers a chunk says where its bytes are.
"""

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from soloist.device import usable_cores
from soloist.kv.chunks import PrefixChunks
from soloist.kv.folder import ChunkFolder, Damaged, Link, links

log = logging.getLogger(__name__)

# Bytes that may wait for the drive; a chunk that is larger is taken alone.
MOST_WAITING_BYTES = 512 * 2**20
# Threads that read ahead, and how many chunks: a core copies and checks some 1.5 GB/s.
_MOST_READERS, _MORE_AHEAD = 8, 2
# After the machine refused a file nothing is written for so long.
_PAUSE_S = 30.0
# Bytes after which the folder is listed anew, since other servers write there too, as a share of
# the bound.
_LISTED_SHARE = 8

Source = Callable[[], Sequence[memoryview]]


@dataclass(frozen=True, slots=True)
class SavedTokens:
    """What became of chunks and a folder since the start.

    Attributes:
        saved: tokens that were written.
        asked: tokens of prompts that were looked for, since the memory did not have them.
        loaded: of these, those that were found and used.
        dropped: tokens that were not written, for want of room in the queue or on the drive.
        damaged: files that were deleted because they were not sound.
        evicted: files that were deleted for others.
        num_bytes: of all files in the folder, as far as known.
        most_bytes: the bound.
    """

    saved: int = 0
    asked: int = 0
    loaded: int = 0
    dropped: int = 0
    damaged: int = 0
    evicted: int = 0
    num_bytes: int = 0
    most_bytes: int = 0


@dataclass(slots=True)
class _Job:
    link: Link
    before: Link | None
    source: Source
    num_bytes: int


class Trail:
    """The chunks of one prompt as a folder names them, by the position where each begins.

    Attributes:
        saved_to: up to there all chunks are saved, or wait for it.
        ahead: chunks that are being read.
    """

    def __init__(self, prompt_ids: Sequence[int], chunks: PrefixChunks) -> None:
        places = list(chunks.whole(0, len(prompt_ids)))
        cut = (prompt_ids[start:stop] for start, stop in places)
        starts = (start for start, _ in places)
        self._links = dict(zip(starts, links(cut), strict=True))
        self._by_key = {link.key: link for link in self._links.values()}
        self._num_tokens = len(prompt_ids)
        self.saved_to = 0
        self.ahead: dict[int, Future[memoryview | None]] = {}

    def __getitem__(self, start: int) -> Link:
        """The whole chunk that begins there."""
        return self._links[start]

    def between(self, start: int, stop: int) -> list[int]:
        """Where whole chunks begin that lie there; `start` is a boundary."""
        found = []
        while (link := self._links.get(start)) and start + len(link.tokens) <= stop:
            found.append(start)
            start += len(link.tokens)
        return found

    def before(self, start: int) -> Link | None:
        """The chunk that ends there; None at the prompt's beginning."""
        return self._by_key.get(self._links[start].parent)

    def usable(self, start: int) -> list[int]:
        """Chunks from `start` on that may be taken from a folder, by where they begin.

        The prompt's last token is read again: it gives the logits.
        """
        return self.between(start, self._num_tokens - 1)


class SavedChunks:
    """What an executor has of a folder.

    All methods are called from the executor's thread, but `counts` and `flush`.

    Args:
        folder: where chunks lie.
        most_bytes: of all files there.
        chunks: where prompts are cut.
        bytes_of: of a chunk with so many tokens.
        make_buffer: memory for so many bytes, into which a chunk is read.
    """

    def __init__(
        self,
        folder: ChunkFolder,
        most_bytes: int,
        chunks: PrefixChunks,
        bytes_of: Callable[[int], int],
        make_buffer: Callable[[int], memoryview] = lambda size: memoryview(bytearray(size)),
    ) -> None:
        self.folder, self._most_bytes = folder, most_bytes
        self._chunks, self._bytes_of, self._make_buffer = chunks, bytes_of, make_buffer
        self._counts, self._lock = SavedTokens(most_bytes=most_bytes), threading.Condition()
        self._jobs: deque[_Job | Link] = deque()
        self._waiting: set[bytes] = set()
        self._waiting_bytes, self._paused_until = 0, 0.0
        self._since_listed = 0  # bytes that were written
        num_readers = min(_MOST_READERS, usable_cores())
        self._readers = ThreadPoolExecutor(num_readers, "soloist-kept")
        self._most_ahead = num_readers + _MORE_AHEAD
        self._is_writing = False  # there is a thread for it
        self._list(0)

    @property
    def counts(self) -> SavedTokens:
        """May be asked from any thread."""
        return self._counts

    # --- saving -----------------------------------------------------------------------------------

    def trail(self, prompt_ids: Sequence[int], num_in_memory: int) -> Trail:
        """A prompt's chunks, of which the memory has those of so many tokens."""
        self._count(asked=max(0, len(prompt_ids) - 1 - num_in_memory))
        return Trail(prompt_ids, self._chunks)

    def catch_up(
        self, trail: Trail, num_in_memory: int, make_source: Callable[[int], Source | None]
    ) -> None:
        """Save what the memory has of a prompt's beginning, as far as it is not saved yet.

        Args:
            trail: of the prompt.
            num_in_memory: tokens of the beginning that the memory has.
            make_source: as for `save`, given where a chunk begins.
        """
        places, missing = trail.between(0, num_in_memory), list[int]()
        # A file is written only behind those before it, and deleted before these.
        while places and not self.folder.has(trail[places[-1]]):
            missing.append(places.pop())
        if places:
            last = trail[places[-1]]
            trail.saved_to = places[-1] + len(last.tokens)
            self._append(last)
        for start in reversed(missing):
            self.save(trail, start, partial(make_source, start))

    def save(self, trail: Trail, start: int, make_source: Callable[[], Source | None]) -> None:
        """Save a chunk once the writer comes to it, or drop it now.

        Args:
            trail: of a prompt that has the chunk.
            start: where the chunk begins.
            make_source: called where there is room; what it returns gives the bytes, in the
                writer's thread. None where there is no memory for them.
        """
        link, stop = trail[start], start + len(trail[start].tokens)
        if stop <= trail.saved_to:
            return
        with self._lock:
            is_waiting = link.key in self._waiting
        if is_waiting or (trail.saved_to == start and self.folder.has(link)):
            trail.saved_to = stop
            return
        size = self._bytes_of(len(link.tokens))
        with self._lock:
            is_full = self._waiting_bytes and self._waiting_bytes + size > MOST_WAITING_BYTES
        is_off = time.monotonic() < self._paused_until or size > self._most_bytes
        # Behind a chunk that is not saved none would ever be found.
        is_dropped = is_full or is_off or trail.saved_to < start
        if is_dropped or (source := make_source()) is None:
            self._count(dropped=len(link.tokens))
            return
        job = _Job(link, trail.before(start), source, size)
        with self._lock:
            self._waiting.add(link.key)
            self._waiting_bytes += size
        self._append(job)
        trail.saved_to = stop

    def _append(self, job: "_Job | Link") -> None:
        with self._lock:
            self._jobs.append(job)
            was_writing, self._is_writing = self._is_writing, True
        if not was_writing:
            threading.Thread(target=self._write_all, name="soloist-saving", daemon=True).start()

    def _count(self, **more: int) -> None:
        with self._lock:
            old = self._counts
            self._counts = replace(old, **{k: getattr(old, k) + v for k, v in more.items()})

    def _write_all(self) -> None:
        """Until nothing waits: a thread that stayed would hold the memory of whoever saves."""
        while True:
            with self._lock:
                if not self._jobs:
                    self._is_writing = False
                    return
                job = self._jobs[0]
            try:
                if isinstance(job, Link):
                    self.folder.touch(job)
                else:
                    self._write(job)
            except Exception:  # one chunk is lost, and later ones are not
                log.exception("a chunk of a prompt was not saved")
            finally:
                with self._lock:
                    self._jobs.popleft()
                    if not isinstance(job, Link):
                        self._waiting.discard(job.link.key)
                        self._waiting_bytes -= job.num_bytes
                    self._lock.notify_all()
                del job  # the memory that it holds

    def _write(self, job: _Job) -> None:
        num_tokens = len(job.link.tokens)
        is_off = time.monotonic() < self._paused_until
        if is_off or not (job.before is None or self.folder.has(job.before)):
            self._count(dropped=num_tokens)
            return
        is_over = self._counts.num_bytes + job.num_bytes > self._most_bytes
        if is_over or self._since_listed > self._most_bytes // _LISTED_SHARE:
            self._list(job.num_bytes)
        try:
            written = self.folder.write(job.link, job.source())
        except OSError as error:
            self._paused_until = time.monotonic() + _PAUSE_S
            self._count(dropped=num_tokens)
            why = "the disk is full" if error.errno == errno.ENOSPC else str(error)
            log.warning(
                "%s: kept prompts are not saved (%s); trying again in %.0f s",
                self.folder.root, why, _PAUSE_S,
            )  # fmt: skip
            return
        self._since_listed += written
        self._count(saved=num_tokens, num_bytes=written)

    def _list(self, needed_bytes: int) -> None:
        total, deleted = self.folder.make_room(needed_bytes, self._most_bytes)
        self._since_listed = 0
        with self._lock:
            self._counts = replace(
                self._counts, num_bytes=total, evicted=self._counts.evicted + deleted
            )

    # --- loading ----------------------------------------------------------------------------------

    def load(self, trail: Trail, start: int) -> memoryview | None:
        """The bytes of the chunk that begins at `start`; None where there is no sound file.

        Waits for the drive, and lets what comes next be read meanwhile.
        """
        for begin in [begin for begin in trail.ahead if begin < start]:
            trail.ahead.pop(begin).cancel()
        self._look_ahead(trail, start)
        ahead = trail.ahead.pop(start, None)
        if ahead is None or (data := ahead.result()) is None:
            self.forget(trail)
            return None
        link = trail[start]
        self._count(loaded=len(link.tokens))
        trail.saved_to = max(trail.saved_to, start + len(link.tokens))
        self._append(link)
        self._look_ahead(trail, start + len(link.tokens))
        return data

    def _look_ahead(self, trail: Trail, start: int) -> None:
        for begin in trail.usable(start)[: self._most_ahead]:
            if begin not in trail.ahead:
                if not self.folder.has(trail[begin]):
                    return
                trail.ahead[begin] = self._readers.submit(self._read, trail[begin])

    def forget(self, trail: Trail) -> None:
        """Nobody needs what was read ahead any more."""
        for future in trail.ahead.values():
            future.cancel()
        trail.ahead.clear()

    def _read(self, link: Link) -> memoryview | None:
        try:
            into = self._make_buffer(self._bytes_of(len(link.tokens)))
            return into if self.folder.read(link, into) else None
        except Damaged as damaged:
            # Its text: whoever keeps the record would keep all that the traceback holds.
            log.warning("a saved chunk of a prompt was damaged and is deleted: %s", str(damaged))
            self._count(damaged=1)
        except Exception:  # such as no memory: the prompt is read as if nothing were saved
            log.exception("a saved chunk of a prompt cannot be read")
        return None

    # --- the end ----------------------------------------------------------------------------------

    def flush(self, within_s: float) -> bool:
        """Wait until all that was to be saved is written, or dropped; whether it is."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._jobs, within_s)
