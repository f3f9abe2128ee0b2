"""The tree of kept prompts against a model of itself: a list of whole beginnings."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from soloist.engine.prefix import Divergence, PrefixTree

BLOCK = 3
PROMPTS = st.lists(st.integers(0, 1), max_size=14)


class Prompts(RuleBasedStateMachine):
    """Model: every kept beginning (as a tuple), when it was used, and who uses it."""

    def __init__(self):
        super().__init__()
        self.tree: PrefixTree[tuple[int, ...]] = PrefixTree(BLOCK)
        self.used_at: dict[tuple[int, ...], int] = {}
        self.using: list[tuple[tuple[int, ...], object]] = []
        self.clock = 0

    def known(self, ids) -> int:
        """Tokens of the longest kept beginning."""
        size = 0
        while tuple(ids[: size + BLOCK]) in self.used_at and size + BLOCK <= len(ids):
            size += BLOCK
        return size

    def touch(self, ids, size) -> None:
        self.clock += 1
        for end in range(BLOCK, size + 1, BLOCK):
            self.used_at[tuple(ids[:end])] = self.clock

    @rule(ids=PROMPTS)
    def match(self, ids):
        match = self.tree.match(ids)
        size = self.known(ids)
        assert match.values == [tuple(ids[:end]) for end in range(BLOCK, size + 1, BLOCK)]
        self.touch(ids, size)
        assert match.divergence == self.divergence(ids, size)

    def divergence(self, ids, size):
        rest = tuple(ids[size : size + BLOCK])
        best = None
        for kept in self.used_at:
            if len(kept) != size + BLOCK or kept[:size] != tuple(ids[:size]):
                continue
            block = kept[size:]
            differs = [a != b for a, b in zip(rest, block, strict=False)]
            common = differs.index(True) if any(differs) else len(rest)
            if 0 < common < len(rest) and (best is None or size + common > best.position):
                best = Divergence(size + common, block[common:])
        return best

    @rule(ids=PROMPTS)
    def read(self, ids):
        """As an executor: take what is kept, insert every further whole block, stay in use."""
        node = self.tree.match(ids).node
        size = self.known(ids)
        self.touch(ids, size)
        self.tree.use(node)
        while size + BLOCK <= len(ids):
            block = ids[size : size + BLOCK]
            size += BLOCK
            child, is_new = self.tree.insert(node, block, tuple(ids[:size]))
            assert is_new
            self.clock += 1
            self.used_at[tuple(ids[:size])] = self.clock
            again, is_new = self.tree.insert(node, block, ())
            assert again is child
            assert not is_new
            self.clock += 1
            self.used_at[tuple(ids[:size])] = self.clock
            self.tree.use(child)
            self.tree.release(node)
            node = child
        self.using.append((tuple(ids[:size]), node))

    @precondition(lambda self: self.using)
    @rule(data=st.data())
    def finish(self, data):
        index = data.draw(st.integers(0, len(self.using) - 1))
        _, node = self.using.pop(index)
        assert self.tree.is_kept(node)
        self.tree.release(node)

    @rule(count=st.integers(0, 4))
    def drop(self, count):
        wanted = []
        for _ in range(count):
            free = [
                k for k in self.used_at
                if not any(o != k and o[: len(k)] == k for o in self.used_at)
                and not any(used[: len(k)] == k for used, _ in self.using)
            ]  # fmt: skip
            if not free:
                break
            oldest = min(free, key=self.used_at.__getitem__)
            wanted.append(oldest)
            del self.used_at[oldest]
        assert self.tree.drop(count) == wanted

    @invariant()
    def count(self):
        assert self.tree.num_blocks == len(self.used_at)


TestPrompts = Prompts.TestCase
TestPrompts.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
