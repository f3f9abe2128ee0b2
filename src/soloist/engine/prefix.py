"""Which beginnings of prompts are kept: a tree of blocks of tokens.

A block is one chunk of a prompt, between two boundaries of a grid. Nothing smaller is kept:
products of other sizes may round otherwise, and a hit has to give the bits of a miss. Tokens are
compared, never hashes of them. Blocks may be spilled, which is for the caller to mean something by;
whatever lies behind a spilled block is spilled as well. Pure: what is kept of a block is opaque.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from soloist.engine.grid import Grid

Value = TypeVar("Value")

# Of what is kept behind a divergence, enough to show.
_SHOWN_TOKENS = 32


@dataclass(eq=False, slots=True)
class Node(Generic[Value]):
    """A block behind those of its parents.

    Attributes:
        tokens: of the block; none at the root.
        value: what is kept of it; None at the root.
        parent: None at the root, and where the block is no longer kept.
        is_spilled: whether it lies in the second tier.
        users: who needs it, or a block behind it.
        used_at: the higher, the later; never lower than that of a block behind it.
    """

    tokens: tuple[int, ...] = ()
    value: Value | None = None
    parent: "Node[Value] | None" = None
    children: dict[tuple[int, ...], "Node[Value]"] = field(default_factory=dict)
    is_spilled: bool = False
    users: int = 0
    used_at: int = 0

    @property
    def held(self) -> Value:
        """What is kept of a block that is not the root."""
        assert self.value is not None, "only the root has none"
        return self.value


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a prompt leaves what is kept.

    Attributes:
        position: of the first token that differs.
        kept: tokens that are kept from there on, of the latest prompt; not all if they are many.
    """

    position: int
    kept: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Match(Generic[Value]):
    """What is kept of a prompt's beginning.

    Attributes:
        nodes: the blocks, in order.
        node: the last block, the root if none.
        num_tokens: of all blocks.
        divergence: where the next block goes on otherwise than a kept one, if one is kept there.
    """

    nodes: list[Node[Value]]
    node: Node[Value]
    num_tokens: int
    divergence: Divergence | None


