"""The tree of cached prompts against a model of itself: a list of whole beginnings."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from soloist.kv.chunks import PrefixChunks, growing_chunks
from soloist.kv.prefix import Divergence, PrefixTree

CHUNKS = PrefixChunks(2, 4)
# Where they end.
ENDS = [2, 4, 6, 8, 10, 12, 14, 16, 20, 24]
PROMPTS = st.lists(st.integers(0, 1), max_size=22)


class Prompts(RuleBasedStateMachine):
    """Model: every cached beginning (as a tuple), its tier, when it was used, and who uses it."""

    def __init__(self):
        super().__init__()
        self.tree: PrefixTree[tuple[int, ...]] = PrefixTree(CHUNKS)
        # When it became the newest of its tier, by use or by moving there; and when it was used.
        self.used_at: dict[tuple[int, ...], int] = {}
        self.read_at: dict[tuple[int, ...], int] = {}
        self.offloaded: set[tuple[int, ...]] = set()
        self.using: list[tuple[tuple[int, ...], object]] = []
        self.clock = 0

    def known(self, ids) -> int:
        """Tokens of the longest cached beginning."""
        return max((e for e in ENDS if e <= len(ids) and tuple(ids[:e]) in self.used_at), default=0)

    def touch(self, ids, size) -> None:
        """The last chunk first: it goes before those that it stands on."""
        for end in reversed([e for e in ENDS if e <= size]):
            self.clock += 1
            self.used_at[tuple(ids[:end])] = self.read_at[tuple(ids[:end])] = self.clock

    @rule(ids=PROMPTS)
    def match(self, ids):
        match = self.tree.match(ids)
        size = self.known(ids)
        assert [node.held for node in match.nodes] == [tuple(ids[:e]) for e in ENDS if e <= size]
        assert match.num_tokens == size
        assert match.node is (match.nodes[-1] if size else self.tree._root)
        self.touch(ids, size)
        expected = self.divergence(ids, size)
        assert (match.divergence is None) == (expected is None)
        if expected is not None:
            at, cached = match.divergence.position, match.divergence.cached
            assert at == expected.position
            assert cached[: len(expected.cached)] == expected.cached, "then what is behind it"
            assert any(k[:at] == tuple(ids[:at]) and k[at:] == cached for k in self.used_at)

    def divergence(self, ids, size):
        end = min(e for e in ENDS if e > size)
        rest = tuple(ids[size:end])
        found = []
        for cached, read_at in self.read_at.items():
            if len(cached) != end or cached[:size] != tuple(ids[:size]):
                continue
            differs = [a != b for a, b in zip(rest, cached[size:], strict=False)]
            if any(differs) and (at := size + differs.index(True)):
                found.append((at, read_at, cached[at:]))
        return Divergence(max(found)[0], max(found)[2]) if found else None

    @rule(ids=PROMPTS)
    def read(self, ids):
        """As an executor: take what is cached, insert every further whole chunk, stay in use."""
        node = self.tree.match(ids).node
        size = self.known(ids)
        self.touch(ids, size)
        self.tree.use(node)
        for path in self.tree.match(ids).nodes:
            if path.is_offloaded:
                self.tree.move(path, path.held, is_offloaded=False)
                self.clock += 1
                self.used_at[path.held] = self.clock
                self.offloaded.discard(path.held)
        for end in [e for e in ENDS if size < e <= len(ids)]:
            for is_first in (True, False):
                child, is_new = self.tree.insert(node, ids[size:end], tuple(ids[:end]))
                assert child.held == tuple(ids[:end])
                assert is_new is is_first
                self.touch(ids, end)
            self.tree.advance(child)
            node, size = child, end
        self.using.append((tuple(ids[:size]), node))

    @precondition(lambda self: self.using)
    @rule(data=st.data())
    def finish(self, data):
        index = data.draw(st.integers(0, len(self.using) - 1))
        _, node = self.using.pop(index)
        assert self.tree.is_cached(node)
        self.tree.release(node)

    def is_used(self, chunk) -> bool:
        return any(used[: len(chunk)] == chunk for used, _ in self.using)

    def oldest(self, *, is_offloaded):
        """What may leave a tier: unused, nothing behind it in the tier or, if offloaded, at all."""
        free = [
            k for k in self.used_at
            if (k in self.offloaded) == is_offloaded
            and not self.is_used(k)
            and not any(
                o != k and o[: len(k)] == k and (is_offloaded or o not in self.offloaded)
                for o in self.used_at
            )
        ]  # fmt: skip
        return min(free, key=self.used_at.__getitem__, default=None)

    @rule(is_offloaded=st.booleans())
    def remove(self, is_offloaded):
        node = self.tree.oldest(is_offloaded=is_offloaded)
        assert (node and node.held) == self.oldest(is_offloaded=is_offloaded)
        if node is not None and not node.children:
            self.tree.remove(node)
            assert not self.tree.is_cached(node)
            del self.used_at[node.held], self.read_at[node.held]
            self.offloaded.discard(node.held)

    @rule()
    def offload(self):
        node = self.tree.oldest(is_offloaded=False)
        assert (node and node.held) == self.oldest(is_offloaded=False)
        if node is not None:
            self.tree.move(node, node.held, is_offloaded=True)
            self.clock += 1
            self.used_at[node.held] = self.clock
            self.offloaded.add(node.held)

    @invariant()
    def counts(self):
        begin = {end: max([e for e in ENDS if e < end], default=0) for end in ENDS}
        sizes = {k: len(k) - begin[len(k)] for k in self.used_at}
        assert self.tree.num_tokens == sum(sizes.values())
        assert self.tree.idle_tokens == sum(
            size for k, size in sizes.items() if k not in self.offloaded and not self.is_used(k)
        )


TestPrompts = Prompts.TestCase
TestPrompts.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def test_the_least_recently_used_chunk_goes_first_and_the_last_of_its_branch() -> None:
    tree: PrefixTree[str] = PrefixTree(PrefixChunks(2, 2))
    root = tree.match([]).node
    tree.use(root)
    first, _ = tree.insert(root, [1, 2], "first")
    tree.insert(first, [3, 4], "behind first")
    tree.insert(root, [5, 6], "second")
    tree.match([1, 2, 3, 4])
    went = []
    while (node := tree.oldest(is_offloaded=False)) is not None:
        went.append(node.held)
        tree.remove(node)
    assert went == ["second", "behind first", "first"]


def test_arrays_match_as_lists_do() -> None:
    tree: PrefixTree[str] = PrefixTree(PrefixChunks(2, 2))
    ids = [1, 2, 300, 2**31 - 1, 5]
    first, _ = tree.insert(tree.match([]).node, ids[:2], "first")
    tree.insert(first, ids[2:4], "second")
    for given in (ids, tuple(ids), np.array(ids, np.int64), np.array([*ids, 7], np.int64)[:-1]):
        match = tree.match(given)
        assert [node.held for node in match.nodes] == ["first", "second"]
        assert (match.num_tokens, match.divergence) == (4, None)
    match = tree.match(np.array([1, 2, 300, 4, 5], np.int64))
    assert match.divergence == Divergence(3, (2**31 - 1,))
    assert match.num_tokens == 2, "bytes that are alike in part are no chunk"


@pytest.mark.parametrize(
    ("most", "widths"),
    [
        (64, {0: 64, 640: 64, 64 * 1000: 64}),
        (512, {0: 256, 1792: 256, 2048: 512, 65536: 512}),
        (2048, {0: 256, 1792: 256, 2048: 512, 3584: 512, 4096: 1024, 8192: 2048, 131072: 2048}),
        (600, {0: 256, 2048: 512}),
    ],
)
def test_chunks_grow_with_what_lies_before_them(most: int, widths: dict[int, int]) -> None:
    chunks = growing_chunks(most)
    assert {position: chunks.width(position) for position in widths} == widths
    position, largest = 0, 0
    while position < 100_000:
        width = chunks.width(position)
        assert position % width == 0, "boundaries of wider chunks are boundaries"
        assert width >= largest
        position, largest = position + width, width


def test_whole_chunks_between_two_positions() -> None:
    assert list(PrefixChunks(2, 4).whole(12, 22)) == [(12, 14), (14, 16), (16, 20)]
    assert list(PrefixChunks(2, 4).whole(16, 19)) == []
