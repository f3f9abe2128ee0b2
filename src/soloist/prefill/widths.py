"""How many rows a pass may have where what it computes for a token must not depend on that. Pure.

Libraries choose another kernel, and with it another order of adding, for another number of rows. A
width is a pass's number of rows, padding included. Widths are batch-invariant if each operation
gives a row the same bits at all of them, wherever the row lies. Passes begin at multiples of
`LEAST_CHUNK_TOKENS`, so rows that are so many apart are all that has to be compared.
"""

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field

# Most tokens of a pass: more of them make library products hardly faster.
MOST_PASS_TOKENS = 2048
# Padding is at most a third of a pass, but in the narrowest.
_CANDIDATES = (256, 384, 512, 768, 1024, 1536, 2048)
# What a prompt's last tokens may be padded to: a wider pass would cost more than wide ones save.
_NARROW_TOKENS = 512


def candidate_widths(most_tokens: int) -> tuple[int, ...]:
    """Widths of passes of at most `most_tokens`, ascending; none where these are less than two."""
    widths = tuple(width for width in _CANDIDATES if width <= most_tokens)
    return widths if len(widths) > 1 else ()


@dataclass(frozen=True, slots=True)
class Widths:
    """What passes have.

    Attributes:
        passes: ascending.
        products: rows of a product that takes more than the pass has, by its name and the pass's.
    """

    passes: tuple[int, ...]
    products: Mapping[tuple[str, int], int] = field(default_factory=dict)


def batch_invariant_widths(
    behaviours: Mapping[int, Mapping[str, Hashable | None]], padded: Collection[str]
) -> Widths | None:
    """Batch-invariant widths: equal to the widest one for which it is worth it, and narrower ones.

    At the latter some products differ, and are computed at the narrowest width that does not.

    Args:
        behaviours: of each width and product, equal where widths give the same bits; None where
            not even the rows of a width do.
        padded: products that can be computed on more rows than a pass has.

    Returns:
        None where no two widths are batch-invariant, the narrowest of them narrow enough for a
        prompt's end.
    """
    ascending = sorted(behaviours)
    for widest in reversed(ascending):
        wanted = behaviours[widest]
        passes = [w for w in ascending if behaviours[w] == wanted]
        if None in wanted.values() or len(passes) < 2 or passes[0] > _NARROW_TOKENS:
            continue
        products, narrower = {}, []
        for width in (w for w in ascending if w < passes[0]):
            differing = [name for name, seen in behaviours[width].items() if seen != wanted[name]]
            if set(differing) <= set(padded):
                narrower.append(width)
                products.update(dict.fromkeys(((name, width) for name in differing), passes[0]))
        return Widths((*narrower, *passes), products)
    return None


def width_of(num_tokens: int, widths: tuple[int, ...]) -> int:
    """The narrowest of ascending `widths` that holds so many tokens; there is one."""
    return next(width for width in widths if width >= num_tokens)
