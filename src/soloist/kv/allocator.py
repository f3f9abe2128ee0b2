"""Which sequence has which pages.

`KvAllocator.allocate` gives a sequence a row of the page tables and pages, which grow with it;
`KvAllocator.free` takes them back when its request ends, is preempted or loses its client. Pages of
cached prompts belong to no sequence (`tiers.py`). Pure: pages are integers.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from soloist.kv.chunks import PrefixChunks
from soloist.kv.layout import PAGE_POSITIONS
from soloist.kv.prefix import Divergence, TokenIds
from soloist.kv.tiers import CacheTiers, Host, PageNode

# So many positions beyond what a sequence needs now are taken if nobody else needs the pages.
_AHEAD_POSITIONS = 4096


@dataclass(eq=False, slots=True)
class SequenceAllocation:
    """What an open sequence has: a row of the page tables, and pages.

    Attributes:
        row: its row of the page tables.
        num_promised: pages that it will need for certain.
        pages: so far, in the order of positions.
        owned: those of them that are freed with it; others belong to cached chunks.
        node: the last cached chunk of its prompt, if prompts are cached.
        behind: cached chunks whose pages are still to join it, maybe from the host.
        num_cached: positions of all cached chunks.
        num_joined: of those that have joined.
        num_offloaded: of those that were on the host at first.
        divergence: where the prompt leaves a cached one, if it does.
        num_needed: pages that it must not lose before its next step.
    """

    row: int
    num_promised: int
    pages: list[int] = field(default_factory=list)
    owned: set[int] = field(default_factory=set)
    node: PageNode | None = None
    behind: deque[PageNode] = field(default_factory=deque)
    num_cached: int = 0
    num_joined: int = 0
    num_offloaded: int = 0
    divergence: Divergence | None = None
    num_needed: int = 0

    @property
    def num_lacking(self) -> int:
        """Pages that were promised and are still to be allocated."""
        return max(0, self.num_promised - len(self.pages))


class KvAllocator:
    """Allocates and frees rows of the page tables and pages of one pool.

    Attributes:
        tiers: pages and what is cached in them; `pages` and `tree` are its own.
        chunks: where prompts are cut.

    Args:
        num_rows: sequences that may be open at once.
        num_pages: of the pool; one sequence alone never needs more.
        chunks: where prompts are cut; in whole pages if prompts are cached.
        keeps_prefixes: cache chunks of prompts, in their pages, for later ones that begin alike.
        host: takes what is offloaded; None where nothing is.
    """

    def __init__(
        self,
        num_rows: int,
        num_pages: int,
        chunks: PrefixChunks,
        *,
        keeps_prefixes: bool = False,
        host: Host | None = None,
    ) -> None:
        caches = keeps_prefixes and chunks.finest % PAGE_POSITIONS == 0
        self.tiers = CacheTiers(num_pages, chunks if caches else None, host)
        self.pages, self.tree = self.tiers.pages, self.tiers.tree
        self.chunks = chunks
        self._num_rows = num_rows
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._open: dict[SequenceAllocation, None] = {}

    @property
    def num_open(self) -> int:
        """Sequences with an allocation."""
        return len(self._open)

    # --- a sequence's life ------------------------------------------------------------------------

    def allocate(self, prompt_ids: TokenIds, first: int, most: int) -> SequenceAllocation | None:
        """A row and first pages for a sequence; `free` takes them back.

        Args:
            prompt_ids: of the sequence.
            first: positions that it is promised: others join only if there are pages for these.
            most: positions that it will have at most.

        Returns:
            None while others have the rows, or pages that are needed; never where no sequence is
            open.
        """
        if not self._free_rows:
            return None
        allocation = SequenceAllocation(self._free_rows[-1], num_pages_of(first))
        if self.tree is not None:
            # Of a prompt that is cached whole the last chunk is read again: it gives the logits.
            match = self.tree.match(prompt_ids[:-1])
            self.tree.use(match.node)
            allocation.node, allocation.divergence = match.node, match.divergence
            allocation.num_cached = match.num_tokens
            # Whatever lies behind an offloaded chunk is offloaded as well.
            count = next((i for i, n in enumerate(match.nodes) if n.is_offloaded), len(match.nodes))
            self._join(allocation, *match.nodes[:count])
            allocation.behind.extend(match.nodes[count:])
            allocation.num_offloaded = sum(len(n.tokens) for n in allocation.behind)
        if not self._is_available(allocation.num_lacking, promised=True):
            self._release(allocation)
            return None
        self._free_rows.pop()
        self._open[allocation] = None
        if not allocation.behind:
            self.look_ahead([allocation], [min(first + _AHEAD_POSITIONS, most)])
        return allocation

    def free(self, allocation: SequenceAllocation) -> None:
        """Free a sequence's row and pages; what is cached of its prompt stays in the pool."""
        # In this order: one sequence after the other gets the same pages and an unchanged row.
        self.pages.free(page for page in reversed(allocation.pages) if page in allocation.owned)
        self._release(allocation)
        self._free_rows.append(allocation.row)
        del self._open[allocation]

    def _release(self, allocation: SequenceAllocation) -> None:
        if self.tree is not None and allocation.node is not None:
            self.tree.release(allocation.node)
            allocation.node = None

    def _is_available(self, count: int, *, promised: bool = False) -> bool:
        """Whether so many pages can be taken, beside those that were promised if these count."""

        def is_there() -> bool:
            others = sum(one.num_lacking for one in self._open) if promised else 0
            return count + others <= self.tiers.num_available

        if not is_there():
            self._trim()
        return is_there()

    # --- pages ------------------------------------------------------------------------------------

    def reserve(self, allocation: SequenceAllocation, positions: int) -> bool:
        """Whether a sequence has, or now gets, pages for so many positions.

        If cached chunks are still to join it, for the next of these instead. What nobody uses at
        the moment makes place: cached chunks, and pages that others took ahead.
        """
        wanted = num_pages_of(positions)
        if allocation.behind:
            wanted = len(allocation.pages)
            if allocation.behind[0].is_offloaded:
                wanted += len(allocation.behind[0].held)
        allocation.num_needed = max(allocation.num_needed, wanted)
        lacking = wanted - len(allocation.pages)
        if not self._is_available(lacking):
            return False
        if lacking > 0 and not allocation.behind:
            self._give(allocation, self.tiers.allocate(lacking))
        return True

    def look_ahead(
        self, allocations: Sequence[SequenceAllocation], positions: Sequence[int]
    ) -> bool:
        """Whether all have, or now get, pages for so many positions, of those nobody will need."""
        lacking = [
            max(0, num_pages_of(p) - len(one.pages))
            for one, p in zip(allocations, positions, strict=True)
        ]
        promised = sum(one.num_lacking for one in self._open if one not in allocations)
        if sum(lacking) > self.pages.num_free - promised:
            return False
        for allocation, count in zip(allocations, lacking, strict=True):
            self._give(allocation, self.pages.allocate(count))
        return True

    def came_to(self, allocation: SequenceAllocation, positions: int) -> None:
        """So many positions of a sequence are there: their pages were not taken ahead."""
        allocation.num_needed = max(allocation.num_needed, num_pages_of(positions))

    def _give(self, allocation: SequenceAllocation, pages: list[int]) -> None:
        allocation.pages += pages
        allocation.owned.update(pages)

    def _trim(self) -> None:
        """Free what was taken ahead."""
        for allocation in self._open:
            ahead = allocation.pages[allocation.num_needed :]
            del allocation.pages[allocation.num_needed :]
            allocation.owned.difference_update(ahead)
            self.pages.free(reversed(ahead))

    # --- cached prompts ---------------------------------------------------------------------------

    def next_chunk(self, allocation: SequenceAllocation) -> int:
        """Let a sequence's next cached chunk join it.

        The caller has reserved pages for it. It may be on its way until `tiers.join`.

        Returns:
            The number of its positions; 0 if there is none.
        """
        if not allocation.behind:
            return 0
        node = allocation.behind.popleft()
        if node.is_offloaded:
            self.tiers.fetch(node)
        self._join(allocation, node)
        return len(node.tokens)

    def _join(self, allocation: SequenceAllocation, *nodes: PageNode) -> None:
        for node in nodes:
            allocation.pages += node.held
            allocation.num_joined += len(node.tokens)
        allocation.num_needed = max(allocation.num_needed, len(allocation.pages))

    def cache(self, allocation: SequenceAllocation, start: int, ids: Sequence[int]) -> None:
        """Cache every whole chunk that was read for later prompts, in the pages where it is."""
        for begin, chunk in self._whole_chunks(start, ids):
            if self.tree is None or allocation.node is None:
                return
            pages = allocation.pages[_pages_of(begin, chunk)]
            node, is_new = self.tree.insert(allocation.node, chunk, pages)
            if node.is_offloaded:  # cached by somebody else meanwhile, and offloaded
                self.tiers.restore(node, pages)
                is_new = True
            if is_new:
                allocation.owned.difference_update(pages)
            self._go_on(allocation, begin, node)

    def adopt(self, allocation: SequenceAllocation, start: int, ids: Sequence[int]) -> int:
        """Let whole chunks join a sequence that another one has read and cached meanwhile.

        Returns:
            How many tokens need not be read any more.
        """
        joined = 0
        for begin, chunk in self._whole_chunks(start, ids):
            node = None
            if self.tree is not None and allocation.node is not None:
                node = self.tree.child(allocation.node, chunk)
            if node is None or node.is_offloaded:
                break
            self._go_on(allocation, begin, node)
            joined += len(chunk)
        return joined

    def _whole_chunks(self, start: int, ids: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
        """Whole chunks of tokens that begin at a boundary, and where they begin."""
        stop = start + len(ids)
        for begin, end in self.chunks.whole(start, stop):
            yield begin, ids[begin - start : end - start]

    def _go_on(self, allocation: SequenceAllocation, start: int, node: PageNode) -> None:
        """Let a cached chunk replace a sequence's own pages with the same bits."""
        assert self.tree is not None, "it holds the chunk"
        place = _pages_of(start, node.tokens)
        own = [page for page in allocation.pages[place] if page in allocation.owned]
        allocation.pages[place] = node.held
        allocation.owned.difference_update(own)
        self.pages.free(reversed(own))
        self.tree.advance(node)
        allocation.node = node

    def check(self) -> None:
        """Make sure that every page, row and chunk belongs to whom the books say, and to no other.

        Raises:
            AssertionError: it does not.
        """
        nodes: list[PageNode] = []
        if self.tree is not None:
            self.tree.check([one.node for one in self._open if one.node is not None])
            nodes = list(self.tree.nodes)
        cached = [page for node in nodes if not node.is_offloaded for page in node.held]
        owned = [page for one in self._open for page in one.owned]
        offloaded = [page for node in nodes if node.is_offloaded for page in node.held]
        taken, on_host = self.pages.allocated, self.tiers.host_pages.allocated
        assert sorted([*cached, *owned]) == sorted(taken), "pages have one owner each"
        assert sorted(offloaded) == sorted(on_host), "so have pages of the host"
        everybodys = set(cached)
        for one in self._open:
            assert everybodys.issuperset(set(one.pages) - one.owned), "no page was given away"
            assert one.owned.issubset(one.pages), "what a sequence owns is in its table"
        rows = [*self._free_rows, *(one.row for one in self._open)]
        assert sorted(rows) == list(range(self._num_rows)), "rows have one owner each"


def _pages_of(start: int, tokens: Sequence[int]) -> slice:
    """Where an allocation has the pages of tokens that are whole pages."""
    return slice(start // PAGE_POSITIONS, (start + len(tokens)) // PAGE_POSITIONS)


def num_pages_of(positions: int) -> int:
    """Pages that so many positions of one sequence take."""
    return -(-positions // PAGE_POSITIONS)
