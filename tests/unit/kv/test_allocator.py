"""Allocations against simulated memories: every page holds what its position needs, always."""

import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from soloist.kv.allocator import KvAllocator, SequenceAllocation
from soloist.kv.chunks import PrefixChunks

PAGE = 64
ROWS, PAGES, LONGEST = 3, 13, 11
# A page's content: all that its sequence has up to its end.
Content = tuple[int, ...]


class Memories:
    """A pool and the host's pages; what is fetched arrives as late as it may."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.pool: dict[int, Content] = {}
        self.host: dict[int, Content] = {}
        self.has_memory = True
        self._coming: deque[tuple[int, int]] = deque()

    def offload(self, pages: Sequence[int], host_pages: Sequence[int]) -> bool:
        if self.has_memory:
            self.join()
            for page, host_page in zip(pages, host_pages, strict=True):
                self.host[host_page] = self.pool[page]
        return self.has_memory

    def fetch(self, host_pages: Sequence[int], pages: Sequence[int]) -> None:
        self._coming.extend(zip(host_pages, pages, strict=True))
        for page in pages:
            self.pool[page] = (-1,)

    def join(self) -> None:
        while self._coming:
            host_page, page = self._coming.popleft()
            self.pool[page] = self.host[host_page]


@dataclass(eq=False)
class Asked:
    ids: list[int]  # prompt and answer, a number for every page
    prompt_tokens: int
    allocation: SequenceAllocation
    num_there: int = 0  # positions


class Pool:
    """Sequences come, read, grow and go; the one that came last is preempted for the others."""

    def __init__(self, seed: int, num_host_pages: int) -> None:
        self.rng = random.Random(seed)
        self.memories = Memories(num_host_pages)
        self.allocator = KvAllocator(
            ROWS, PAGES, PrefixChunks(PAGE, 2 * PAGE),
            keeps_prefixes=True, host=self.memories,
        )  # fmt: skip
        self.open: list[Asked] = []
        self.happened: Counter[str] = Counter()
        self.stems = [[self.rng.randrange(2) for _ in range(LONGEST)] for _ in range(3)]

    def run(self, steps: int) -> None:
        actions = [self.begin, self.step, self.look_ahead, self.close, self.run_out]
        for _ in range(steps):
            (action,) = self.rng.choices(actions, [8, 60, 6, 4, 0.3])
            if self.open or action == self.begin:
                action()
            self.every_page_is_somewhere_once()
        for sequence in self.open:
            self.allocator.free(sequence.allocation)
        assert self.allocator.tiers.num_available == PAGES, "nothing is in use any more"

    def begin(self) -> None:
        ids = self.rng.choice(self.stems)[: self.rng.randint(1, LONGEST)]
        prompt_tokens = (len(ids) - 1) * PAGE + self.rng.randint(1, PAGE)
        ids += [2] * min(self.rng.randint(0, 4), LONGEST - len(ids))
        tokens = [i for i in ids for _ in range(PAGE)]
        first = min(prompt_tokens + 20, len(ids) * PAGE)
        allocation = self.allocator.allocate(tokens[:prompt_tokens], first, len(ids) * PAGE)
        if allocation is None:
            assert self.open, "a sequence alone has pages"
            self.happened["refused"] += 1
            return
        assert allocation.num_cached < prompt_tokens
        assert allocation.num_joined == allocation.num_cached - sum(
            len(n.tokens) for n in allocation.behind
        )
        self.open.append(Asked(ids, prompt_tokens, allocation, allocation.num_joined))

    def has_pages(self, sequence: Asked, positions: int) -> bool:
        """Whether it has; otherwise the youngest goes."""
        if self.allocator.reserve(sequence.allocation, positions):
            return True
        assert len(self.open) > 1, "a sequence alone has pages"
        self.happened["preempted"] += 1
        self.allocator.free(self.open.pop().allocation)
        return False

    def step(self) -> None:
        sequence, count = self.rng.choice(self.open), self.rng.randint(1, 100)
        allocation, start = sequence.allocation, sequence.num_there
        if allocation.behind:
            if self.has_pages(sequence, 0):
                sequence.num_there += self.allocator.next_chunk(allocation)
            return
        is_read = start >= sequence.prompt_tokens
        end = start + count
        if not is_read:  # a pass is one chunk or several
            end = start
            for _ in range(self.rng.randint(1, 3)):
                end += self.allocator.chunks.width(end)
        stop = min(end, len(sequence.ids) * PAGE if is_read else sequence.prompt_tokens)
        if stop == start or not self.has_pages(sequence, stop):
            return
        if not is_read:
            self.allocator.tiers.join()
            chunk = [sequence.ids[p // PAGE] for p in range(start, stop)]
            whole = chunk if stop < sequence.prompt_tokens else chunk[:-1]
            if num_adopted := self.allocator.adopt(allocation, start, whole):
                self.happened["adopted" if num_adopted == stop - start else "adopted a part"] += 1
                sequence.num_there += num_adopted
                self.check(sequence)
                return
        self.check(sequence)
        for page in range(start // PAGE, (stop - 1) // PAGE + 1):
            assert allocation.pages[page] in allocation.owned, "nobody writes to what is cached"
            self.memories.pool[allocation.pages[page]] = tuple(sequence.ids[: page + 1])
        if not is_read:
            self.allocator.cache(allocation, start, chunk)
        sequence.num_there = stop
        self.check(sequence)

    def check(self, sequence: Asked) -> None:
        for number in range(-(-sequence.num_there // PAGE)):
            held = self.memories.pool[sequence.allocation.pages[number]]
            assert held == tuple(sequence.ids[: number + 1])

    def look_ahead(self) -> None:
        some = self.rng.sample(self.open, self.rng.randint(1, len(self.open)))
        some = [s for s in some if not s.allocation.behind]
        free, lacking = self.allocator.pages.num_free, 0
        for s in some:
            lacking += len(s.ids) - len(s.allocation.pages)
        if self.allocator.look_ahead(
            [s.allocation for s in some], [len(s.ids) * PAGE for s in some]
        ):
            assert self.allocator.pages.num_free == free - lacking
            for s in some:
                self.launch(s)
        else:
            assert self.allocator.pages.num_free == free

    def launch(self, sequence: Asked) -> None:
        """A long launch writes to pages that were taken ahead, and somebody ends it."""
        start, end = sequence.num_there, len(sequence.ids) * PAGE
        if start < sequence.prompt_tokens or start == end:
            return
        sequence.num_there = stop = self.rng.randint(start, end)
        for page in range(start // PAGE, -(-stop // PAGE)):
            held = sequence.allocation.pages[page]
            assert held in sequence.allocation.owned, "nobody writes to what is cached"
            self.memories.pool[held] = tuple(sequence.ids[: page + 1])
        self.allocator.came_to(sequence.allocation, stop)
        self.happened["launched"] += stop > start

    def close(self) -> None:
        sequence = self.rng.choice(self.open)
        self.open.remove(sequence)
        self.allocator.free(sequence.allocation)

    def run_out(self) -> None:
        self.memories.has_memory = not self.memories.has_memory

    def every_page_is_somewhere_once(self) -> None:
        owned = [page for s in self.open for page in s.allocation.owned]
        on_device, on_host = [], []
        waiting = [self.allocator.tree._root]
        while waiting:
            node = waiting.pop()
            for child in node.children.values():
                assert child.is_offloaded or not node.is_offloaded, "offloaded from the end"
                (on_host if child.is_offloaded else on_device).extend(child.held)
                waiting.append(child)
        assert len({*owned, *on_device}) == len(owned) + len(on_device)
        assert self.allocator.pages.num_free == PAGES - len(owned) - len(on_device)
        assert self.allocator.tiers.host_pages.num_free == self.memories.num_pages - len(on_host)
        assert self.allocator.tiers.cached.on_host == len(on_host) * PAGE


@pytest.mark.parametrize("num_host_pages", [0, 3, 40])
def test_random_sequences(num_host_pages: int) -> None:
    happened: Counter[str] = Counter()
    for seed in range(4):
        pool = Pool(seed, num_host_pages)
        pool.run(6000)
        moved = pool.allocator.tiers.cached
        happened.update(pool.happened)
        happened.update(offloaded=moved.offloaded, fetched=moved.fetched)
        happened.update(evicted=moved.evicted)
    wanted = {"refused", "preempted", "adopted", "adopted a part", "launched", "evicted"}
    wanted |= {"offloaded", "fetched"} if num_host_pages else set()
    assert {what for what, count in happened.items() if count} == wanted


def allocator(num_pages: int, **options) -> KvAllocator:
    return KvAllocator(3, num_pages, PrefixChunks(PAGE, PAGE), keeps_prefixes=True, **options)


def read(some: KvAllocator, allocation: SequenceAllocation, ids: list[int]) -> None:
    for start in range(allocation.num_joined, len(ids), PAGE):
        assert some.reserve(allocation, min(start + PAGE, len(ids)))
        some.cache(allocation, start, ids[start : start + PAGE])


def test_what_was_taken_ahead_goes_to_who_needs_it() -> None:
    some = allocator(10)
    greedy = some.allocate([1] * 10, 20, 9 * PAGE)
    assert greedy is not None
    assert len(greedy.pages) == 9
    assert some.reserve(greedy, 2 * PAGE)
    other = some.allocate([2] * 10, 20, 3 * PAGE)
    assert other is not None
    assert some.reserve(other, 3 * PAGE), "seven pages were not needed yet"
    assert len(greedy.pages) == 2
    assert not some.look_ahead([greedy], [8 * PAGE])
    assert some.look_ahead([greedy], [7 * PAGE])
    assert not set(greedy.pages) & set(other.pages)


def test_pages_that_a_sequence_has_come_to_stay_its_own() -> None:
    some = allocator(10)
    greedy = some.allocate([1] * 10, 20, 9 * PAGE)
    some.came_to(greedy, 4 * PAGE + 1)
    other = some.allocate([2] * 10, 20, 9 * PAGE)
    assert not some.reserve(other, 6 * PAGE)
    assert len(greedy.pages) == 5
    assert some.reserve(other, 5 * PAGE)


def test_nobody_joins_on_pages_that_others_were_promised() -> None:
    some = allocator(10)
    first = some.allocate([1] * (5 * PAGE), 6 * PAGE, 20 * PAGE)
    assert first is not None
    assert not first.pages, "20 pages ahead are not there"
    assert some.allocate([2] * (5 * PAGE), 5 * PAGE, 5 * PAGE) is None
    second = some.allocate([2] * (4 * PAGE), 4 * PAGE, 4 * PAGE)
    assert second is not None
    assert not some.look_ahead([second], [5 * PAGE])
    assert some.reserve(first, 6 * PAGE)
    assert some.reserve(second, 4 * PAGE)


def test_a_chunk_that_comes_back_is_that_which_went() -> None:
    memories = Memories(4)
    some = allocator(4, host=memories)
    ids = [i for i in range(3) for _ in range(PAGE)]
    allocation = some.allocate(ids, len(ids), len(ids))
    read(some, allocation, ids)
    memories.pool.update({page: (n,) for n, page in enumerate(allocation.pages)})
    some.free(allocation)
    other = some.allocate([9] * (3 * PAGE), 3 * PAGE, 3 * PAGE)
    read(some, other, [9] * (3 * PAGE))
    assert some.tiers.cached.offloaded == 2 * PAGE, "the last two chunks"
    memories.pool.update(dict.fromkeys(other.pages, (9,)))
    some.free(other)
    again = some.allocate([*ids, 5], len(ids) + 1, len(ids) + 1)
    assert (again.num_cached, again.num_joined, again.num_offloaded) == (192, 64, 128)
    while again.behind:
        assert some.reserve(again, 0)
        some.next_chunk(again)
    some.tiers.join()
    assert [memories.pool[page] for page in again.pages] == [(0,), (1,), (2,)]
    assert some.tiers.cached.on_host == 2 * PAGE, "of the other prompt, which made place"


def test_without_memory_on_the_host_the_oldest_offloaded_chunk_is_evicted() -> None:
    memories = Memories(2)
    some = allocator(2, host=memories)
    for number in range(5):
        ids = [number] * (2 * PAGE)
        allocation = some.allocate(ids, len(ids), len(ids))
        read(some, allocation, ids)
        memories.pool.update(dict.fromkeys(allocation.pages, (number,)))
        some.free(allocation)
    held = {n: some.tree.match([n] * (2 * PAGE)).num_tokens for n in range(5)}
    assert held == {0: 0, 1: 0, 2: 0, 3: 128, 4: 128}
    assert some.tiers.cached.evicted == 3 * 128


def test_what_nobody_uses_is_offloaded_when_asked_for() -> None:
    memories = Memories(4)
    some = allocator(4, host=memories)
    done, used = (some.allocate([n] * (PAGE + 1), PAGE + 1, 2 * PAGE) for n in range(2))
    for number, allocation in enumerate((done, used)):
        read(some, allocation, [number] * (PAGE + 1))
        memories.pool.update(dict.fromkeys(allocation.pages, (number,)))
    some.free(done)
    some.tiers.offload()
    assert (some.tiers.cached.on_device, some.tiers.cached.on_host) == (PAGE, PAGE)
    assert some.tiers.pages.num_free == 2
    again = some.allocate([0] * (PAGE + 1), PAGE + 1, 2 * PAGE)
    assert (again.num_cached, again.num_offloaded) == (PAGE, PAGE)


def test_pages_are_not_given_away_while_a_chunk_is_on_its_way_to_them() -> None:
    memories = Memories(2)
    some = allocator(2, host=memories)
    for number in range(2):
        allocation = some.allocate([number] * (PAGE + 1), PAGE + 1, 2 * PAGE)
        read(some, allocation, [number] * (PAGE + 1))
        memories.pool.update(dict.fromkeys(allocation.pages, (number,)))
        some.free(allocation)
    cancelled = some.allocate([0] * (PAGE + 1), PAGE + 1, 2 * PAGE)
    assert some.reserve(cancelled, 0)
    some.next_chunk(cancelled)
    some.free(cancelled)
    memories.has_memory = False
    other = some.allocate([2], 1, 2 * PAGE)
    assert some.reserve(other, 2 * PAGE)
    memories.pool.update(dict.fromkeys(other.pages, (2,)))
    some.tiers.join()
    assert [memories.pool[page] for page in other.pages] == [(2,), (2,)]


def test_a_pass_over_several_chunks_caches_each() -> None:
    some = allocator(10)
    ids = [n for n in range(4) for _ in range(PAGE)]
    allocation = some.allocate(ids, len(ids), len(ids))
    assert some.reserve(allocation, len(ids))
    some.cache(allocation, 0, ids[:PAGE])
    some.cache(allocation, PAGE, ids[PAGE:-1])
    assert some.tree.num_tokens == 3 * PAGE, "the last one lacks a token"
    assert allocation.owned == {allocation.pages[3]}
    other = some.allocate([*ids[: 2 * PAGE], 9], 3 * PAGE, 3 * PAGE)
    assert (other.num_joined, other.pages[:2]) == (2 * PAGE, allocation.pages[:2])


def test_chunks_that_others_read_meanwhile_join_and_the_rest_is_read() -> None:
    some = allocator(12)
    ids = [n for n in range(4) for _ in range(PAGE)]
    slow, quick = (some.allocate(ids, len(ids), len(ids)) for _ in range(2))
    for allocation in (slow, quick):
        assert some.reserve(allocation, len(ids))
    some.cache(quick, 0, ids[: 2 * PAGE])
    assert some.adopt(slow, 0, ids[:-1]) == 2 * PAGE
    assert slow.pages[:2] == quick.pages[:2]
    assert some.adopt(slow, 2 * PAGE, ids[2 * PAGE : -1]) == 0
    some.cache(slow, 2 * PAGE, ids[2 * PAGE :])
    assert some.adopt(quick, 2 * PAGE, ids[2 * PAGE : -1]) == PAGE, "the last token has to be read"
    some.free(slow)
    some.free(quick)
    assert some.tiers.num_available == 12


def test_a_chunk_that_went_to_the_host_meanwhile_is_read_and_stays() -> None:
    memories = Memories(2)
    some = allocator(4, host=memories)
    ids = [1] * (PAGE + 5)
    slow = some.allocate(ids, len(ids), len(ids))
    quick = some.allocate(ids, len(ids), len(ids))
    read(some, quick, ids)
    memories.pool.update(dict.fromkeys(quick.pages, (1,)))
    some.free(quick)
    large = some.allocate([2], 1, 2 * PAGE)
    assert some.reserve(large, 2 * PAGE)
    assert some.tiers.cached.on_host == PAGE
    assert some.adopt(slow, 0, ids[:PAGE]) == 0
    own = list(slow.pages)
    some.cache(slow, 0, ids[:PAGE])
    assert slow.pages == own
    assert some.tiers.cached.on_host == 0
    some.free(slow)
    assert some.allocate(ids, len(ids), len(ids)).num_joined == PAGE
