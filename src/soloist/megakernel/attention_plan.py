"""How attention is spread over the blocks of a KV head, and over the warps of a block. Pure."""

from dataclasses import dataclass

from soloist.kv.layout import PAGE_HALVES, PAGE_POSITIONS, KvLayout
from soloist.megakernel.gpu import Gpu
from soloist.megakernel.limits import CONSUMER_WARPS, MAX_QUERIES
from soloist.megakernel.shape import ModelShape
from soloist.megakernel.tile import HALF_TILE_ROWS, SLOT_BYTES, TILE_ROWS


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Attention of every layer: they all have the same heads.

    Attributes:
        shape: the heads.
        blocks: of each rank, or of each of its lanes.
        gpu: each rank's.
        kv: where keys and values lie.
    """

    shape: ModelShape
    blocks: int
    gpu: Gpu
    kv: KvLayout

    @property
    def splits(self) -> int:
        """Blocks of one KV head, a power of 2: block = head · splits + place."""
        most = self.gpu.architecture.tuning.max_splits
        return 1 << (min(most, self.blocks // self.shape.kv_heads).bit_length() - 1)

    @property
    def has_wide_queries(self) -> bool:
        """A query has more rows (query heads of a KV head) than half a tile."""
        return self.shape.group > HALF_TILE_ROWS

    @property
    def query_rows(self) -> int:
        """Rows from one query to the next; a wide one has a tile, which is padded."""
        return TILE_ROWS if self.has_wide_queries else self.shape.group

    @property
    def queries_together(self) -> int:
        """Queries that attend to a cache together, at most; a power of 2.

        Eight wide ones would have a tile for each warp, and so only one running softmax: a single
        query, whose bits are the same, would leave seven warps idle. Eight with 8 rows each would
        have two, where a warp takes one tile, and its four warps would multiply the same keys. Of
        four at a time there are half as many tiles, and twice as many softmaxes. More than four
        read a cache twice, but only one so long that all blocks of a KV head share it: shorter ones
        are dealt to blocks in smaller groups anyway.
        """
        fills_halves = self.query_rows == HALF_TILE_ROWS and self._most_warp_tiles == 1
        return MAX_QUERIES // 2 if self.has_wide_queries or fills_halves else MAX_QUERIES

    @property
    def row_tiles(self) -> int:
        """Tiles of 16 rows that queries which attend together need; a power of 2."""
        tiles = -(-self.queries_together * self.query_rows // TILE_ROWS)
        return 1 << (tiles - 1).bit_length()

    @property
    def held_tiles(self) -> int:
        """Tiles of rows of all 8 queries, which a block has at once."""
        return self.row_tiles * (MAX_QUERIES // self.queries_together)

    @property
    def warp_tiles(self) -> int:
        """Tiles of rows that one warp takes."""
        return min(self.row_tiles, self._most_warp_tiles)

    @property
    def _most_warp_tiles(self) -> int:
        """As many as its registers hold.

        Two of larger heads leave none for other phases, which are parked meanwhile. It pays where
        keys and values are codes: each warp that shares a half page takes them to numbers again.
        """
        tuning = self.gpu.architecture.tuning
        has_codes = not self.kv.format.is_plain and not self.has_wide_queries
        most_dim = tuning.coded_paired_dim if has_codes else 64
        return tuning.paired_warp_tiles if self.shape.head_dim <= most_dim else 1

    @property
    def softmax_lanes(self) -> int:
        """Independent running softmaxes in a block; fixed, so that a query's bits are."""
        return CONSUMER_WARPS * self.warp_tiles // self.row_tiles

    @property
    def unsplit_positions(self) -> int:
        """Seen positions below which a query's cache is one split."""
        page_bytes = self.kv.format.num_bytes(2 * self.shape.head_dim * PAGE_POSITIONS)
        return self.gpu.architecture.tuning.unsplit_bytes // page_bytes * PAGE_POSITIONS

    @property
    def split_positions(self) -> int:
        """From there on, so many seen positions make 2 splits, twice as many 4, and so on.

        On one GPU a step of 8 long sequences would merge too many splits, were they smaller.
        """
        unsplit, tuning = self.unsplit_positions, self.gpu.architecture.tuning
        return unsplit if self.shape.ranks == 1 else min(unsplit, tuning.ranks_split_positions)

    @property
    def rotation_layers(self) -> int:
        """Layers after which the blocks of a KV head take turns at its splits."""
        tuning = self.gpu.architecture.tuning
        return tuning.rotation_layers if self.shape.ranks == 1 else tuning.ranks_rotation_layers

    @property
    def chunk_pages(self) -> int:
        """Pages that go to the same split."""
        return self.gpu.architecture.tuning.chunk_pages

    @property
    def page_slot(self) -> bool:
        """A ring slot takes both half pages of a page, not one."""
        return self.page_bytes <= SLOT_BYTES + SLOT_BYTES // 32

    @property
    def page_bytes(self) -> int:
        """Keys and values of a page of one head."""
        return 2 * PAGE_HALVES * self.kv.half_page_bytes
