"""Marks within a text that grows: where one stands, and what may become one."""

from collections.abc import Sequence


def first_of(text: str, markers: Sequence[str]) -> tuple[int, str | None]:
    """Place and name of the first mark; (-1, None) without one."""
    found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    return min(found) if found else (-1, None)


def may_become(text: str, markers: Sequence[str]) -> int:
    """How many characters at the end begin a mark."""
    longest = max((len(marker) for marker in markers), default=0)
    for size in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-size:]) for marker in markers):
            return size
    return 0
