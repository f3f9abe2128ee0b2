"""Which beginnings of prompts are kept: a tree of blocks of tokens.

A block is one full chunk of a prompt, at a multiple of its length. Nothing smaller is kept:
products of other sizes may round otherwise, and a hit has to give the bits of a miss. Tokens are
compared, never hashes of them. Pure: what is kept of a block is opaque.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Value = TypeVar("Value")


@dataclass(eq=False, slots=True)
class Node(Generic[Value]):
    """A block behind those of its parents.

    Attributes:
        tokens: of the block; none at the root.
        value: what is kept of it; None at the root.
        parent: None at the root, and where the block is no longer kept.
        users: who needs it and the blocks before it.
        used_at: the higher, the later.
    """

    tokens: tuple[int, ...] = ()
    value: Value | None = None
    parent: "Node[Value] | None" = None
    children: dict[tuple[int, ...], "Node[Value]"] = field(default_factory=dict)
    users: int = 0
    used_at: int = 0


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a prompt leaves what is kept, in the middle of a block.

    Attributes:
        position: of the first token that differs.
        kept: tokens that are kept from there to the end of the block.
    """

    position: int
    kept: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Match(Generic[Value]):
    """What is kept of a prompt's beginning.

    Attributes:
        node: the last block, the root if none.
        values: of all blocks, in order.
        divergence: where the next block begins as a kept one does, but goes on otherwise.
    """

    node: Node[Value]
    values: list[Value]
    divergence: Divergence | None


class PrefixTree(Generic[Value]):
    """Blocks of tokens by what precedes them.

    Args:
        block_tokens: tokens of a block.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.num_blocks = 0
        self._root: Node[Value] = Node()
        self._clock = 0

    def match(self, token_ids: Sequence[int]) -> Match[Value]:
        """The longest beginning of `token_ids` that is kept; it counts as used."""
        self._clock += 1
        node, start = self._root, 0
        values: list[Value] = []
        while True:
            block = tuple(token_ids[start : start + self.block_tokens])
            child = node.children.get(block)
            if child is None:
                return Match(node, values, _divergence(node, block, start))
            node = child
            node.used_at = self._clock
            assert node.value is not None, "only the root has none"
            values.append(node.value)
            start += self.block_tokens

    def insert(
        self, parent: Node[Value], tokens: Sequence[int], value: Value
    ) -> tuple[Node[Value], bool]:
        """Keep a block behind `parent`, unless one with the same tokens is kept there.

        Args:
            parent: a block in use, so that it is still kept.
            tokens: of the block.
            value: what to keep.

        Returns:
            The block that is kept, and whether it is the new one.
        """
        block = tuple(tokens)
        assert len(block) == self.block_tokens, "whole blocks only"
        self._clock += 1
        if (present := parent.children.get(block)) is not None:
            present.used_at = self._clock
            return present, False
        node = parent.children[block] = Node(block, value, parent, used_at=self._clock)
        self.num_blocks += 1
        return node, True

    def is_kept(self, node: Node[Value]) -> bool:
        """Whether a block was not dropped meanwhile."""
        return node is self._root or node.parent is not None

    def use(self, node: Node[Value]) -> None:
        """Keep a block and those before it until `release`."""
        assert self.is_kept(node), "it was dropped"
        node.users += 1

    def release(self, node: Node[Value]) -> None:
        """The opposite of `use`."""
        assert node.users > 0, "nobody uses it"
        node.users -= 1

    def drop(self, count: int) -> list[Value]:
        """Drop up to `count` blocks that nobody uses, the least recently used ones first.

        A block goes before those that it stands on. Returns what they held.
        """
        leaves = [(n.used_at, id(n), n) for n in self._all() if _is_droppable(n)]
        heapq.heapify(leaves)
        values: list[Value] = []
        while leaves and len(values) < count:
            _, _, node = heapq.heappop(leaves)
            parent, value = node.parent, node.value
            assert parent is not None, "the root stays"
            assert value is not None, "only the root has none"
            del parent.children[node.tokens]
            node.parent = None
            values.append(value)
            self.num_blocks -= 1
            if _is_droppable(parent):
                heapq.heappush(leaves, (parent.used_at, id(parent), parent))
        return values

    def _all(self) -> list[Node[Value]]:
        found: list[Node[Value]] = []
        waiting = [self._root]
        while waiting:
            node = waiting.pop()
            found.append(node)
            waiting += node.children.values()
        return found


def _is_droppable(node: Node[Value]) -> bool:
    return node.parent is not None and not node.children and not node.users


def _divergence(node: Node[Value], block: tuple[int, ...], start: int) -> Divergence | None:
    best: Divergence | None = None
    for tokens in node.children:
        common = 0
        for ours, kept in zip(block, tokens, strict=False):
            if ours != kept:
                break
            common += 1
        # A prompt that ends there has not left it.
        if 0 < common < len(block) and (best is None or start + common > best.position):
            best = Divergence(start + common, tokens[common:])
    return best
