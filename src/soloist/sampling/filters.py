"""Which tokens may be chosen: top-k, then top-p among those, then min-p among those.

Probabilities enter as integer weights (elementary.py), so no result depends on the order of a sum.
The ranking of tokens is by score, highest first, and by id, lowest first, where scores are equal.
"""

import math

import numpy as np

from soloist.sampling.constants import FRACTION_BITS, WEIGHT_BITS
from soloist.sampling.elementary import FloatArray, IntArray, integer_weights
from soloist.sampling.params import SamplingParams

# Of a large vocabulary most tokens are far from the best: those within this gap are looked at
# first, if they are few. Which tokens pass does not depend on it.
_NEAR, _FEW = np.float32(8), 1024
_FIRST_LOOK = 256  # else; a wider look follows where this was too short


def survivors(scores: FloatArray, params: SamplingParams) -> IntArray:
    """Ids of the tokens that pass every filter, ascending; at least one.

    Args:
        scores: [V] after temperature; the largest is finite.
        params: top_k, top_p and min_p are used.
    """
    gaps = scores - scores.max()
    is_ranked = True
    if params.top_k is not None and params.top_k < len(gaps):
        ids = ranked(gaps, params.top_k)
        if params.top_p < 1:
            weights = integer_weights(gaps[ids])
            needed = _share(params.top_p, int(weights.sum()))
            ids = ids[: _num_needed(weights, needed)]
    elif params.top_p < 1:
        ids = _nucleus(gaps, params.top_p)
    elif params.min_p > 0:
        # All that may pass, and some more.
        least = math.log(fraction_steps(params.min_p) / (1 << FRACTION_BITS)) - 0.01
        ids, is_ranked = np.flatnonzero(gaps >= np.float32(least)), False
    else:
        ids, is_ranked = np.arange(len(gaps)), False
    if params.min_p > 0:
        ids = ids[integer_weights(gaps[ids]) >= _share(params.min_p, 1 << WEIGHT_BITS)]
    return np.sort(ids) if is_ranked else ids


def ranked(scores: FloatArray, count: int) -> IntArray:
    """Ids of the `count` best tokens, in the order of the ranking."""
    ids = np.flatnonzero(scores >= scores.max() - _NEAR)
    if not count <= len(ids) <= _FEW:
        ids = np.flatnonzero(scores >= np.partition(scores, -count)[-count])
    # Equal scores come in ascending id, and the stable sort keeps them so.
    return ids[np.argsort(-scores[ids], kind="stable")][:count]


def _nucleus(gaps: FloatArray, top_p: float) -> IntArray:
    near = np.flatnonzero(gaps >= -_NEAR)
    if len(near) <= _FEW and (ids := _nucleus_of(near, gaps, top_p)) is not None:
        return ids
    weights = integer_weights(gaps)
    needed = _share(top_p, int(weights.sum()))
    look = min(_FIRST_LOOK, len(gaps))
    while True:
        ids = ranked(gaps, look)
        best = weights[ids]
        if look == len(gaps) or int(best.sum()) >= needed:
            return ids[: _num_needed(best, needed)]
        look = min(16 * look, len(gaps))


def _nucleus_of(near: IntArray, gaps: FloatArray, top_p: float) -> IntArray | None:
    """The nucleus, in the order of the ranking, if these best tokens decide it; else None.

    A quick exponential says what the weights of all others sum up to, but for a little. If both
    ends of that lead to the same number of tokens, the exact sum does, too.
    """
    powers = np.exp(gaps)
    of_near, of_all = (float(x.sum(dtype=np.float64)) for x in (powers[near], powers))
    if of_near < top_p * of_all:
        return None
    ids = near[np.argsort(-gaps[near], kind="stable")]
    weights = integer_weights(gaps[ids])
    exact, rest = int(weights.sum()), (of_all - of_near) * (1 << WEIGHT_BITS)
    # A weight is rounded to a whole number; both exponentials are good to 3e-7 of their value.
    slack = 0.6 * len(gaps) + 1e-5 * abs(rest) + 1e-9 * exact
    least, most = exact + max(0, math.floor(rest - slack)), exact + math.ceil(rest + slack)
    count = _num_needed(weights, _share(top_p, least))
    is_certain = count == _num_needed(weights, _share(top_p, most)) <= len(ids)
    return ids[:count] if is_certain else None


def _num_needed(weights: IntArray, needed: int) -> int:
    """The length of the shortest prefix whose sum reaches `needed`; all if none does."""
    return int(np.searchsorted(np.cumsum(weights), needed)) + 1


def fraction_steps(fraction: float) -> int:
    """A share as a number of steps of 2^-24, at least one."""
    return max(1, round(fraction * (1 << FRACTION_BITS)))


def _share(fraction: float, total: int) -> int:
    """The least integer of at least `fraction` of `total`, `fraction` in steps of 2^-24."""
    return -(-fraction_steps(fraction) * total >> FRACTION_BITS)
