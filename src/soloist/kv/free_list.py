"""Which pages of a pool are free. Pure: page ids are integers."""

from collections.abc import Iterable
from collections.abc import Set as AbstractSet


class FreeList:
    """Page ids 0 … `num_pages` - 1; the one freed last is allocated first."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._allocated: set[int] = set()

    @property
    def num_free(self) -> int:
        """Pages that can be allocated."""
        return len(self._free)

    @property
    def allocated(self) -> AbstractSet[int]:
        """Pages that somebody has."""
        return self._allocated

    def allocate(self, count: int) -> list[int]:
        """`count` pages that nobody has; the caller checked `num_free`."""
        assert 0 <= count <= self.num_free, f"{count} pages asked for, {self.num_free} free"
        pages = [self._free.pop() for _ in range(count)]
        self._allocated.update(pages)
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Take back pages that were allocated, each once."""
        for page in pages:
            assert page in self._allocated, f"page {page} is not allocated"
            self._allocated.remove(page)
            self._free.append(page)
