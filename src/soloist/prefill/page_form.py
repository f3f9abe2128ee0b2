"""Attention straight from KV pages: what is compiled, and how the copy engine takes pages apart.

Of `cuda/kernels/attend_pages.cu`. Pure: no torch, no device.
"""

import math
from dataclasses import dataclass

from soloist.errors import ShapeUnsupported
from soloist.jit.source import Source
from soloist.jit.tensor_map import Boxes
from soloist.kv.layout import HALF_PAGE_POSITIONS, PAGE_HALVES, PAGE_POSITIONS, KvLayout
from soloist.megakernel.plan import Plan
from soloist.model.dtype import Dtype
from soloist.prefill.header import AWAIT_NS

KERNEL, ENTRY, MERGE_ENTRY = "kernels/attend_pages.cu", "attend_pages", "merge_splits"
ARCH = "sm_90a"
THREADS, MERGE_THREADS = 384, 256
# Positions whose sums begin anew. As many items of one row tile may be under way as it has splits:
# 25 at 100,000 positions. Sums of a split take as long to write and read again as 100 positions.
SPLIT_KEYS = 4096
# Rows of an item, and keys of a product.
TILE = 128
# By head dimension: as many tiles of keys or values ahead as shared memory has room for.
_SLOTS = {32: 12, 64: 8, 96: 6, 128: 4}
# Items of one split whose sums have room in memory: with more of them every SM has whole items.
_PARTIAL_ITEMS = 128
# All sums of splits take no more than this, and in a larger pool no more than such a share of it.
_MOST_PARTIAL_BYTES, _POOL_SHARE = 112 * 1024 * 1024, 64
_VALUE_BYTES, _SUM_BYTES = 2, 4
_BOX_COLUMNS = 32
_BOX_BYTES = _BOX_COLUMNS * _VALUE_BYTES


