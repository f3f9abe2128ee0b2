"""Gumbel noise that depends on (seed, position, token id) and on nothing else.

Random words come from the counter-based generator Philox4x32-10 (Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", SC'11), so any token's noise can be computed alone and anywhere.
"""

import math
from dataclasses import dataclass

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

# By how much a bound of noise, or a sum with it, may be off, beside a share of the sum: far more
# than quick logarithms and fp32 are.
_SLACK, _SLACK_SHARE = 1e-3, 1e-6


@dataclass(frozen=True, slots=True)
class Noise:
    """Noise of tokens at one position, exact where `noisy_argmax` asks for it.

    Attributes:
        words: [N] random words of the tokens.
        bounds: [N] values that their noise does not exceed by more than a little.
    """

    words: Word
    bounds: FloatArray


def noise_of(seed: int, position: int, token_ids: IntArray) -> Noise:
    """Noise of some tokens at one position.

    Args:
        seed: 0 … 2^64 - 1.
        position: index in prompt and output of the token to be chosen, 0 … 2^64 - 1.
        token_ids: [N] ascending, 0 … 2^34 - 1.
    """
    words = token_words(seed, position, token_ids)
    half, scale = np.float32(constants.HALF), np.float32(constants.WORD_SCALE)
    # -ln(-ln(1 - v)) <= -ln(v), by numpy's own logarithm.
    return Noise(words, -np.log((words.astype(np.float32) + half) * scale))


def noisy_argmax(scores: FloatArray, noise: Noise) -> int:
    """Index of the largest of score + noise, of equal ones the lowest.

    A bound takes a tenth of the time of noise. So noise is computed where the bound of a sum
    reaches the sum of the token whose bound is highest: of a few tokens mostly.

    Args:
        scores: [N], of which the largest is finite, and none is NaN.
        noise: [N], of the same tokens.
    """
    bounds = scores + noise.bounds
    first = int(bounds.argmax())
    least = float(scores[first]) + _approximate_noise(int(noise.words[first]))
    least -= _SLACK + _SLACK_SHARE * abs(least)
    near = np.flatnonzero(bounds >= np.float32(least))
    return int(near[(scores[near] + gumbel_of_words(noise.words[near])).argmax()])


def _approximate_noise(word: int) -> float:
    return -math.log(-math.log1p(-(word + constants.HALF) * constants.WORD_SCALE))


def token_words(seed: int, position: int, token_ids: IntArray) -> Word:
    """[N] random words: token `id` owns word `id` mod 4 of the Philox block `id` div 4.

    Arguments as of `noise_of`.
    """
    parts = [
        _words_of_part(seed, position, token_ids[first : first + PART_TOKENS])
        for first in range(0, len(token_ids), PART_TOKENS)
    ]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _words_of_part(seed: int, position: int, token_ids: IntArray) -> Word:
    blocks = token_ids >> 2
    first, last = int(blocks[0]), int(blocks[-1])
    # Where most blocks are wanted, making each once is cheaper than once per token.
    is_dense = len(token_ids) > last - first
    made = np.arange(first, last + 1) if is_dense else blocks
    low, high = position & constants.WORD_MASK, position >> 32
    by_block = np.empty((len(made), 4), np.uint64)
    counter = (made, low, high, constants.DOMAIN_TOKEN_CHOICE)
    for place, block_words in enumerate(philox(counter, seed)):
        by_block[:, place] = block_words
    words: Word = by_block.reshape(-1)
    start, stop = int(token_ids[0]) - 4 * first, int(token_ids[-1]) - 4 * first + 1
    if stop - start == len(token_ids):  # neighbours
        return words[start:stop]
    places = token_ids - 4 * first if is_dense else 4 * np.arange(len(blocks)) + (token_ids & 3)
    chosen: Word = words[places]
    return chosen


def philox(counter: tuple[IntArray | int, ...], seed: int) -> tuple[Word, Word, Word, Word]:
    """Philox4x32-10 of a counter of four words under the key (seed's low, high word)."""
    words = np.broadcast_arrays(*(np.asarray(word, np.uint64) for word in counter))
    c0, c1, c2, c3 = (word.copy() for word in words)
    first, second = (np.uint64(multiplier) for multiplier in constants.PHILOX_MULTIPLIERS)
    mask, half = np.uint64(constants.WORD_MASK), np.uint64(32)
    for low_key, high_key in _round_keys(seed):
        # In place where that is possible: numbers stay in the caches.
        of_first, of_second = c0 * first, c2 * second
        c0, c2 = (of_second >> half) ^ low_key, (of_first >> half) ^ high_key
        c0 ^= c1
        c2 ^= c3
        of_first &= mask
        of_second &= mask
        c1, c3 = of_second, of_first
    return c0, c1, c2, c3


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
