"""Which beginnings of prompts are cached: a tree of chunks of tokens.

Nothing smaller than a chunk (`chunks.py`) is cached: products of other sizes may round otherwise,
and a hit has to give the bits of a miss. Tokens are compared, never hashes of them. Chunks may be
offloaded to a second tier, which is for the caller to mean something by; whatever lies behind an
offloaded chunk is offloaded as well. Pure: what is cached of a chunk is opaque.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from soloist.kv.chunks import PrefixChunks

Value = TypeVar("Value")
TokenIds = Sequence[int] | NDArray[np.int64]

# Of what is cached behind a divergence, enough to show.
_SHOWN_TOKENS = 32


@dataclass(eq=False, slots=True)
class Node(Generic[Value]):
    """A chunk behind those of its parents.

    Attributes:
        tokens: of the chunk; none at the root.
        value: what is cached of it; None at the root.
        parent: None at the root, and where the chunk was evicted.
        children: chunks behind it, by the bytes of their tokens (`_packed`): these are compared
            and hashed in a third of the time that tuples of integers take.
        is_offloaded: whether it lies in the second tier.
        users: who needs it, or a chunk behind it.
        used_at: the higher, the later; never lower than that of a chunk behind it.
    """

    tokens: tuple[int, ...] = ()
    value: Value | None = None
    parent: "Node[Value] | None" = None
    children: dict[bytes, "Node[Value]"] = field(default_factory=dict)
    is_offloaded: bool = False
    users: int = 0
    used_at: int = 0

    @property
    def held(self) -> Value:
        """What is cached of a chunk that is not the root."""
        assert self.value is not None, "only the root has none"
        return self.value


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a prompt leaves what is cached.

    Attributes:
        position: of the first token that differs.
        cached: tokens from there on, of the latest cached prompt; not all if they are many.
    """

    position: int
    cached: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Match(Generic[Value]):
    """What is cached of a prompt's beginning.

    Attributes:
        nodes: the chunks, in order.
        node: the last chunk, the root if none.
        num_tokens: of all chunks.
        divergence: where the next chunk goes on otherwise than a cached one, if there is one.
    """

    nodes: list[Node[Value]]
    node: Node[Value]
    num_tokens: int
    divergence: Divergence | None


