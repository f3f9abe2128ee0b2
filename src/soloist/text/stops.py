"""Finds stop strings in a text that arrives in pieces, looking at each character once.

An Aho-Corasick automaton: its state stands for the longest end of the text that begins some stop
string, which is just the part that must be held back.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from soloist.errors import BadSampling


@dataclass(slots=True, eq=False)
class _Node:
    """A beginning of one or more stop strings, `depth` characters long."""

    depth: int
    after: dict[str, "_Node"] = field(default_factory=dict)
    shorter: "_Node | None" = None  # the longest proper end of it that is a beginning too
    match: str | None = None  # the longest stop string that it ends with


class StopMatcher:
    """Cuts a text at the stop string that is complete first.

    If one character completes several, the longest wins. The result does not depend on how the
    text is cut into pieces.

    Attributes:
        matched: the stop string found, None before.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        """Look for each of `stop`; refuses an empty string, which would match everywhere."""
        if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
            raise BadSampling("stop", stop, "a list of strings that are not empty")
        self.matched: str | None = None
        self._state = self._root = _automaton(tuple(stop))
        self._held = ""

    def push(self, text: str) -> str:
        """Take more text; return what comes before any present or possible stop string."""
        if self.matched is not None:
            return ""
        if not self._root.after:
            return text
        pending = self._held + text
        state = self._state
        for index, character in enumerate(text, start=len(self._held) + 1):
            while character not in state.after and state.shorter is not None:
                state = state.shorter
            state = state.after.get(character, self._root)
            if state.match is not None:
                self.matched = state.match
                self._held = ""
                return pending[: index - len(state.match)]
        self._state = state
        safe = len(pending) - state.depth
        self._held = pending[safe:]
        return pending[:safe]

    def finish(self) -> str:
        """What was held back, now that no more text comes."""
        held, self._held = self._held, ""
        return held


@lru_cache(maxsize=8)
def _automaton(stop: tuple[str, ...]) -> _Node:
    """Built once for all answers to a request: it takes some hundred bytes for each character."""
    root = _Node(0)
    for text in stop:
        node = root
        for character in text:
            node = node.after.setdefault(character, _Node(node.depth + 1))
        node.match = text
    waiting = deque([root])
    while waiting:
        node = waiting.popleft()
        for character, child in node.after.items():
            child.shorter = _longest_end(node, character, root)
            child.match = child.match or child.shorter.match
            waiting.append(child)
    return root


def _longest_end(node: _Node, character: str, root: _Node) -> _Node:
    shorter = node.shorter
    while shorter is not None:
        if character in shorter.after:
            return shorter.after[character]
        shorter = shorter.shorter
    return root
