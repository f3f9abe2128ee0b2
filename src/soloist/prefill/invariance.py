"""Which widths of a pass are batch-invariant: random rows' products and attention, bit by bit.

What the libraries do on this device for these shapes is tried, not assumed. See `widths`.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from soloist.kv.chunks import LEAST_CHUNK_TOKENS
from soloist.prefill.attention import attend_packed

# Earlier keys that a pass finds, beside none.
_FAR_POSITION = 4096
# Tokens that the last pass of a prompt lacks for its width.
_MISSING_TOKENS = 36


def product_behaviours(
    multiply: Callable[[Tensor], Tensor], columns: int, widths: Sequence[int], like: Tensor
) -> dict[int, int | None]:
    """Of each width a number, the same for widths at which a product gives a row the same bits.

    Args:
        multiply: the product: [T, columns] to [T, rows]; the result is read before the next call.
        columns: what it sums over.
        widths: rows; of fewer than `LEAST_CHUNK_TOKENS` the bits are compared with the first rows
            of the others.
        like: of the factor's dtype and device.

    Returns:
        None for a width at which equal rows have different results in different places.
    """
    block = _random((LEAST_CHUNK_TOKENS, columns), like)
    seen: list[Tensor] = []
    behaviours: dict[int, int | None] = {}
    # The widest first: narrower ones are then compared with whole blocks.
    for width in sorted(widths, reverse=True):
        out = multiply(block.repeat(-(-width // LEAST_CHUNK_TOKENS), 1)[:width])
        first, *others = torch.split(_bits(out), LEAST_CHUNK_TOKENS)
        if not all(torch.equal(first[: len(other)], other) for other in others):
            behaviours[width] = None
            continue
        like_it = (n for n, one in enumerate(seen) if torch.equal(one[: len(first)], first))
        number = next(like_it, len(seen))
        if number == len(seen):
            seen.append(first.clone())
        behaviours[width] = number
    return behaviours


def attention_is_invariant(
    heads: tuple[int, int, int],
    window: int | None,
    context_tokens: int,
    widths: Sequence[int],
    like: Tensor,
) -> bool:
    """Whether a prompt's queries get the same bits in one pass and in several.

    Args:
        heads: Q, K and D.
        window: as of `attend_packed`.
        context_tokens: most keys.
        widths: ascending.
        like: of the pool's dtype and device.
    """
    num_query_heads, num_kv_heads, dim = heads
    widest = widths[-1]
    queries = _random((widest, num_query_heads, dim), like)
    last = (context_tokens - widest) // LEAST_CHUNK_TOKENS * LEAST_CHUNK_TOKENS
    for before in {0, min(_FAR_POSITION, last)}:
        keys, values = (_random((before + widest, num_kv_heads, dim), like) for _ in range(2))

        def attended(
            first: int, stop: int, rows: int,
            before: int = before, keys: Tensor = keys, values: Tensor = values,
        ) -> Tensor:  # fmt: skip
            padded = torch.zeros_like(queries[:rows])
            padded[: stop - first] = queries[first:stop]
            query_bounds = torch.tensor([0, stop - first], dtype=torch.int32, device=like.device)
            key_bounds = torch.tensor([0, before + stop], dtype=torch.int32, device=like.device)
            mixed = attend_packed(
                padded, keys, values, query_bounds, key_bounds, context_tokens, window
            )
            return _bits(mixed[: stop - first])

        end = widest - _MISSING_TOKENS
        whole = attended(0, end, widest)
        for width in widths:
            for first in range(0, widest - width + 1, LEAST_CHUNK_TOKENS):
                stop = min(first + width, end)
                if not torch.equal(attended(first, stop, width), whole[first:stop]):
                    return False
    return True


def _random(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """The same numbers each time."""
    generator = torch.Generator(like.device).manual_seed(0)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float32, device=like.device)
    return drawn.to(like.dtype)


def _bits(values: Tensor) -> Tensor:
    """As integers: zeros of both signs differ, and what is no number equals itself."""
    return values.view(torch.int32 if values.element_size() == 4 else torch.int16)
