"""Regular expressions out of a configuration file, and whether trying one on a name takes long.

A file may come from anybody, and Python's matcher goes back over every choice that a pattern leaves
open: a repeat within a repeat can keep it on a name of 30 characters for hours. So choices are
counted before a pattern is used, from the tree that Python itself makes of it.
"""

import re
import warnings
from math import comb
from re import _constants, _parser  # type: ignore[attr-defined] # re says no more of a pattern
from typing import Any, Final

# Characters of a module's name, and the choices on the way through one: tenths of a second.
_LONGEST: Final = 40
_MOST: Final = 5_000_000
_REPEATS: Final = (
    _constants.MAX_REPEAT,
    _constants.MIN_REPEAT,
    _constants.POSSESSIVE_REPEAT,
)


def compile_bounded(pattern: str) -> re.Pattern[str]:
    """A pattern that any name matches, or does not, in bounded time.

    Raises:
        ValueError: it is no pattern, or leaves too many choices; says which in a few words.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what other versions of Python may read otherwise
            found = re.compile(pattern)
            tree = _parser.parse(pattern)
            (ways, repeats), tries = _choices(tree), _tries(tree)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if ways * tries * comb(_LONGEST + repeats, repeats) > _MOST:
        raise ValueError("it has a repeat within a repeat, or too many choices")
    return found


def _choices(tree: Any) -> tuple[int, int]:  # noqa: ANN401 - a list of Python's own
    """(ways through alternatives, repeats without end), both cut off where they are too many."""
    ways, repeats = 1, 0
    for kind, argument in tree:
        inner = [_choices(part) for part in _parts(kind, argument)]
        if (words := _words(kind, argument)) is not None:
            ways *= max(sum(word.startswith(other) for other in words) for word in words)
        elif kind is _constants.BRANCH:
            ways *= sum(own for own, _ in inner)
            repeats += max(own for _, own in inner)
        elif kind not in _REPEATS:
            for own_ways, own_repeats in inner:
                ways *= own_ways
                repeats += own_repeats
        else:
            (own_ways, own_repeats), (low, high) = inner[0], argument[:2]
            times = min(int(high), _LONGEST)
            if (own_ways, own_repeats) == (1, 0) and high > _LONGEST:
                repeats += 1
            else:
                ways *= own_ways**times * (times - min(int(low), times) + 1)
                repeats += own_repeats * times
        ways, repeats = min(ways, _MOST + 1), min(repeats, _LONGEST)
    return ways, repeats


def _tries(tree: Any) -> int:  # noqa: ANN401
    """The most words that are tried in one place, of which only few can be there."""
    most = 1
    for kind, argument in tree:
        words = _words(kind, argument)
        inner = max((_tries(part) for part in _parts(kind, argument)), default=1)
        most = max(most, inner, 1 if words is None else len(words))
    return most


def _words(kind: object, argument: Any) -> list[str] | None:  # noqa: ANN401
    """Alternatives that are plain text; None of others, and of what has no alternatives."""
    if kind is not _constants.BRANCH:
        return None
    if any(item is not _constants.LITERAL for part in argument[1] for item, _ in part):
        return None
    return ["".join(chr(code) for _, code in part) for part in argument[1]]


def _parts(kind: object, argument: Any) -> list[Any]:  # noqa: ANN401
    """Patterns inside an item of a pattern."""
    if kind is _constants.BRANCH:
        return list(argument[1])
    if isinstance(argument, _parser.SubPattern):
        return [argument]
    found = argument if isinstance(argument, tuple) else ()
    return [part for part in found if isinstance(part, _parser.SubPattern)]
