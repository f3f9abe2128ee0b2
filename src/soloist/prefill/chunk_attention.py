"""Which attention a chunk has, and where it finds the keys of earlier chunks."""

import torch
from torch import Tensor

from soloist.kv.pool import PagePool
from soloist.model.config import ModelConfig
from soloist.prefill.attention import attend, attend_one, attend_packed, attend_whole
from soloist.prefill.buffers import Buffers
from soloist.prefill.elementwise import Chunk, Elementwise, Heads

# Positions up to which graphs serve later passes: their gathered keys have a place of their own,
# as large as these positions of one layer. Beyond, computing takes longer than launching.
REACH_TOKENS = 32_768


class ChunkAttention:
    """Attention of a chunk over all keys so far, its own included.

    Args:
        config: what the rank has.
        pool: has the keys and values of earlier chunks, and the chunk's own.
        operations: may have an attention of their own.

    Attributes:
        attends_whole: first chunks have the library's attention that is slow to set up.
        gathered: keys and values [reach, K, D] of one layer, which passes of `widths` read.
    """

    def __init__(self, config: ModelConfig, pool: PagePool, operations: Elementwise) -> None:
        self._config, self._pool, self._operations = config, pool, operations
        self.attends_whole = False
        self.gathered: tuple[Tensor, ...] = ()
        self._widths: tuple[int, ...] = ()

    def take_widths(self, widths: tuple[int, ...]) -> None:
        """Have passes of these widths read gathered keys and values, and a place for these.

        Where operations attend to pages nothing is gathered.
        """
        self._widths = widths
        if self._operations.attends_pages:
            return
        a, pool = self._config.layers[0].attention, self._pool
        reach = min(REACH_TOKENS, len(self._operations.rope_table))
        shape = (reach, a.num_kv_heads, a.head_dim)
        self.gathered = tuple(
            torch.empty(shape, dtype=pool.dtype, device=pool.device) for _ in range(2)
        )

    def fits_graph(self, chunk: Chunk) -> bool:
        """Whether a recorded pass of as many rows attends to what this chunk sees."""
        if self._operations.attends_pages:
            return True
        if self._has_width(chunk):
            return chunk.stop <= len(self.gathered[0])
        return chunk.position == 0

    def can_attend_whole(self, b: Buffers) -> bool:
        """Whether that library can; it sets itself up for as many rows."""
        if self._operations.attends or self._operations.attends_pages:
            return False  # nobody asks for it
        try:
            attend_whole(b.queries, b.keys, b.values)
        except RuntimeError:
            return False
        return True

    @property
    def arranges(self) -> bool:
        """Whether columns may be had in the order of `Products.takes_arranged`."""
        return self._operations.attends_pages

    def of_all(self, layer: int, chunk: Chunk, heads: Heads, *, arranged: bool = False) -> Tensor:
        """[T, Q · D]; keys of earlier chunks come back from the pool, with this one's.

        Columns are `arranged` only where it `arranges`.
        """
        assert not arranged or self.arranges, "in the order of heads"
        if self._operations.attends_pages:
            return self._operations.attend_pages(
                layer, chunk, heads.queries, chunk.query_bounds, arranged=arranged
            )
        window = self._window(layer)
        if self._has_width(chunk):
            return self._of_gathered(layer, chunk, heads.queries, chunk.query_bounds)
        if chunk.position == 0:
            sees_all = window is None or window >= chunk.num_rows
            if sees_all and self.attends_whole:
                return attend_whole(heads.queries, heads.keys, heads.values)
            return self._operations.attend(heads, window)
        return attend(heads.queries, *self._read(layer, chunk), window)

    def of_last(
        self, layer: int, chunk: Chunk, query: Tensor, heads: Heads, *, arranged: bool = False
    ) -> Tensor:
        """[1, Q · D] of the last token's query [1, Q, D]; `arranged` as of `of_all`."""
        assert not arranged or self.arranges, "in the order of heads"
        if self._operations.attends_pages:
            return self._operations.attend_pages(
                layer, chunk, query, chunk.last_ends[:2], arranged=arranged
            )
        window = self._window(layer)
        if self._has_width(chunk):
            return self._of_gathered(layer, chunk, query, chunk.last_ends[:2])
        if chunk.position == 0:
            return attend_one(
                query, heads.keys, heads.values, chunk.num_tokens, chunk.last_ends, window
            )
        return attend(query, *self._read(layer, chunk), window)

    def _has_width(self, chunk: Chunk) -> bool:
        """Whether a row's bits must not depend on the pass that it is in."""
        return chunk.num_rows in self._widths and not chunk.is_short_prompt

    def _window(self, layer: int) -> int | None:
        return self._config.layers[layer].attention.window

    def _of_gathered(
        self, layer: int, chunk: Chunk, queries: Tensor, query_bounds: Tensor
    ) -> Tensor:
        """The same for the last of a sequence's queries so far, by what the device knows of it."""
        keys, values = self.gathered
        if chunk.stop > len(keys):
            keys, values = (x.new_empty(chunk.stop, *x.shape[1:]) for x in self.gathered)
        self._operations.gather(layer, chunk, keys, values)
        most_keys = self._config.context_tokens
        return attend_packed(
            queries, keys, values, query_bounds, chunk.key_bounds, most_keys, self._window(layer)
        )

    def _read(self, layer: int, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Keys and values [S, K, D] that the chunk's queries see, its own among them."""
        window = self._window(layer)
        start = 0 if window is None else max(0, chunk.position + 1 - window)
        keys, values = self._pool.read(layer, chunk.page_table, start, chunk.stop)
        return keys.transpose(0, 1), values.transpose(0, 1)
