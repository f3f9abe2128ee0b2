"""How many rows a pass may have where what it computes for a token must not depend on that. Pure.

Libraries choose another kernel, and with it another order of adding, for another number of rows. A
width is a pass's number of rows, padding included. Widths are batch-invariant if each operation
gives a row the same bits at all of them, wherever the row lies. Passes begin at multiples of
`LEAST_CHUNK_TOKENS`, so rows that are so many apart are all that has to be compared. Narrower
passes have the last tokens of a prompt, behind all that is kept: their rows are compared with the
first ones of wider passes.
"""

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field, replace

from soloist.kv.chunks import LEAST_CHUNK_TOKENS

# Most tokens of a pass: more of them make library products hardly faster.
MOST_PASS_TOKENS = 2048
# Padding is at most a third of a pass, but in the narrowest.
_CANDIDATES = (256, 384, 512, 768, 1024, 1536, 2048)
# For tokens behind the last chunk of a prompt. Reading weights takes a GPU as long as 150 to 250
# rows: fewer than 128 would hardly be quicker.
_SHORT_CANDIDATES = (128, 192)
# First chunks of up to so many tokens run as captured graphs, and whole ones.
CAPTURED_TOKENS = (32, 64, 128, 256, 512, 1024)
# What a prompt's last tokens may be padded to: a wider pass would cost more than wide ones save.
_NARROW_TOKENS = 512
# Rows of a product that takes more than its pass has: all agree at the narrowest width of chunks.
MOST_PADDED_TOKENS = _NARROW_TOKENS


def candidate_widths(most_tokens: int) -> tuple[int, ...]:
    """Widths of passes of at most `most_tokens`, ascending; none where these are less than two."""
    widths = tuple(width for width in _CANDIDATES if width <= most_tokens)
    return (*_SHORT_CANDIDATES, *widths) if len(widths) > 1 else ()


@dataclass(frozen=True, slots=True)
class Widths:
    """What passes have.

    Attributes:
        passes: ascending.
        products: rows of a product that takes more than the pass has, by its name and the pass's.
    """

    passes: tuple[int, ...]
    products: Mapping[tuple[str, int], int] = field(default_factory=dict)

    def of_chunks(self) -> "Widths":
        """Those that hold a chunk, of which there is one at least."""
        passes = tuple(width for width in self.passes if width >= LEAST_CHUNK_TOKENS)
        return replace(self, passes=passes)


def batch_invariant_widths(
    behaviours: Mapping[int, Mapping[str, Hashable | None]], padded: Collection[str]
) -> Widths | None:
    """Batch-invariant widths: equal to the widest one for which it is worth it, and narrower ones.

    At the latter some products differ, and are computed at the narrowest wider width at which they
    do not.

    Args:
        behaviours: of each width and product, equal where widths give the same bits; None where
            not even the rows of a width do.
        padded: products that can be computed on more rows than a pass has.

    Returns:
        None where no two widths that hold a chunk are batch-invariant, the narrowest of them narrow
        enough for a prompt's end.
    """
    ascending = sorted(behaviours)
    for widest in reversed(ascending):
        wanted = behaviours[widest]
        agreeing = [w for w in ascending if behaviours[w] == wanted]
        whole = [w for w in agreeing if w >= LEAST_CHUNK_TOKENS]
        if None in wanted.values() or len(whole) < 2 or whole[0] > _NARROW_TOKENS:
            continue
        passes, products = list(agreeing), dict[tuple[str, int], int]()
        for width in (w for w in ascending if w < whole[0] and w not in agreeing):
            differing = [name for name, seen in behaviours[width].items() if seen != wanted[name]]
            if set(differing) <= set(padded):
                passes.append(width)
                for name in differing:
                    products[name, width] = next(
                        w for w in ascending if w > width and behaviours[w][name] == wanted[name]
                    )
        return Widths(tuple(sorted(passes)), products)
    return None


def width_of(num_tokens: int, widths: tuple[int, ...]) -> int:
    """The narrowest of ascending `widths` that holds so many tokens; there is one."""
    return next(width for width in widths if width >= num_tokens)
