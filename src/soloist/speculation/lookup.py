"""Drafts from texts that are there anyway: prompt and answer so far, and earlier answers.

What followed the longest match of the latest tokens may follow again. A draft is no longer than
its match: a long one is far more often right.
"""

from collections.abc import Sequence

import numpy as np

from soloist.speculation.matching import Match, longest_match
from soloist.speculation.tokens import Ids, Tokens

# Shorter matches are mere chance.
LEAST_MATCH = 2
# Earlier answers that are kept, in tokens, at least as far as there are any; at most twice as many.
ARCHIVE_TOKENS = 16_384

NO_TOKEN = -1  # between two answers


class Archive:
    """Earlier answers, the latest ones, with a gap between any two.

    Args:
        most_tokens: that are kept.
    """

    def __init__(self, most_tokens: int = ARCHIVE_TOKENS) -> None:
        self._most, self._tokens = most_tokens, Tokens()

    @property
    def ids(self) -> Ids:
        """All of them; valid until the next `add`."""
        return self._tokens.ids

    def add(self, ids: Sequence[int]) -> None:
        """Keep an answer, as far as there is room; earlier ones make it."""
        self._tokens.extend([*ids, NO_TOKEN])
        if len(self._tokens) > 2 * self._most:
            self._tokens.keep_last(self._most)


def look_up(history: Ids, archive: Ids) -> tuple[Match, Ids] | None:
    """The longest match of the end of `history`, and in which text; of equal ones in `history`."""
    own = longest_match(history, history, LEAST_MATCH)
    least = LEAST_MATCH if own is None else own.length + 1
    other = longest_match(archive, history, least) if len(archive) else None
    if other is not None:
        return other, archive
    return None if own is None else (own, history)


def following(text: Ids, at: int, count: int) -> list[int]:
    """What follows in a text from `at` on; where it ends there, the same again, as in a loop.

    Nothing comes from behind a gap.
    """
    period = len(text) - at
    found = []
    for i in range(count):
        token_id = int(text[at + i % period])
        if token_id == NO_TOKEN:
            break
        found.append(token_id)
    return found


def as_ids(ids: Sequence[int] | Ids) -> Ids:
    """An array of token ids, of its own."""
    return np.array(ids, np.int32)