class PrefixTree(Generic[Value]):
    """Chunks of tokens by what precedes them.

    Attributes:
        num_tokens: cached, offloaded or not.
        idle_tokens: of chunks that are not offloaded and that nobody uses.

    Args:
        chunks: where chunks begin and end.
    """

    def __init__(self, chunks: PrefixChunks) -> None:
        self.chunks = chunks
        self.num_tokens = self.idle_tokens = 0
        self._root: Node[Value] = Node()
        self._clock = 0
        # Of both tiers, the least recently used first.
        self._ages: dict[bool, dict[Node[Value], None]] = {False: {}, True: {}}

    def match(self, token_ids: TokenIds) -> Match[Value]:
        """The longest beginning of `token_ids` that is cached; it counts as used.

        A first token waits for it: of an array [T] int64 it takes a third of a list's time.
        """
        node, start, packed = self._root, 0, _packed(token_ids)
        nodes: list[Node[Value]] = []
        while True:
            stop = start + self.chunks.width(start)
            child = node.children.get(packed[start * _ID_BYTES : stop * _ID_BYTES])
            if child is None:
                self._touch(node)
                chunk = np.frombuffer(packed, np.int64)[start:stop].tolist()
                return Match(nodes, node, start, _divergence(node, chunk, start))
            node, start = child, stop
            nodes.append(node)

    def child(self, parent: Node[Value], tokens: Sequence[int]) -> Node[Value] | None:
        """The chunk with these tokens behind `parent`, if it is cached; it counts as used."""
        node = parent.children.get(_packed(tokens))
        if node is not None:
            self._touch(node)
        return node

    def insert(
        self, parent: Node[Value], tokens: Sequence[int], value: Value
    ) -> tuple[Node[Value], bool]:
        """Cache a chunk behind `parent`, unless one with the same tokens is cached there.

        It counts as used, and so do those before it.

        Args:
            parent: a chunk in use, so that it is still cached; not offloaded.
            tokens: of the chunk.
            value: what to cache.

        Returns:
            The chunk that is cached, and whether it is the new one.
        """
        key = _packed(tokens)
        assert self.is_cached(parent), "it was evicted"
        assert not parent.is_offloaded, "what lies behind an offloaded chunk is offloaded"
        node, is_new = parent.children.get(key), False
        if node is None:
            node, is_new = Node(tuple(tokens), value, parent), True
            parent.children[key] = node
            self.num_tokens += len(tokens)
            self.idle_tokens += len(tokens)
        self._touch(node)
        return node, is_new

    def is_cached(self, node: Node[Value]) -> bool:
        """Whether a chunk was not evicted meanwhile."""
        return node is self._root or node.parent is not None

    def use(self, node: Node[Value]) -> None:
        """Hold a chunk and those before it in their tier, or the device's, until `release`."""
        assert self.is_cached(node), "it was evicted"
        for used in self._path(node):
            if not used.users and not used.is_offloaded:
                self.idle_tokens -= len(used.tokens)
            used.users += 1

    def advance(self, node: Node[Value]) -> None:
        """Use a chunk instead of the one before it; not offloaded."""
        assert self.is_cached(node), "it was evicted"
        assert not node.is_offloaded, "it is still to come"
        if not node.users:
            self.idle_tokens -= len(node.tokens)
        node.users += 1  # those before it have the user that they had

    def release(self, node: Node[Value]) -> None:
        """The opposite of `use`."""
        for used in self._path(node):
            assert used.users > 0, "nobody uses it"
            used.users -= 1
            if not used.users and not used.is_offloaded:
                self.idle_tokens += len(used.tokens)

    def oldest(self, *, is_offloaded: bool) -> Node[Value] | None:
        """The least recently used chunk of a tier that can leave it; None where none can.

        Nobody uses it, and of those behind it none is in its tier or, if it is offloaded, anywhere.
        """
        for node in self._ages[is_offloaded]:
            behind = (child.is_offloaded <= is_offloaded for child in node.children.values())
            if not node.users and not any(behind):
                return node
        return None

    def move(self, node: Node[Value], value: Value, *, is_offloaded: bool) -> None:
        """Take a chunk to the other tier, where `value` is what is cached of it.

        There it counts as the most recently used one.
        """
        assert node.is_offloaded is not is_offloaded, "it is there"
        assert node.parent is not None, "only chunks move"
        assert not (is_offloaded and node.users), "it is in use"
        assert is_offloaded or not node.parent.is_offloaded, "those before it first"
        del self._ages[node.is_offloaded][node]
        if not node.users:
            self.idle_tokens += -len(node.tokens) if is_offloaded else len(node.tokens)
        node.value, node.is_offloaded = value, is_offloaded
        self._ages[is_offloaded][node] = None

    def remove(self, node: Node[Value]) -> None:
        """Evict a chunk that nobody uses and that has none behind it."""
        assert node.parent is not None, "the root stays"
        assert not node.children, "others stand on it"
        assert not node.users, "it is in use"
        del node.parent.children[_packed(node.tokens)], self._ages[node.is_offloaded][node]
        node.parent = None
        self.num_tokens -= len(node.tokens)
        if not node.is_offloaded:
            self.idle_tokens -= len(node.tokens)

    @property
    def nodes(self) -> Iterator[Node[Value]]:
        """All chunks."""
        for ages in self._ages.values():
            yield from ages

    def check(self, used: Iterable[Node[Value]]) -> None:
        """Make sure that chunks have the users that they should.

        Args:
            used: the last chunk of every user.

        Raises:
            AssertionError: they have not, or the counts of tokens are wrong.
        """
        users = Counter(node for last in used for node in self._path(last))
        nodes = list(self.nodes)
        assert all(node.users == users.pop(node, 0) for node in nodes), "each has its users"
        assert not users, "a chunk in use is cached"
        assert self.num_tokens == sum(len(node.tokens) for node in nodes), "tokens are counted"
        idle = sum(len(n.tokens) for n in nodes if not n.users and not n.is_offloaded)
        assert self.idle_tokens == idle, "tokens that nobody uses are counted"

    def _touch(self, node: Node[Value]) -> None:
        self._clock += 1
        for used in self._path(node):
            used.used_at = self._clock
            ages = self._ages[used.is_offloaded]
            ages.pop(used, None)
            ages[used] = None

    def _path(self, node: Node[Value]) -> Iterator[Node[Value]]:
        """A chunk and those before it, without the root."""
        while node.parent is not None:
            yield node
            node = node.parent


_ID_BYTES = np.dtype(np.int64).itemsize


def _packed(token_ids: TokenIds) -> bytes:
    return np.asarray(token_ids, np.int64).tobytes()


def _divergence(node: Node[Value], chunk: Sequence[int], start: int) -> Divergence | None:
    best, begin = None, 0
    for child in node.children.values():
        common = 0
        for ours, cached in zip(chunk, child.tokens, strict=False):
            if ours != cached:
                break
            common += 1
        position = start + common
        # A prompt that ends there has not left it.
        if common == len(chunk) or position == 0:
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
