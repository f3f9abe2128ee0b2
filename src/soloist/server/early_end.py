"""When an answer that an editor shows has said enough: by its indentation, or by its time."""

import time
from collections.abc import Callable

_BLANK = " \t\r"


class EarlyEnd:
    """Follows one answer.

    Attributes:
        has_line: whether the answer has a line break.
        is_cut: whether a line is indented by too little; it and what follows are not shown.

    Args:
        least_indent: white space that every further line but empty ones begins with, in
            characters; the answer ends before another one.
        most_s: after the first text, of an answer that has a line break; None without a bound.
        now: the clock, in seconds.
    """

    def __init__(
        self,
        least_indent: int,
        most_s: float | None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._least_indent, self._most_s, self._now = least_indent, most_s, now
        self.has_line = False
        self.is_cut = False
        self._began: float | None = None
        self._held = ""  # white space, of which the next line decides
        self._indent: int | None = None  # of the line so far, until it has another character

    @property
    def is_over(self) -> bool:
        """Whether the answer should end."""
        if self.is_cut or self._most_s is None or self._began is None:
            return self.is_cut
        return self.has_line and self._now() - self._began >= self._most_s

    def push(self, text: str) -> str:
        """More of the answer; what of it may be shown."""
        if text and self._began is None:
            self._began = self._now()
        self.has_line = self.has_line or "\n" in text
        if not self._least_indent:
            return text
        shown = []
        for character in text:
            if character == "\n":
                self._held, self._indent = self._held + character, 0
            elif self._indent is None:
                shown.append(character)
            elif character in _BLANK:
                self._held, self._indent = self._held + character, self._indent + 1
            elif self._indent < self._least_indent:
                self.is_cut, self._held = True, ""
                break
            else:
                shown.append(self._held + character)
                self._held, self._indent = "", None
        return "".join(shown)

    def finish(self) -> str:
        """White space at the end, which nothing decided about."""
        held, self._held = self._held, ""
        return held
