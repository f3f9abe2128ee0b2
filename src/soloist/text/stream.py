"""Text of a growing list of tokens, given out as early as it is certain.

Each token is looked at once, so the cost per token does not grow with the output. Knows nothing of
requests, chunks or time.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from soloist.text.stops import StopMatcher
from soloist.text.tokenizer import Tokenizer


class TextStream:
    """One generation's text.

    All pieces joined are `tokenizer.decode` of all ids, cut before the stop string that is complete
    first. What waits is what is not certain: the bytes of an unfinished character, a run of
    byte-fallback tokens (see `detokenizer.ByteRuns`) and what may become a stop string.

    Attributes:
        num_tokens: tokens taken, up to and including the one that completed a stop string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        shown_ids: AbstractSet[int] = frozenset(),
    ) -> None:
        """Start a stream that ends at any of the strings `stop`.

        Special tokens in `shown_ids` are not skipped.
        """
        self._token = tokenizer.token
        special_ids = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._skipped = special_ids - shown_ids
        self._detokenizer = tokenizer.detokenizer()
        self._stops = StopMatcher(stop)
        self.num_tokens = 0

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, None while there is none."""
        return self._stops.matched

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; return the text they make certain. After a stop: nothing."""
        pieces = []
        for token_id in token_ids:
            if self._stops.matched is not None:
                break
            self.num_tokens += 1
            if token_id in self._skipped or (token := self._token(token_id)) is None:
                continue
            pieces.append(self._stops.push(self._detokenizer.push([token])))
        return "".join(pieces)

    def finish(self) -> str:
        """The rest of the text. Nothing may be pushed afterwards."""
        return self._stops.push(self._detokenizer.finish()) + self._stops.finish()
