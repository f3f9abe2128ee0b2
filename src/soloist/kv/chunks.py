"""Where prompts are cut into chunks, which are read and cached as wholes. Pure.

What a pass computes for a token may depend, in its last bits, on how many tokens the pass has and
where it begins: libraries choose other kernels for other sizes. So boundaries follow from the
position alone, never from the prompt: then a chunk that was read for one prompt has the bits it
has in every other that begins alike. Where widths are batch-invariant, a pass may be any number of
chunks.
"""

from collections.abc import Iterator
from dataclasses import dataclass

# A pass of fewer tokens takes hardly less time: it waits for the weights.
LEAST_CHUNK_TOKENS = 256
# Chunks grow with what lies before them: a hit that ends inside of one reads at most such a share
# of it again, and far into a long prompt passes are few.
_SHARE = 4


@dataclass(frozen=True, slots=True)
class PrefixChunks:
    """Chunks of `finest` tokens at first, then of twice and four times as many, up to `widest`.

    Attributes:
        finest: tokens of the first chunk.
        widest: `finest` times a power of two.
    """

    finest: int
    widest: int

    def __post_init__(self) -> None:
        times, rest = divmod(self.widest, self.finest)
        assert times.bit_count() == 1, "chunks double"
        assert rest == 0, "chunks double"

    def width(self, position: int) -> int:
        """Tokens of the chunk that begins at `position`, a boundary."""
        width = self.finest
        while width < self.widest and width * 2 * _SHARE <= position:
            width *= 2
        return width

    def last_boundary(self, num_tokens: int) -> int:
        """Where the chunk begins that has the last one of so many tokens."""
        if self.finest == self.widest:
            return max(0, num_tokens - 1) // self.finest * self.finest
        start = 0
        while (end := start + self.width(start)) < num_tokens:
            start = end
        return start

    def whole(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """First and end of every whole chunk between `start`, a boundary, and `stop`."""
        while (end := start + self.width(start)) <= stop:
            yield start, end
            start = end


def growing_chunks(most_tokens: int) -> PrefixChunks:
    """The chunks of prompts that are cached, of at most `most_tokens` each."""
    finest = widest = min(LEAST_CHUNK_TOKENS, most_tokens)
    while widest * 2 <= most_tokens:
        widest *= 2
    return PrefixChunks(finest, widest)
