"""How the caches of a round's queries are split over the blocks of a KV head."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from soloist.kv.layout import HALF_PAGE_POSITIONS, PAGE_HALVES, PAGE_POSITIONS
from soloist.megakernel.attention_plan import AttentionPlan


@dataclass(frozen=True, slots=True)
class Group:
    """Queries side by side of one sequence, at rising positions, whose cache is split alike.

    Attributes:
        queries: of the group.
        sequence: whose they are.
        positions: of the queries.
        splits: blocks of a KV head that share the cache.
        first_place: which of the head's blocks serves the first of them; the next ones follow.
        fresh: the group's queries and those of the sequence before them, whose keys and values come
            with this round too.
        fresh_positions: of these.
    """

    queries: range
    sequence: int
    positions: tuple[int, ...]
    splits: int
    first_place: int
    fresh: range
    fresh_positions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Splits:
    """Those of one layer.

    Attributes:
        plan: the rules.
        layer: which one.
        window: positions that a query sees, or None for all.
    """

    plan: AttentionPlan
    layer: int
    window: int | None

    def window_start(self, position: int) -> int:
        """The first position that one sees."""
        return max(0, position - self.window + 1) if self.window else 0

    def count(self, position: int) -> int:
        """Blocks of a KV head that share the cache of a query: a power of 2 up to all of them."""
        seen = position - self.window_start(position)
        if seen < self.plan.unsplit_positions:
            return 1
        return min(self.plan.splits, 1 << (seen // self.plan.split_positions).bit_length())

    def in_order(self, position: int) -> list[int]:
        """The splits that hold something that a position sees, in the order of merging."""
        chunk_positions, splits = self.plan.chunk_pages * PAGE_POSITIONS, self.count(position)
        first = self.window_start(position) // chunk_positions
        count = min(splits, position // chunk_positions - first + 1)
        return [(first + i) % splits for i in range(count)]

    def groups(self, sequences: Sequence[int], positions: Sequence[int]) -> Iterator[Group]:
        """All queries of a round; splits are dealt to the blocks of a head in turn."""
        dealt = self.layer
        for queries in self._alike(sequences, positions):
            sequence, splits = sequences[queries.start], self.count(positions[queries.start])
            fresh = range(sequences.index(sequence), queries.stop)
            own, of_sequence = (tuple(positions[c] for c in r) for r in (queries, fresh))
            place = dealt % self.plan.splits
            yield Group(queries, sequence, own, splits, place, fresh, of_sequence)
            dealt += splits

    def _alike(self, sequences: Sequence[int], positions: Sequence[int]) -> Iterator[range]:
        """Neighbours of one sequence with as many splits."""
        queries, begin = len(positions), 0
        kinds = list(zip(sequences, map(self.count, positions), strict=True))
        power = 1 << (queries - 1).bit_length()
        for end in range(1, queries + 1):
            # No more queries in a group than it takes to give each block of the head a split.
            most = max(1, power * kinds[begin][1] // self.plan.splits)
            most = min(most, self.plan.queries_together)
            if end < queries and kinds[end] == kinds[begin] and end - begin < most:
                continue
            yield range(begin, end)
            begin = end

    def half_pages(self, group: Group, split: int) -> Iterator[tuple[int, int]]:
        """(first position, softmax lane) of all that a split owns and the group sees."""
        first_seen, last_seen = self.window_start(group.positions[0]), group.positions[-1]
        for page in self.pages(group, split):
            for half in range(PAGE_HALVES):
                start = page * PAGE_POSITIONS + half * HALF_PAGE_POSITIONS
                if start <= last_seen and start + HALF_PAGE_POSITIONS > first_seen:
                    ordinal = self._ordinal(page, group.splits) * PAGE_HALVES + half
                    yield start, ordinal % self.plan.softmax_lanes

    def pages(self, group: Group, split: int) -> list[int]:
        """The pages of one group that a split owns."""
        first, last = self.window_start(group.positions[0]), group.positions[-1]
        pages = range(first // PAGE_POSITIONS, last // PAGE_POSITIONS + 1)
        return [page for page in pages if page // self.plan.chunk_pages % group.splits == split]

    def _ordinal(self, page: int, splits: int) -> int:
        """Which of its split's pages of the whole sequence a page is."""
        chunk, in_chunk = divmod(page, self.plan.chunk_pages)
        return chunk // splits * self.plan.chunk_pages + in_chunk