class PrefixTree(Generic[Value]):
    """Blocks of tokens by what precedes them.

    Attributes:
        num_tokens: kept, spilled or not.
        idle_tokens: of blocks that are not spilled and that nobody uses.

    Args:
        grid: where blocks begin and end.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.num_tokens = self.idle_tokens = 0
        self._root: Node[Value] = Node()
        self._clock = 0
        # Of both tiers, the least recently used first.
        self._ages: dict[bool, dict[Node[Value], None]] = {False: {}, True: {}}

    def match(self, token_ids: Sequence[int]) -> Match[Value]:
        """The longest beginning of `token_ids` that is kept; it counts as used."""
        node, start = self._root, 0
        nodes: list[Node[Value]] = []
        while True:
            block = tuple(token_ids[start : start + self.grid.width(start)])
            child = node.children.get(block)
            if child is None:
                self._touch(node)
                return Match(nodes, node, start, _divergence(node, block, start))
            node = child
            nodes.append(node)
            start += len(block)

    def child(self, parent: Node[Value], tokens: Sequence[int]) -> Node[Value] | None:
        """The block with these tokens behind `parent`, if it is kept; it counts as used."""
        node = parent.children.get(tuple(tokens))
        if node is not None:
            self._touch(node)
        return node

    def insert(
        self, parent: Node[Value], tokens: Sequence[int], value: Value
    ) -> tuple[Node[Value], bool]:
        """Keep a block behind `parent`, unless one with the same tokens is kept there.

        It counts as used, and so do those before it.

        Args:
            parent: a block in use, so that it is still kept; not spilled.
            tokens: of the block.
            value: what to keep.

        Returns:
            The block that is kept, and whether it is the new one.
        """
        block = tuple(tokens)
        assert self.is_kept(parent), "it was dropped"
        assert not parent.is_spilled, "what lies behind a spilled block is spilled"
        node, is_new = parent.children.get(block), False
        if node is None:
            node, is_new = Node(block, value, parent), True
            parent.children[block] = node
            self.num_tokens += len(block)
            self.idle_tokens += len(block)
        self._touch(node)
        return node, is_new

    def is_kept(self, node: Node[Value]) -> bool:
        """Whether a block was not dropped meanwhile."""
        return node is self._root or node.parent is not None

    def use(self, node: Node[Value]) -> None:
        """Keep a block and those before it, not spilled if they are not, until `release`."""
        assert self.is_kept(node), "it was dropped"
        for used in self._path(node):
            if not used.users and not used.is_spilled:
                self.idle_tokens -= len(used.tokens)
            used.users += 1

    def advance(self, node: Node[Value]) -> None:
        """Use a block instead of the one before it; not spilled."""
        assert self.is_kept(node), "it was dropped"
        assert not node.is_spilled, "it is still to come"
        if not node.users:
            self.idle_tokens -= len(node.tokens)
        node.users += 1  # those before it have the user that they had

    def release(self, node: Node[Value]) -> None:
        """The opposite of `use`."""
        for used in self._path(node):
            assert used.users > 0, "nobody uses it"
            used.users -= 1
            if not used.users and not used.is_spilled:
                self.idle_tokens += len(used.tokens)

    def oldest(self, *, is_spilled: bool) -> Node[Value] | None:
        """The least recently used block of a tier that can leave it; None where none can.

        Nobody uses it, and of those behind it none is in its tier or, if it is spilled, anywhere.
        """
        for node in self._ages[is_spilled]:
            behind = (child.is_spilled <= is_spilled for child in node.children.values())
            if not node.users and not any(behind):
                return node
        return None

    def move(self, node: Node[Value], value: Value, *, is_spilled: bool) -> None:
        """Take a block to the other tier, where `value` is what is kept of it.

        There it counts as the most recently used one.
        """
        assert node.is_spilled is not is_spilled, "it is there"
        assert node.parent is not None, "only blocks move"
        assert not (is_spilled and node.users), "it is in use"
        assert is_spilled or not node.parent.is_spilled, "those before it first"
        del self._ages[node.is_spilled][node]
        if not node.users:
            self.idle_tokens += -len(node.tokens) if is_spilled else len(node.tokens)
        node.value, node.is_spilled = value, is_spilled
        self._ages[is_spilled][node] = None

    def remove(self, node: Node[Value]) -> None:
        """Forget a block that nobody uses and that has none behind it."""
        assert node.parent is not None, "the root stays"
        assert not node.children, "others stand on it"
        assert not node.users, "it is in use"
        del node.parent.children[node.tokens], self._ages[node.is_spilled][node]
        node.parent = None
        self.num_tokens -= len(node.tokens)
        if not node.is_spilled:
            self.idle_tokens -= len(node.tokens)

    @property
    def nodes(self) -> Iterator[Node[Value]]:
        """All blocks."""
        for ages in self._ages.values():
            yield from ages

    def check(self, used: Iterable[Node[Value]]) -> None:
        """Make sure that blocks have the users that they should.

        Args:
            used: the last block of every user.

        Raises:
            AssertionError: they have not, or the counts of tokens are wrong.
        """
        users = Counter(node for last in used for node in self._path(last))
        nodes = list(self.nodes)
        assert all(node.users == users.pop(node, 0) for node in nodes), "each has its users"
        assert not users, "a block in use is kept"
        assert self.num_tokens == sum(len(node.tokens) for node in nodes), "tokens are counted"
        idle = sum(len(n.tokens) for n in nodes if not n.users and not n.is_spilled)
        assert self.idle_tokens == idle, "tokens that nobody uses are counted"

    def _touch(self, node: Node[Value]) -> None:
        self._clock += 1
        for used in self._path(node):
            used.used_at = self._clock
            ages = self._ages[used.is_spilled]
            ages.pop(used, None)
            ages[used] = None

    def _path(self, node: Node[Value]) -> Iterator[Node[Value]]:
        """A block and those before it, without the root."""
        while node.parent is not None:
            yield node
            node = node.parent


def _divergence(node: Node[Value], block: tuple[int, ...], start: int) -> Divergence | None:
    best, begin = None, 0
    for tokens, child in node.children.items():
        common = 0
        for ours, kept in zip(block, tokens, strict=False):
            if ours != kept:
                break
            common += 1
        position = start + common
        # A prompt that ends there has not left it.
        if common == len(block) or position == 0:
            continue
        if best is None or (common, child.used_at) > (begin, best.used_at):
            best, begin = child, common
    if best is None:
        return None
    rest, last = list(best.tokens[begin:]), best
    while len(rest) < _SHOWN_TOKENS and last.children:
        last = max(last.children.values(), key=lambda child: child.used_at)
        rest += last.tokens
    return Divergence(start + begin, tuple(rest))
