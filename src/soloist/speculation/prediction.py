"""Follow a text that the answer will mostly repeat, and find the place again after a change.

A place in the prediction is as good as the answer's last tokens agree with those before the place,
token by token: the last one counts 1,024, each one before it three quarters of the next. So after a
token that was replaced the place behind it is still good. After an insertion or a deletion another
place becomes better within a token or two, since there the latest tokens agree.
"""

import numpy as np

from soloist.speculation.tokens import Ids, Tokens

# What agreement counts, from the last token backwards.
WEIGHTS = tuple(1024 * 3**i // 4**i for i in range(16))
_WEIGHTS = np.array(WEIGHTS, np.int64)
# Of a place elsewhere the two last tokens agree. Where the answer was before, less is enough: most
# of what came before a few replaced tokens.
GOOD_ELSEWHERE, GOOD_HERE = sum(WEIGHTS[:2]), WEIGHTS[0]


class Prediction:
    """A predicted text, and how far the answer has come in it.

    Attributes:
        at: index of the token that is expected next.

    Args:
        ids: the text.
    """

    def __init__(self, ids: Ids) -> None:
        self._ids, self.at = ids, 0
        self._answer = Tokens()
        self._is_good = True

    @property
    def ids(self) -> Ids:
        """The text."""
        return self._ids

    @property
    def is_good(self) -> bool:
        """Whether the answer follows the text at `at`."""
        return self._is_good

    @property
    def is_over(self) -> bool:
        """Whether the answer has come to its end, and follows it."""
        return self._is_good and self.at >= len(self._ids)

    def take(self, *token_ids: int) -> None:
        """The answer has gone on; the place is looked for once, however many tokens came.

        So the work of a round of several tokens is that of one.
        """
        self._answer.extend(token_ids)
        is_left = False
        for token_id in token_ids:
            follows = self._is_good and not is_left
            if follows and self.at < len(self._ids) and self._ids[self.at] == token_id:
                self.at += 1
                continue
            is_left = True
            self.at = min(self.at + 1, len(self._ids))
        if is_left:
            self._find(token_ids[-1])

    def next_ids(self, most: int) -> Ids:
        """What is expected next; nothing where the answer does not follow the text."""
        return self._ids[self.at : self.at + most] if self._is_good else self._ids[:0]

    def _find(self, token_id: int) -> None:
        """The best place; of equal ones the nearest to where replaced tokens would leave it."""
        expected = self.at
        places = np.append(np.flatnonzero(self._ids == token_id) + 1, expected)
        scores = self._scores(places)
        # One integer for each, so that the best is a maximum: score, nearness, place.
        distance = np.abs(places - expected)
        best = np.lexsort((places, -distance, scores))[-1]
        self.at = int(places[best])
        least = GOOD_HERE if self.at == expected else GOOD_ELSEWHERE
        self._is_good = int(scores[best]) >= least

    def _scores(
        self, places: np.ndarray[tuple[int], np.dtype[np.int64]]
    ) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """How well the answer agrees with what lies before each place.

        What lies before the beginning of both agrees.
        """
        back = np.arange(1, len(_WEIGHTS) + 1)
        ours, theirs = len(self._answer) - back, places[:, None] - back
        both = (ours >= 0) & (theirs >= 0)
        neither = (ours < 0) & (theirs < 0)
        same = np.zeros(theirs.shape, np.bool_)
        if len(self._ids):
            answer = self._answer.ids[np.maximum(ours, 0)]
            same = both & (self._ids[np.maximum(theirs, 0)] == answer)
        scores: np.ndarray[tuple[int], np.dtype[np.int64]] = (same | neither) @ _WEIGHTS
        return scores
