"""Follow a text that the answer will mostly repeat, and find the place again after a change.

A place in the prediction is as good as the answer's last tokens agree with those before the place,
token by token: the last one counts 1,024, each one before it three quarters of the next. So after a
token that was replaced the place behind it is still good. After an insertion or a deletion another
place becomes better within a token or two, since there the latest tokens agree.
"""

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from soloist.speculation.tokens import Ids, Tokens

# What agreement counts, from the last token backwards.
WEIGHTS = tuple(1024 * 3**i // 4**i for i in range(16))
_WEIGHTS = np.array(WEIGHTS[::-1], np.int64)
# What lies before the beginning of the prediction and of the answer, and so agrees: no token.
_BEFORE = np.full(len(WEIGHTS), np.iinfo(np.int32).min, np.int32)
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
        padded = np.concatenate((_BEFORE, ids))
        self._ids, self.at = padded[len(_BEFORE) :], 0
        # By place: the tokens before it.
        self._windows = sliding_window_view(padded, len(_BEFORE))
        self._answer = Tokens(_BEFORE)
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
        expected, latest = self.at, self._answer.ids[-len(_WEIGHTS) :]
        least = GOOD_HERE
        score = int((self._windows[expected] == latest) @ _WEIGHTS)
        places = (self._ids == token_id).nonzero()[0] + 1
        if len(places):
            scores = (self._windows[places] == latest) @ _WEIGHTS
            if (best := int(scores.max())) > score:
                score, least = best, GOOD_ELSEWHERE
                equal = places[scores == best].tolist()
                self.at = min(equal, key=lambda place: (abs(place - expected), -place))
        self._is_good = score >= least
