"""Where a text has been before: the longest match of its end.

On a GPU every thread compares some places, and the best of all is a maximum of two integers, length
and place: no order of comparing changes it.
"""

from dataclasses import dataclass

import numpy as np

from soloist.speculation.tokens import Ids

# Tokens that are compared at most, at each place.
MOST_MATCH = 32


@dataclass(frozen=True, slots=True)
class Match:
    """A place in a text before which the same tokens lie as at the end of another one.

    Attributes:
        length: how many, at most `MOST_MATCH`.
        at: index of the token after them.
    """

    length: int
    at: int


def longest_match(text: Ids, end: Ids, least: int) -> Match | None:
    """The longest match in `text` of the last tokens of `end`; of equal ones the latest.

    A token of `text` follows it; what is below 0 is none. `end` may be `text` itself: then its own
    end is no match.

    Args:
        text: where to look.
        end: whose last tokens to look for.
        least: None is returned for less.
    """
    most = min(len(end), len(text) - 1, MOST_MATCH)
    if most < least:
        return None
    places = np.flatnonzero(text[:-1] == end[-1]) + 1
    places = places[text[places] >= 0]
    length = 0
    while len(places):
        length, latest = length + 1, places
        if length == most:
            break
        places = places[places > length]
        places = places[text[places - length - 1] == end[-length - 1]]
    return Match(length, int(latest[-1])) if length >= least else None
