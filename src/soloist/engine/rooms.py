"""Which pages hold what: those of open sequences, of kept prompts, and of prompts on the host.

A sequence has a room: a row of the page tables, and pages for the positions it has come to. Blocks
of prompts that were read stay in their pages until somebody needs these; then the least recently
used ones go to the host's memory, as far as that goes, and come back when a prompt begins with
them. Pure: pages are integers, and who copies them is told what to copy.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from soloist.engine.grid import Grid
from soloist.engine.prefix import Divergence, Node, PrefixTree
from soloist.megakernel.kv_layout import PAGE_POSITIONS
from soloist.prefill.page_list import PageList

# So many positions beyond what a sequence needs now are taken if nobody else needs the pages.
_AHEAD_POSITIONS = 4096


class Host(Protocol):
    """Copies pages between the device and the host's memory, in the order in which it is told to.

    Attributes:
        num_pages: that the host's memory may hold.
    """

    num_pages: int

    def spill(self, pages: Sequence[int], host_pages: Sequence[int]) -> bool:
        """Copy to the host; whatever the device does from now on may overwrite `pages`.

        Returns False, and copies nothing, where the machine does not give the memory after all.
        """
        ...

    def fetch(self, host_pages: Sequence[int], pages: Sequence[int]) -> None:
        """Begin to copy to the device; until `join` nobody may use `pages`."""
        ...

    def join(self) -> None:
        """Whatever the device does from now on sees what was fetched."""
        ...


@dataclass(eq=False, slots=True)
class Room:
    """What a sequence has.

    Attributes:
        slot: its row of the page tables.
        num_promised: pages that it will need for certain.
        pages: so far, in the order of positions.
        owned: those of them that it gives back; others belong to kept blocks.
        node: the last kept block of its prompt, if prompts are kept.
        behind: kept blocks whose pages are still to join it, maybe from the host.
        num_cached: positions of all kept blocks.
        num_joined: of those that have joined.
        num_spilled: of those that were on the host at first.
        divergence: where the prompt leaves a kept one, if it does.
        num_needed: pages that it must not lose before its next step.
    """

    slot: int
    num_promised: int
    pages: list[int] = field(default_factory=list)
    owned: set[int] = field(default_factory=set)
    node: Node[list[int]] | None = None
    behind: deque[Node[list[int]]] = field(default_factory=deque)
    num_cached: int = 0
    num_joined: int = 0
    num_spilled: int = 0
    divergence: Divergence | None = None
    num_needed: int = 0

    @property
    def num_lacking(self) -> int:
        """Pages that were promised and are still to be taken."""
        return max(0, self.num_promised - len(self.pages))


@dataclass(slots=True)
class Moved:
    """Tokens of kept prompts since the start: gone to the host, come back, forgotten."""

    spilled_tokens: int = 0
    fetched_tokens: int = 0
    dropped_tokens: int = 0


class Rooms:
    """Rows and pages of one pool.

    Args:
        num_slots: sequences that may be open at once.
        num_pages: of the pool; one sequence alone never needs more.
        grid: where prompts are cut; its chunks are whole pages if prompts are kept.
        keeps_prefixes: leave blocks of prompts where they are, for later ones that begin alike.
        host: takes what is spilled; None where nothing is.
    """

    def __init__(
        self,
        num_slots: int,
        num_pages: int,
        grid: Grid,
        *,
        keeps_prefixes: bool = False,
        host: Host | None = None,
    ) -> None:
        self.pages = PageList(num_pages)
        self.host_pages = PageList(0 if host is None else host.num_pages)
        self.grid = grid
        self.moved = Moved()
        self.tree: PrefixTree[list[int]] | None = None
        if keeps_prefixes and grid.finest % PAGE_POSITIONS == 0:
            self.tree = PrefixTree(grid)
        self._host = host
        self._num_slots = num_slots
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._open: dict[Room, None] = {}

    @property
    def num_open(self) -> int:
        """Sequences that have a room."""
        return len(self._open)

    @property
    def num_available(self) -> int:
        """Pages that can be taken: free ones, and those of kept blocks that nobody uses."""
        idle = 0 if self.tree is None else self.tree.idle_tokens // PAGE_POSITIONS
        return self.pages.num_free + idle

    # --- a sequence's life ------------------------------------------------------------------------

    def open(self, prompt_ids: Sequence[int], first: int, most: int) -> Room | None:
        """A room for a sequence.

        Args:
            prompt_ids: of the sequence.
            first: positions that it is promised: others join only if there are pages for these.
            most: positions that it will have at most.

        Returns:
            None while others have the rows, or pages that are needed. Where no sequence is open,
            there is room.
        """
        if not self._free_slots:
            return None
        room = Room(self._free_slots[-1], num_pages_of(first))
        if self.tree is not None:
            # Of a prompt that is kept whole the last chunk is read again: it gives the logits.
            match = self.tree.match(prompt_ids[:-1])
            self.tree.use(match.node)
            room.node, room.divergence = match.node, match.divergence
            room.num_cached = match.num_tokens
            room.num_spilled = sum(len(n.tokens) for n in match.nodes if n.is_spilled)
            room.behind.extend(match.nodes)
            while room.behind and not room.behind[0].is_spilled:
                self._join(room, room.behind.popleft())
        if not self._is_available(room.num_lacking, promised=True):
            self._release(room)
            return None
        self._free_slots.pop()
        self._open[room] = None
        if not room.behind:
            self.look_ahead([room], [min(first + _AHEAD_POSITIONS, most)])
        return room

    def close(self, room: Room) -> None:
        """Give back what a sequence has; what is kept of its prompt stays."""
        # In this order: one sequence after the other gets the same pages and an unchanged row.
        self.pages.give_back(page for page in reversed(room.pages) if page in room.owned)
        self._release(room)
        self._free_slots.append(room.slot)
        del self._open[room]

    def _release(self, room: Room) -> None:
        if self.tree is not None and room.node is not None:
            self.tree.release(room.node)
            room.node = None

    def _is_available(self, count: int, *, promised: bool = False) -> bool:
        """Whether so many pages can be taken, beside those that were promised if these count."""

        def is_there() -> bool:
            others = sum(room.num_lacking for room in self._open) if promised else 0
            return count + others <= self.num_available

        if not is_there():
            self._trim()
        return is_there()

    # --- pages ------------------------------------------------------------------------------------

    def reserve(self, room: Room, positions: int) -> bool:
        """Whether a room has, or now gets, pages for so many positions or for its next kept block.

        What nobody uses at the moment makes place: kept blocks, and pages that others took ahead.
        """
        wanted = num_pages_of(positions)
        if room.behind:
            wanted = len(room.pages)
            if room.behind[0].is_spilled:
                wanted += len(room.behind[0].held)
        room.num_needed = max(room.num_needed, wanted)
        lacking = wanted - len(room.pages)
        if not self._is_available(lacking):
            return False
        if lacking > 0 and not room.behind:
            self._give(room, self._take(lacking))
        return True

    def look_ahead(self, rooms: Sequence[Room], positions: Sequence[int]) -> bool:
        """Whether all have, or now get, pages for so many positions, of those nobody will need."""
        lacking = [
            max(0, num_pages_of(p) - len(room.pages))
            for room, p in zip(rooms, positions, strict=True)
        ]
        promised = sum(room.num_lacking for room in self._open if room not in rooms)
        if sum(lacking) > self.pages.num_free - promised:
            return False
        for room, count in zip(rooms, lacking, strict=True):
            self._give(room, self.pages.take(count))
        return True

    def came_to(self, room: Room, positions: int) -> None:
        """So many positions of a sequence are there: their pages were not taken ahead."""
        room.num_needed = max(room.num_needed, num_pages_of(positions))

    def _give(self, room: Room, pages: list[int]) -> None:
        room.pages += pages
        room.owned.update(pages)

    def _trim(self) -> None:
        """Give back what was taken ahead."""
        for room in self._open:
            ahead = room.pages[room.num_needed :]
            del room.pages[room.num_needed :]
            room.owned.difference_update(ahead)
            self.pages.give_back(reversed(ahead))

    def _take(self, count: int) -> list[int]:
        while self.pages.num_free < count:
            self._make_place()
        return self.pages.take(count)

    # --- kept prompts -----------------------------------------------------------------------------

    def next_block(self, room: Room) -> int:
        """Let a room's next kept block join it; the number of its positions, 0 if there is none.

        The caller has reserved room for it. It may be on its way until `join`.
        """
        if not room.behind:
            return 0
        node = room.behind.popleft()
        if node.is_spilled:
            assert self.tree is not None, "it holds the block"
            assert self._host is not None, "it has the pages"
            host_pages, pages = node.held, self._take(len(node.held))
            try:
                self._host.fetch(host_pages, pages)
            except Exception:
                self.pages.give_back(reversed(pages))
                raise
            self.host_pages.give_back(reversed(host_pages))
            self.tree.move(node, pages, is_spilled=False)
            self.moved.fetched_tokens += len(node.tokens)
        self._join(room, node)
        return len(node.tokens)

    def _join(self, room: Room, node: Node[list[int]]) -> None:
        room.pages += node.held
        room.num_joined += len(node.tokens)
        room.num_needed = max(room.num_needed, len(room.pages))

    def keep(self, room: Room, start: int, ids: Sequence[int]) -> None:
        """Leave the pages of every whole block that was read to later prompts."""
        for begin, block in self._blocks(start, ids):
            if self.tree is None or room.node is None:
                return
            pages = room.pages[_pages_of(begin, block)]
            node, is_new = self.tree.insert(room.node, block, pages)
            if node.is_spilled:  # somebody kept it meanwhile, and it had to go
                self.host_pages.give_back(reversed(node.held))
                self.tree.move(node, pages, is_spilled=False)
                is_new = True
            if is_new:
                room.owned.difference_update(pages)
            self._go_on(room, begin, node)

    def adopt(self, room: Room, start: int, ids: Sequence[int]) -> int:
        """Let whole blocks join a room that another sequence has read meanwhile.

        Returns:
            How many tokens need not be read any more.
        """
        joined = 0
        for begin, block in self._blocks(start, ids):
            node = None
            if self.tree is not None and room.node is not None:
                node = self.tree.child(room.node, block)
            if node is None or node.is_spilled:
                break
            self._go_on(room, begin, node)
            joined += len(block)
        return joined

    def _blocks(self, start: int, ids: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
        """Whole blocks of tokens that begin at a boundary, and where they begin."""
        stop = start + len(ids)
        for begin, end in self.grid.blocks(start, stop):
            yield begin, ids[begin - start : end - start]

    def _go_on(self, room: Room, start: int, node: Node[list[int]]) -> None:
        """Let a block be the last of a room, instead of pages of its own with the same bits."""
        assert self.tree is not None, "it holds the block"
        place = _pages_of(start, node.tokens)
        own = [page for page in room.pages[place] if page in room.owned]
        room.pages[place] = node.held
        room.owned.difference_update(own)
        self.pages.give_back(reversed(own))
        self.tree.advance(node)
        room.node = node

    def join(self) -> None:
        """Whatever the device does from now on sees every block that joined a room."""
        if self._host is not None:
            self._host.join()

    def _make_place(self) -> None:
        """Free the pages of the least recently used kept block."""
        assert self.tree is not None, "without kept blocks all available pages are free"
        node = self.tree.oldest(is_spilled=False)
        assert node is not None, "the caller counted what is available"
        pages = node.held
        if (host_pages := self._spill(pages)) is not None:
            self.tree.move(node, host_pages, is_spilled=True)
            self.moved.spilled_tokens += len(node.tokens)
        else:
            self.join()  # the block may still be on its way to these pages
            self._drop(node)
        self.pages.give_back(reversed(pages))

    def _spill(self, pages: Sequence[int]) -> list[int] | None:
        """Copy pages to the host, if need be instead of what was there longest without use."""
        if self._host is None or self.tree is None or len(pages) > self._host.num_pages:
            return None
        while self.host_pages.num_free < len(pages):
            if (node := self.tree.oldest(is_spilled=True)) is None:
                return None
            self._drop(node)
        host_pages, is_there = self.host_pages.take(len(pages)), False
        try:
            is_there = self._host.spill(pages, host_pages)
        finally:
            if not is_there:
                self.host_pages.give_back(reversed(host_pages))
        return host_pages if is_there else None

    def _drop(self, node: Node[list[int]]) -> None:
        """Forget a block that nobody uses, and spilled ones that stand on it."""
        assert self.tree is not None, "it holds the block"
        for child in list(node.children.values()):
            self._drop(child)
        self.tree.remove(node)
        self.moved.dropped_tokens += len(node.tokens)
        if node.is_spilled:
            self.host_pages.give_back(reversed(node.held))

    @property
    def spilled_tokens(self) -> int:
        """Kept tokens that lie on the host."""
        return (self.host_pages.num_pages - self.host_pages.num_free) * PAGE_POSITIONS

    def check(self) -> None:
        """Make sure that every page, row and block belongs to whom the books say, and to no other.

        Raises:
            AssertionError: it does not.
        """
        nodes: list[Node[list[int]]] = []
        if self.tree is not None:
            self.tree.check([room.node for room in self._open if room.node is not None])
            nodes = list(self.tree.nodes)
        kept = [page for node in nodes if not node.is_spilled for page in node.held]
        owned = [page for room in self._open for page in room.owned]
        spilled = [page for node in nodes if node.is_spilled for page in node.held]
        assert sorted([*kept, *owned]) == sorted(self.pages.taken), "pages have one owner each"
        assert sorted(spilled) == sorted(self.host_pages.taken), "so have pages of the host"
        everybodys = set(kept)
        for room in self._open:
            assert everybodys.issuperset(set(room.pages) - room.owned), "no page was given away"
            assert room.owned.issubset(room.pages), "what a room owns is in its table"
        slots = [*self._free_slots, *(room.slot for room in self._open)]
        assert sorted(slots) == list(range(self._num_slots)), "rows have one owner each"


def _pages_of(start: int, tokens: Sequence[int]) -> slice:
    """Where a room has the pages of tokens that are whole pages."""
    return slice(start // PAGE_POSITIONS, (start + len(tokens)) // PAGE_POSITIONS)


def num_pages_of(positions: int) -> int:
    """Pages that so many positions of one sequence take."""
    return -(-positions // PAGE_POSITIONS)