@dataclass(frozen=True, slots=True)
class PageForm:
    """The kernel for one model, or for one rank's share of it.

    Attributes:
        layout: of the pool.
        group: query heads that share keys.
        dtype: 16-bit.
        split_keys: positions of a split, a multiple of `TILE`.
    """

    layout: KvLayout
    group: int
    dtype: Dtype
    split_keys: int = SPLIT_KEYS

    @property
    def head_dim(self) -> int:
        """D."""
        return self.layout.head_dim

    @property
    def item_tokens(self) -> int:
        """Tokens whose queries of one KV head are an item."""
        return TILE // self.group

    @property
    def tile_bytes(self) -> int:
        """Of keys or of values; of queries as well."""
        return TILE * self.head_dim * _VALUE_BYTES

    @property
    def shared_bytes(self) -> int:
        """Of a block: queries, slots, and sums of splits before."""
        slots = (1 + _SLOTS[self.head_dim]) * self.tile_bytes
        return slots + TILE * self.head_dim * _SUM_BYTES

    @property
    def partial_bytes(self) -> int:
        """Of one split's sums of one item."""
        return TILE * self.head_dim * _SUM_BYTES + MERGE_THREADS * 4 * _SUM_BYTES

    def partials_bytes(self, num_pages: int) -> int:
        """Room for sums of splits beside a pool of so many pages, which one sequence may have all.

        A pass that has more of them does without splits.
        """
        splits = -(-num_pages * PAGE_POSITIONS // self.split_keys)
        most = max(_MOST_PARTIAL_BYTES, self.layout.pool_bytes(num_pages) // _POOL_SHARE)
        slots = min(_PARTIAL_ITEMS * splits, most // self.partial_bytes) if splits > 1 else 0
        return slots * self.partial_bytes

    def merging_blocks(self, rows: int) -> int:
        """Of the kernel that merges splits of up to so many rows: one for 32 columns of an item."""
        return -(-rows // self.item_tokens) * self.layout.num_heads * self.head_dim // _BOX_COLUMNS

    @property
    def source(self) -> Source:
        """What is compiled."""
        counts = {
            "kLayers": self.layout.num_layers,
            "kHeadDim": self.head_dim,
            "kGroupHeads": self.group,
            "kSplitKeys": self.split_keys,
            "kAttendThreads": THREADS,
            "kAttendSlots": _SLOTS[self.head_dim],
            "kAttendShared": self.shared_bytes,
        }
        spec = "\n".join(
            [
                "// Generated; see prefill/page_form.py.",
                "#pragma once",
                '#include "ptx/types.cuh"',
                f"constexpr bool kBf16 = {str(self.dtype is Dtype.BF16).lower()};",
                *(f"constexpr unsigned {name} = {n}u;" for name, n in counts.items()),
                f"constexpr unsigned long long kAwaitNs = {AWAIT_NS}ull;",
                self.layout.cuda,
                "",
            ]
        )
        return Source(KERNEL, spec)

    # --- copies -----------------------------------------------------------------------------------

    def queries(self, rows: int) -> Boxes:
        """Of queries [rows, Q, D]; a copy takes 32 columns of an item's rows."""
        kv_heads, group, head = self.layout.num_heads, self.group, self.head_dim * _VALUE_BYTES
        return Boxes(
            0,
            (_BOX_COLUMNS, group, rows, kv_heads, self.head_dim // _BOX_COLUMNS),
            (head, kv_heads * group * head, group * head, _BOX_BYTES),
            (_BOX_COLUMNS, group, self.item_tokens, 1, 1),
        )

    def keys(self, num_pages: int) -> tuple[Boxes, ...]:
        """Of a pool, by parity of rows and side; a copy takes one side of half of a half page.

        The rows of a copy are those of one parity, 0 8 2 10 4 12 6 14 and on for even ones: a
        thread then has scores of neighbours. A side is every other box of 32 columns where odd rows
        swap these; then odd rows' columns of a side lie where the other side's are of even rows.
        The fifth dimension counts 16 rows; a half page has keys first, then values.
        """
        row = self.head_dim * _VALUE_BYTES
        sides = 2 if self.layout.swaps_chunks else 1
        boxes = self.head_dim // _BOX_COLUMNS // sides
        sixteens = 2 * self._num_half_pages(num_pages) * HALF_PAGE_POSITIONS // 16
        return tuple(
            Boxes(
                parity * row + (side ^ parity if sides > 1 else side) * _BOX_BYTES,
                (_BOX_COLUMNS, 2, 4, boxes, sixteens),
                (8 * row, 2 * row, sides * _BOX_BYTES, 16 * row),
                (_BOX_COLUMNS, 2, 4, boxes, HALF_PAGE_POSITIONS // 16),
            )
            for parity in range(2)
            for side in range(sides)
        )

    def values(self, num_pages: int) -> Boxes:
        """Of a pool: a copy takes a half page, a row for each column of a head."""
        half_page, dim = self.layout.half_page_bytes, self.head_dim
        stride = 2 * half_page
        return Boxes(
            half_page,
            (HALF_PAGE_POSITIONS, dim, self._num_half_pages(num_pages), 1, 1),
            (HALF_PAGE_POSITIONS * _VALUE_BYTES, stride, stride, stride),
            (HALF_PAGE_POSITIONS, dim, 1, 1, 1),
        )

    def _num_half_pages(self, num_pages: int) -> int:
        return num_pages * self.layout.num_layers * self.layout.num_heads * PAGE_HALVES


def launch_scale(head_dim: int) -> float:
    """What scores are multiplied by before 2 to their power is taken."""
    return math.log2(math.e) / math.sqrt(head_dim)


# --- the choice -----------------------------------------------------------------------------------


def page_form(
    plan: Plan, *, asked: bool | None = None, shares_gpu: bool = False
) -> PageForm | None:
    """What prompts of a plan attend by; None where a library does, after keys were gathered.

    All who count memory, compile or load ask here.

    Args:
        plan: says architecture, heads, and how keys and values are stored.
        asked: True and False ask for the kernel and for the library; None takes the kernel where
            it runs, but for models with lanes, for which no test on a GPU has shown it.
        shares_gpu: several ranks run on one GPU. The kernel takes SMs whole, and others wait there.

    Raises:
        ShapeUnsupported: the kernel was asked for where it does not run.
    """
    if asked is False:
        return None
    obstacle = _obstacle(plan, shares_gpu=shares_gpu)
    if asked is None and (obstacle or plan.shape.has_lanes):
        return None
    if not obstacle:
        return PageForm(plan.kv_layout, plan.shape.group, plan.dtype)
    dims = ", ".join(map(str, _SLOTS))
    raise ShapeUnsupported(
        f"attention of prompts from KV pages {obstacle}",
        f"{ARCH}; 16 bits; {dims} numbers a head; a GPU for each rank",
    )


def _obstacle(plan: Plan, *, shares_gpu: bool) -> str:
    """Why the kernel does not run; empty where it does."""
    layout, group = plan.kv_layout, plan.shape.group
    if plan.gpu.arch != ARCH:
        return f"on {plan.gpu.arch}"
    if not layout.format.is_plain:
        return f"in {layout.format.name}"
    if layout.head_dim not in _SLOTS:
        return f"for {layout.head_dim} numbers a head"
    if group > TILE:
        return f"for {group} query heads to a KV head"
    return "by ranks that share a GPU" if shares_gpu else ""
