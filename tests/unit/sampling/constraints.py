"""Constraints without a grammar."""

import numpy as np

from soloist.errors import GrammarFailed
from soloist.sampling.constraint import num_words, set_bit, words_of


class Drawn:
    """Which tokens are allowed is drawn anew for every length and latest token.

    Among them always the first and the last of the vocabulary; the output may end where its length
    is a multiple of four.
    """

    is_complete = False

    def __init__(self, vocab_size: int, seed: int, share: float = 0.2) -> None:
        self._vocab_size, self._seed, self._share = vocab_size, seed, share
        self._taken: list[int] = []

    @property
    def may_end(self) -> bool:
        return len(self._taken) % 4 == 0

    def allowed(self) -> np.ndarray:
        state = [self._seed, len(self._taken), *self._taken[-1:]]
        flags = np.random.default_rng(state).random(self._vocab_size) < self._share
        words = np.zeros(num_words(self._vocab_size), np.uint32)
        for token_id in {0, self._vocab_size - 1, *map(int, np.flatnonzero(flags))}:
            set_bit(words, token_id, value=True)
        return words

    def forced(self) -> list[int]:
        return []

    def take(self, token_id: int) -> None:
        self._taken.append(token_id)

    def rollback(self, num_tokens: int) -> None:
        del self._taken[len(self._taken) - num_tokens :]


class Steps:
    """A set of allowed tokens for each place; what has one only is forced.

    Args:
        vocab_size: V.
        sets: by place; the output is complete behind the last one.
        ends: lengths at which it may end earlier.
    """

    def __init__(self, vocab_size: int, sets: list[set[int]], ends: tuple[int, ...] = ()) -> None:
        self._vocab_size, self._sets, self._ends = vocab_size, sets, ends
        self.taken: list[int] = []

    @property
    def may_end(self) -> bool:
        return self.is_complete or len(self.taken) in self._ends

    @property
    def is_complete(self) -> bool:
        return len(self.taken) == len(self._sets)

    def allowed(self) -> np.ndarray:
        here = set() if self.is_complete else self._sets[len(self.taken)]
        return words_of(sorted(here), self._vocab_size)

    def forced(self) -> list[int]:
        span: list[int] = []
        for place in range(len(self.taken), len(self._sets)):
            if len(self._sets[place]) != 1 or place in self._ends:
                break
            span += self._sets[place]
        return span

    def take(self, token_id: int) -> None:
        if self.is_complete or token_id not in self._sets[len(self.taken)]:
            raise GrammarFailed(len(self.taken), "not allowed")
        self.taken.append(token_id)

    def rollback(self, num_tokens: int) -> None:
        del self.taken[len(self.taken) - num_tokens :]
