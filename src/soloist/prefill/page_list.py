"""Which pages of a pool are free. Pure: page ids are integers."""

from collections.abc import Iterable
from collections.abc import Set as AbstractSet


class PageList:
    """Page ids 0 … `num_pages` - 1; the one given back last is taken first."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        """Pages that can be taken."""
        return len(self._free)

    @property
    def taken(self) -> AbstractSet[int]:
        """Pages that somebody has."""
        return self._taken

    def take(self, count: int) -> list[int]:
        """`count` pages that nobody has; the caller checked `num_free`."""
        assert 0 <= count <= self.num_free, f"{count} pages asked for, {self.num_free} free"
        taken = [self._free.pop() for _ in range(count)]
        self._taken.update(taken)
        return taken

    def give_back(self, pages: Iterable[int]) -> None:
        """Return pages that were taken, each once."""
        for page in pages:
            assert page in self._taken, f"page {page} was not taken"
            self._taken.remove(page)
            self._free.append(page)
