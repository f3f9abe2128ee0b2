"""The two tiers of the prefix cache: pages of the pool, and pages of the host's memory.

Chunks of prompts that were read stay cached in their pages until somebody needs these. Then the
least recently used ones are offloaded to the host, as far as its memory goes, and fetched when a
prompt begins with them; what finds no place is evicted. Pure: pages are integers, and who copies
them is told what to copy.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from soloist.kv.chunks import PrefixChunks
from soloist.kv.free_list import FreeList
from soloist.kv.layout import PAGE_POSITIONS
from soloist.kv.prefix import Node, PrefixTree

# A cached chunk and its pages, in the order of positions: of the pool or, offloaded, of the host.
PageNode = Node[list[int]]


class Host(Protocol):
    """Copies pages between the device and the host's memory, in the order in which it is told to.

    Attributes:
        num_pages: that the host's memory may hold.
    """

    num_pages: int

    def offload(self, pages: Sequence[int], host_pages: Sequence[int]) -> bool:
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


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """Prompt tokens in the prefix cache, and how many have moved since the start.

    Attributes:
        on_device: where they can be used at once.
        on_host: in the host's memory.
        offloaded: ever copied to the host.
        fetched: ever copied back.
        evicted: ever dropped from both.
    """

    on_device: int = 0
    on_host: int = 0
    offloaded: int = 0
    fetched: int = 0
    evicted: int = 0


class CacheTiers:
    """The pages of one pool and of the host, and what is cached in them.

    Attributes:
        pages: of the pool.
        host_pages: of the host's memory.
        tree: of what is cached; None where nothing ever is.
        before_reuse: called before pages of a cached chunk are given to somebody else.

    Args:
        num_pages: of the pool.
        chunks: where prompts are cut; None where nothing is cached.
        host: takes what is offloaded; None where nothing is.
    """

    def __init__(self, num_pages: int, chunks: PrefixChunks | None, host: Host | None) -> None:
        self.pages = FreeList(num_pages)
        self.host_pages = FreeList(0 if host is None else host.num_pages)
        self.tree: PrefixTree[list[int]] | None = None if chunks is None else PrefixTree(chunks)
        self._host = host
        self.before_reuse: Callable[[], None] = lambda: None
        self._num_offloaded = self._num_fetched = self._num_evicted = 0  # tokens, since the start

    @property
    def num_available(self) -> int:
        """Pages of the pool that `allocate` can give: free ones, and those of idle chunks."""
        idle = 0 if self.tree is None else self.tree.idle_tokens // PAGE_POSITIONS
        return self.pages.num_free + idle

    @property
    def cached(self) -> CachedTokens:
        """How many tokens are cached; may be asked from any thread."""
        # The engine's thread may be between two of these counts.
        on_host = (self.host_pages.num_pages - self.host_pages.num_free) * PAGE_POSITIONS
        num_cached = 0 if self.tree is None else self.tree.num_tokens
        return CachedTokens(
            on_device=max(0, num_cached - on_host),
            on_host=on_host,
            offloaded=self._num_offloaded,
            fetched=self._num_fetched,
            evicted=self._num_evicted,
        )

    def allocate(self, count: int) -> list[int]:
        """`count` pages of the pool, if need be instead of idle chunks.

        The caller checked `num_available`.
        """
        while self.pages.num_free < count:
            self._reclaim()
        return self.pages.allocate(count)

    def fetch(self, node: PageNode) -> None:
        """Begin to copy an offloaded chunk to pages of the pool; nobody uses these until `join`.

        The caller checked `num_available`.
        """
        assert self._host is not None, "it has the pages"
        host_pages, pages = node.held, self.allocate(len(node.held))
        try:
            self._host.fetch(host_pages, pages)
        except Exception:
            self.pages.free(reversed(pages))
            raise
        self.restore(node, pages)
        self._num_fetched += len(node.tokens)

    def restore(self, node: PageNode, pages: list[int]) -> None:
        """Have an offloaded chunk in pages of the pool, which hold the same bits or soon will."""
        assert self.tree is not None, "it holds the chunk"
        self.host_pages.free(reversed(node.held))
        self.tree.move(node, pages, is_offloaded=False)

    def join(self) -> None:
        """Whatever the device does from now on sees every chunk that was fetched."""
        if self._host is not None:
            self._host.join()

    def forget(self) -> None:
        """Drop every chunk that nobody uses, from both."""
        if self.tree is None:
            return
        self.before_reuse()
        self.join()
        for is_offloaded in (True, False):
            while (node := self.tree.oldest(is_offloaded=is_offloaded)) is not None:
                pages = node.held
                self._evict(node)
                if not is_offloaded:
                    self.pages.free(reversed(pages))

    def offload(self) -> None:
        """Free the pages of every chunk that nobody uses: the host has them, as far as it goes."""
        while self.tree is not None and self.tree.oldest(is_offloaded=False) is not None:
            self._reclaim()

    def _reclaim(self) -> None:
        """Free the pages of the least recently used idle chunk: offload it, or evict it."""
        assert self.tree is not None, "without cached chunks all available pages are free"
        node = self.tree.oldest(is_offloaded=False)
        assert node is not None, "the caller counted what is available"
        pages = node.held
        self.before_reuse()
        if (host_pages := self._offload(pages)) is not None:
            self.tree.move(node, host_pages, is_offloaded=True)
            self._num_offloaded += len(node.tokens)
        else:
            self.join()  # the chunk may still be on its way to these pages
            self._evict(node)
        self.pages.free(reversed(pages))

    def _offload(self, pages: Sequence[int]) -> list[int] | None:
        """Copy pages to the host, if need be instead of what was there longest without use."""
        if self._host is None or self.tree is None or len(pages) > self._host.num_pages:
            return None
        while self.host_pages.num_free < len(pages):
            if (node := self.tree.oldest(is_offloaded=True)) is None:
                return None
            self._evict(node)
        host_pages, is_there = self.host_pages.allocate(len(pages)), False
        try:
            is_there = self._host.offload(pages, host_pages)
        finally:
            if not is_there:
                self.host_pages.free(reversed(host_pages))
        return host_pages if is_there else None

    def _evict(self, node: PageNode) -> None:
        """Drop a chunk that nobody uses from the cache, and offloaded ones behind it."""
        assert self.tree is not None, "it holds the chunk"
        for child in list(node.children.values()):
            self._evict(child)
        self.tree.remove(node)
        self._num_evicted += len(node.tokens)
        if node.is_offloaded:
            self.host_pages.free(reversed(node.held))
