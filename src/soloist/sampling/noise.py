"""Gumbel noise that depends on (seed, position, token id) and on nothing else.

Random words come from the counter-based generator Philox4x32-10 (Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", SC'11), so any token's noise can be computed alone and anywhere.
"""

import numpy as np
from numpy.typing import NDArray

from soloist.sampling import constants
from soloist.sampling.elementary import (
    PART_TOKENS,
    FloatArray,
    IntArray,
    ln_of_parts,
    negative_ln,
    split,
)

Word = NDArray[np.uint64]  # values below 2^32, kept in 64 bits so that products are whole


def gumbel_noise(seed: int, position: int, token_ids: IntArray) -> FloatArray:
    """Noise of some tokens at one position.

    Args:
        seed: 0 … 2^64 - 1.
        position: index in prompt and output of the token to be chosen, 0 … 2^64 - 1.
        token_ids: [N] ascending, 0 … 2^34 - 1.

    Returns:
        [N] standard Gumbel values between -3.13 and 22.88.
    """
    parts = [
        gumbel_of_words(token_words(seed, position, token_ids[first : first + PART_TOKENS]))
        for first in range(0, len(token_ids), PART_TOKENS)
    ]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def token_words(seed: int, position: int, token_ids: IntArray) -> Word:
    """[N] random words: token `id` owns word `id` mod 4 of the Philox block `id` div 4."""
    blocks = token_ids >> 2
    first, last = int(blocks[0]), int(blocks[-1])
    # Where most blocks are wanted, making each once is cheaper than once per token.
    is_dense = len(token_ids) > last - first
    made = np.arange(first, last + 1) if is_dense else blocks
    low, high = position & constants.WORD_MASK, position >> 32
    counter = (made, low, high, constants.DOMAIN_TOKEN_CHOICE)
    words: Word = np.stack(philox(counter, seed), axis=1)
    places = token_ids - 4 * first if is_dense else 4 * np.arange(len(blocks)) + (token_ids & 3)
    chosen: Word = words.reshape(-1)[places]
    return chosen


def philox(counter: tuple[IntArray | int, ...], seed: int) -> tuple[Word, Word, Word, Word]:
    """Philox4x32-10 of a counter of four words under the key (seed's low, high word)."""
    c0, c1, c2, c3 = np.broadcast_arrays(*(np.asarray(word, np.uint64) for word in counter))
    even, odd = np.stack((c0, c2)), np.stack((c1, c3))
    column = (2,) + (1,) * c0.ndim
    multipliers = np.array(constants.PHILOX_MULTIPLIERS, np.uint64).reshape(column)
    mask, half = np.uint64(constants.WORD_MASK), np.uint64(32)
    for key in _round_keys(seed).reshape(-1, *column):
        products = (even * multipliers)[::-1]
        even = (products >> half) ^ odd ^ key
        odd = products & mask
    return even[0], odd[0], even[1], odd[1]


def _round_keys(seed: int) -> Word:
    """[rounds, 2] key words."""
    first = (seed & constants.WORD_MASK, seed >> 32)
    keys = [
        [
            (word + step * turn) & constants.WORD_MASK
            for word, step in zip(first, constants.PHILOX_KEY_STEPS, strict=True)
        ]
        for turn in range(constants.PHILOX_ROUNDS)
    ]
    return np.array(keys, np.uint64)


def gumbel_of_words(words: Word) -> FloatArray:
    """-ln(-ln(u)) of the uniform u = 1 - (word + ½) / 2^32, which is never 0 and never 1.

    Large values decide a choice, so u near 1 is carried as 1 - u, whose smallest value is 2^-33.
    """
    half, scale = np.float32(constants.HALF), np.float32(constants.WORD_SCALE)
    below_one = (words.astype(np.float32) + half) * scale
    uniform = ((constants.WORD_MASK - words).astype(np.float32) + half) * scale
    exponent, fraction = split(uniform)
    fraction = np.where(words < constants.NEAR_ONE_WORDS, -below_one, fraction)
    return negative_ln(-ln_of_parts(exponent, fraction))
