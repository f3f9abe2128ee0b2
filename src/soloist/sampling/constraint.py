"""What a request's answer must look like, as far as choosing tokens needs to know. Pure.

Grammars stand behind it, or anything else that can say which tokens may come next.
"""

from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

# One bit a token: token i is bit i % 32 of word i // 32.
Words: TypeAlias = NDArray[np.uint32]


class Constraint(Protocol):
    """One answer that must have a certain form, followed token by token.

    Tokens that end generation are no part of it: `may_end` says when they may come.
    """

    @property
    def may_end(self) -> bool:
        """Whether the answer has the form as it is now."""

    @property
    def is_complete(self) -> bool:
        """Whether it may end and nothing may be appended."""

    def allowed(self) -> Words:
        """Bits [ceil(V / 32)] of the tokens that may come next; the caller's to change.

        Raises:
            GrammarFailed: it cannot be told any more.
        """

    def forced(self) -> list[int]:
        """Tokens that must come next, as many as are known; those that `allowed` alone allows."""

    def take(self, token_id: int) -> None:
        """Append a token.

        Raises:
            GrammarFailed: it is not allowed here.
        """

    def rollback(self, num_tokens: int) -> None:
        """Take the last tokens back."""


def num_words(vocab_size: int) -> int:
    """Words that hold a bit for each of V tokens."""
    return -(-vocab_size // 32)


def words_of(token_ids: list[int], vocab_size: int) -> Words:
    """Bits [ceil(V / 32)] of these tokens."""
    words = np.zeros(num_words(vocab_size), np.uint32)
    for token_id in token_ids:
        set_bit(words, token_id, value=True)
    return words


def set_bit(words: Words, token_id: int, *, value: bool) -> None:
    """Allow a token, or not."""
    bit = np.uint32(1 << token_id % 32)
    if value:
        words[token_id // 32] |= bit
    else:
        words[token_id // 32] &= ~bit


def has_bit(words: Words, token_id: int) -> bool:
    """Whether a token is allowed."""
    return bool(int(words[token_id // 32]) >> token_id % 32 & 1)


def flags_of(words: Words, vocab_size: int) -> NDArray[np.bool_]:
    """[V], one for each bit."""
    bits = np.unpackbits(words.astype("<u4").view(np.uint8), bitorder="little")
    return bits[:vocab_size].astype(np.bool_)
