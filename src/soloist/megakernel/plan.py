"""From (model, precision, GPU) to all the kernel is compiled with. Pure: no torch, no device.

The plan decides over how many blocks the work is spread, which rows each block owns, in which order
weights lie in memory, how attention splits the KV cache, what the exchange buffers are and how much
shared memory is left for the weight ring. `docs/kernel.md` explains why.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

from soloist.errors import ShapeUnsupported
from soloist.megakernel.gpu import Gpu
from soloist.megakernel.lanes import LaneShare, lane_of, modules_of, require_lanes, rules_of
from soloist.megakernel.layout import Buffer, end_of, stack
from soloist.megakernel.partition import (
    SLOT_VALUES,
    STEP_COLUMNS,
    TILE_ROWS,
    Matrix,
    RowOrder,
)
from soloist.megakernel.share import Share, part_of, share_of
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype

CONSUMER_WARPS = 8
# and four more: one that streams weights, one that talks to the host, two to make a group of four.
THREADS = (CONSUMER_WARPS + 4) * 32
MAX_COLUMNS = 8
GRANULE_POSITIONS = 32
PAGE_POSITIONS = 64
SLOT_BYTES = 2 * SLOT_VALUES * 2
MAX_SPLITS = 64
# Copies of 16 KB that a block has in flight. 32 KB reach 93 % of the bandwidth and leave the L2 as
# fast as if it had nothing to do, 48 KB 98 % and twice the time; more only wait, and what blocks
# exchange waits with them. Measured: see docs/experiments/.
COPIES_IN_FLIGHT = 3
# Blocks that stream so little of a layer wait for each other most of the time: they gain more by
# quick exchanges.
FEW_COPIES_IN_FLIGHT = 2
FEW_LAYER_BYTES = 512 * 1024
# Ranks wait for each other, too, and then hurry: copies while a third of the ring is free at most,
# while two thirds are, and beyond. Less so where little streams between exchanges, but for lanes,
# which do not wait for sums.
RANKS_COPIES_IN_FLIGHT = (2, 3, 4)
FEW_RANKS_COPIES_IN_FLIGHT = (2, 2, 3)
FEW_RANKS_LAYER_BYTES = 1024 * 1024
# Slots behind those of a full ring that come to the L2 meanwhile, and cycles from one to the next,
# which is the memory's pace. Where blocks of several GPUs stream as little as that of a layer they
# wait for each other with a full ring, and the stream disturbs them less, the more evenly it comes.
FETCH_SLOTS = 8
FETCH_CYCLES = 800
FETCH_LAYER_BYTES = 256 * 1024
TURNS = 4
# Tiles · steps of a multiply that are unrolled together: enough to have activations in flight, few
# enough for the instruction cache.
UNROLLED_TILE_STEPS = 16
MAX_DEPTH = 8
HEAD_GROUP_TILES = 8
# Of a consumer thread, for all but a multiply's sums, and for those of a tile.
MULTIPLY_REGISTERS = 120
TILE_REGISTERS = 4
# Sums of a tile that a warp adds to side by side, and slots that it takes before it gives one back.
MOST_CHAINS, BATCH_SLOTS = 4, 2
# The same where nobody has seen whether they are worth their registers.
FEW_CHAINS, FEW_BATCH_SLOTS = 2, 1
LEAST_RING_SLOTS = BATCH_SLOTS
REDUCE_BYTES = 16 * 1024
# Keys and values up to which one block serves a column of one KV head: it saves merging partial
# results, and they stream while the block waits for others anyway.
NEAR_BYTES = 192 * 1024
# Positions that a split of more has at least on several GPUs, whose blocks stream little else.
SPLIT_POSITIONS = 2 * PAGE_POSITIONS
# Consecutive layers in which a split has the same block. On one GPU what a block streams for it has
# to go round at once; ranks wait for it more than they stream, and code that is at hand is quicker.
TURN_LAYERS = 1
RANKS_TURN_LAYERS = 4
# Pages that go to the same split: fewer partial results to merge.
CHUNK_PAGES = 2
# Slots whose weights wait in registers while the activations are on their way.
EARLY_SLOTS = 4


@dataclass(frozen=True, slots=True)
class Operation:
    """One multiply of the round and how its loop is unrolled.

    Attributes:
        matrix: what is multiplied.
        group_tiles: tiles whose sums a warp keeps at once. A block's further tiles come after them.
        spare_registers: there are enough to leave out some of the unrolled steps at the end.
    """

    matrix: Matrix
    group_tiles: int
    spare_registers: bool

    @property
    def depth(self) -> int:
        """Steps of activations in flight; a divisor of all steps where one is near enough.

        Even, if not all steps, where two steps share a slot.
        """
        steps = self.matrix.steps
        most = min(steps, MAX_DEPTH, max(2, UNROLLED_TILE_STEPS // self.group_tiles))
        near = most // 2 if self.spare_registers else 1
        pairs = self.matrix.shares_slots
        fit = [d for d in range(1, most + 1) if not pairs or d % 2 == 0 or d == steps]
        return next((d for d in reversed(fit) if d > near and steps % d == 0), fit[-1])


@dataclass(frozen=True)
class Plan:
    """The decode kernel of every rank for one model.

    Of a model with lanes every rank runs several, side by side. A lane is to the kernel what a
    rank of an ordinary model is: sizes, buffers and blocks are those of one lane, if not said
    otherwise.

    Attributes:
        model: the whole.
        dtype: of weights and keys and values.
        gpu: each rank's, or its part of one.
        blocks: of each rank, or of each of its lanes.
        ranks: over how many the model is spread.
        columns: that shared memory has room for, up to `MAX_COLUMNS`. Fewer leave more of it to the
            ring; the rest of the plan is the same, and so are a column's bits.
        samples: it also has room for choosing tokens otherwise than by the largest logit.
    """

    model: ModelConfig
    dtype: Dtype
    gpu: Gpu
    blocks: int
    ranks: int = 1
    columns: int = MAX_COLUMNS
    samples: bool = True

    def with_room_for(self, columns: int, *, samples: bool) -> "Plan":
        """The same plan for launches of so many columns at most, that sample or do not."""
        return replace(self, columns=columns, samples=samples)

    @cached_property
    def share(self) -> ModelConfig:
        """Sizes of what one rank (or lane) has: the model's own where there is one."""
        return lane_of(self.model) if self.model.lanes else share_of(self.model, self.ranks)

    def part_of(self, rank: int) -> Share | LaneShare:
        """What a rank has of the model."""
        return part_of(self.model, self.ranks, rank)

    @property
    def lanes(self) -> int:
        """L; an ordinary model has one."""
        return self.model.lanes.num_lanes if self.model.lanes else 1

    @property
    def lanes_here(self) -> int:
        """Lanes of each rank."""
        return self.lanes // self.ranks if self.model.lanes else 1

    @property
    def grid_blocks(self) -> int:
        """Blocks of a rank: those of its lanes, one lane after the other."""
        return self.blocks * self.lanes_here

    @property
    def meets(self) -> bool:
        """Lanes become one stream before the head."""
        return self.model.lanes is not None and self.model.lanes.head == "replicate"

    @property
    def lane_turns(self) -> int:
        """Copies of what lanes tell each other: a lane hears it d layers later, and then tells.

        Who comes to a turn has heard everybody's of d layers before, who had by then heard what
        was told d layers before that: what was told 2 d layers ago, nobody needs any more.
        """
        assert self.model.lanes is not None, "lanes"
        return 2 * min(self.model.lanes.delay_layers, self.model.num_layers)

    @property
    def pool_kv_heads(self) -> int:
        """K in a rank's KV pool: of all its lanes, one after the other."""
        return self.kv_heads * self.lanes_here

    @property
    def query_heads(self) -> int:
        """Q."""
        return self.share.layers[0].attention.num_query_heads

    @property
    def kv_heads(self) -> int:
        """K."""
        return self.share.layers[0].attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        """D."""
        return self.model.layers[0].attention.head_dim

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.query_heads // self.kv_heads

    @property
    def intermediate(self) -> int:
        """F."""
        return self.share.layers[0].mlp.intermediate_size

    @cached_property
    def qkv(self) -> Operation:
        """Rows of q, k and v, by KV head."""
        rows = self.share.layers[0].attention.qkv_rows
        return self._operation("qkv", rows, self.model.hidden_size, RowOrder.HEADS)

    @cached_property
    def attention_output(self) -> Operation:
        """The projection after attention."""
        columns = self.query_heads * self.head_dim
        return self._operation(
            "attention_output", self.model.hidden_size, columns, RowOrder.NATURAL
        )

    @cached_property
    def gate_up(self) -> Operation:
        """Gate and up rows in pairs, in as few groups of tiles as registers allow."""
        rows, hidden = 2 * self.intermediate, self.model.hidden_size
        matrix = Matrix("gate_up", rows, hidden, RowOrder.PAIRED, self.blocks)
        groups = -(-matrix.max_tiles // self.most_tiles)
        if groups == 1 and self.grid_blocks * self.ranks != self.blocks:
            # A share has few rows for each block: smaller units part them more evenly.
            matrix = min(
                matrix, replace(matrix, order=RowOrder.FINELY_PAIRED),
                key=lambda m: m.max_block_bytes,
            )  # fmt: skip
        return self._in_groups(matrix, -(-matrix.max_tiles // groups))

    @cached_property
    def down(self) -> Operation:
        """The MLP's second matrix."""
        return self._operation("down", self.model.hidden_size, self.intermediate, RowOrder.NATURAL)

    @cached_property
    def head(self) -> Operation:
        """The LM head, in groups of tiles since its accumulators do not fit registers at once."""
        vocab, hidden = self.share.vocab_size, self.model.hidden_size
        least = Matrix("head", vocab, hidden, RowOrder.NATURAL, self.blocks).max_units
        # All groups full in all blocks, few rows of padding, and large groups: they read
        # activations less often.
        tiles, units = min(
            ((t, -(-least // (2 * t)) * 2 * t) for t in range(1, HEAD_GROUP_TILES + 1)),
            key=lambda choice: choice[1] * (1 + 0.01 * HEAD_GROUP_TILES / choice[0]),
        )
        matrix = Matrix("head", vocab, hidden, RowOrder.NATURAL, self.blocks, units * self.blocks)
        return self._in_groups(matrix, tiles)

    def _operation(self, name: str, rows: int, columns: int, order: RowOrder) -> Operation:
        matrix = Matrix(name, rows, columns, order, self.blocks)
        return self._in_groups(matrix, matrix.max_tiles)

    def _in_groups(self, matrix: Matrix, group_tiles: int) -> Operation:
        return Operation(matrix, group_tiles, self.gpu.moves_registers)

    @property
    def most_tiles(self) -> int:
        """Tiles whose sums fit the registers of a thread."""
        return (self.gpu.consumer_registers - MULTIPLY_REGISTERS) // TILE_REGISTERS

    @property
    def layer_operations(self) -> tuple[Operation, ...]:
        """The four multiplies of a layer, in order."""
        return (self.qkv, self.attention_output, self.gate_up, self.down)

    # Attention -----------------------------------------------------------------------------------

    @property
    def splits(self) -> int:
        """Blocks of one KV head, a power of 2: block = head · splits + place."""
        return 1 << (min(MAX_SPLITS, self.blocks // self.kv_heads).bit_length() - 1)

    @property
    def row_tiles(self) -> int:
        """Tiles of 16 rows (column, query head) that 8 columns need; a power of 2."""
        tiles = -(-MAX_COLUMNS * self.group // 16)
        return 1 << (tiles - 1).bit_length()

    @property
    def warp_tiles(self) -> int:
        """Tiles of rows that one warp takes: as many as its registers hold."""
        return min(self.row_tiles, 2 if self.head_dim <= 64 and self.gpu.moves_registers else 1)

    @property
    def softmax_lanes(self) -> int:
        """Independent running softmaxes in a block; fixed, so that a column's bits are."""
        return CONSUMER_WARPS * self.warp_tiles // self.row_tiles

    @property
    def near_positions(self) -> int:
        """Seen positions below which a column's cache is one split."""
        return NEAR_BYTES // (4 * self.head_dim * PAGE_POSITIONS) * PAGE_POSITIONS

    @property
    def split_positions(self) -> int:
        """From there on, so many seen positions make 2 splits, twice as many 4, and so on.

        On one GPU a step of 8 long sequences would merge too many splits, were they smaller.
        """
        near = self.near_positions
        return near if self.ranks == 1 else min(near, SPLIT_POSITIONS)

    @property
    def early_slots(self) -> int:
        """Slots whose weights wait in registers, where there are enough of both."""
        enough = self.gpu.moves_registers and self.ring_slots >= 2 * EARLY_SLOTS
        return EARLY_SLOTS if enough else 0

    @property
    def most_chains(self) -> int:
        """Sums of one tile side by side, where a block has few tiles."""
        return MOST_CHAINS if self.gpu.is_tuned else FEW_CHAINS

    @property
    def batch_slots(self) -> int:
        """Slots that a consumer warp takes before it gives one back."""
        return BATCH_SLOTS if self.gpu.is_tuned else FEW_BATCH_SLOTS

    @property
    def granule_bytes(self) -> int:
        """K or V of 32 positions of one head."""
        return GRANULE_POSITIONS * self.head_dim * 2

    @property
    def page_slot(self) -> bool:
        """A ring slot takes both granules of a page, not one."""
        return 4 * self.granule_bytes <= SLOT_BYTES

    @property
    def turn_layers(self) -> int:
        """Layers after which the blocks of a KV head take turns at its splits."""
        return TURN_LAYERS if self.ranks == 1 else RANKS_TURN_LAYERS

    # Memory --------------------------------------------------------------------------------------

    @cached_property
    def layer_bytes(self) -> int:
        """Packed weights of one layer that one block streams, one matrix after the other."""
        return sum(op.matrix.max_block_bytes for op in self.layer_operations)

    @property
    def copies_in_flight(self) -> tuple[int, int, int]:
        """Slots of weights that a block has asked for and that have not come yet, at most.

        With up to a third of the ring free, up to two thirds, and more.
        """
        few = self.layer_bytes <= FEW_LAYER_BYTES
        if self.ranks == 1:
            return (FEW_COPIES_IN_FLIGHT if few else COPIES_IN_FLIGHT,) * 3
        few |= self.model.lanes is None and self.layer_bytes <= FEW_RANKS_LAYER_BYTES
        return FEW_RANKS_COPIES_IN_FLIGHT if few else RANKS_COPIES_IN_FLIGHT

    @property
    def head_copies_in_flight(self) -> int:
        """The same for the head, which streams without exchanges."""
        return max(COPIES_IN_FLIGHT, self.copies_in_flight[2])

    @property
    def fetch_slots(self) -> int:
        """Slots that are brought to the L2 while the ring is full."""
        waits = self.ranks > 1 and self.layer_bytes <= FETCH_LAYER_BYTES
        return FETCH_SLOTS if waits and self.gpu.moves_registers else 0

    def matrix_offset(self, operation: Operation) -> int:
        """Bytes from the start of a block's layer (the head: of a block) to its matrix."""
        if operation is self.head:
            return self.layer_bytes * self.model.num_layers
        offset = 0
        for op in self.layer_operations:
            if op is operation:
                return offset
            offset += op.matrix.max_block_bytes
        raise AssertionError("an operation of this plan")

    @cached_property
    def block_stride(self) -> int:
        """Bytes from one block's weights to the next: an odd number of slots.

        All blocks walk through their parts at about the same speed; a stride with a large power of
        two in it would send them to the same few memory channels.
        """
        slots = -(-(self.matrix_offset(self.head) + self.head.matrix.max_block_bytes) // SLOT_BYTES)
        return (slots | 1) * SLOT_BYTES

    @property
    def image_bytes(self) -> int:
        """The allocation for all packed weights of a rank."""
        return self.block_stride * self.grid_blocks

    def block_bytes(self, block: int) -> int:
        """Weights that one block streams in a round."""
        layer = sum(op.matrix.block_bytes(block) for op in self.layer_operations)
        return layer * self.model.num_layers + self.head.matrix.block_bytes(block)

    @cached_property
    def streamed_bytes(self) -> int:
        """Weights that all blocks of a rank stream in a round, padding included."""
        return sum(self.block_bytes(block) for block in range(self.blocks)) * self.lanes_here

    @cached_property
    def vectors(self) -> dict[str, Buffer]:
        """fp32 norm weights and biases of one layer, in values from the layer's start."""
        attention, mlp = self.share.layers[0].attention, self.share.layers[0].mlp
        h, d = self.model.hidden_size, self.head_dim
        sizes = {"attention_norm": h, "mlp_norm": h}
        if attention.qk_norm:
            sizes |= {"q_norm": d, "k_norm": d}
        if attention.qkv_bias:
            sizes["qkv_bias"] = attention.qkv_rows
        if attention.output_bias:
            sizes["attention_output_bias"] = h
        if mlp.bias:
            sizes |= {"gate_up_bias": 2 * self.intermediate, "down_bias": h}
        return stack({name: (size,) for name, size in sizes.items()}, value_bytes=4)

    @property
    def layer_vector_values(self) -> int:
        """fp32 values of one layer's vectors."""
        return sum(b.num_bytes for b in self.vectors.values()) // 4

    @property
    def lane_vector_values(self) -> int:
        """fp32 values of all vectors: of every layer, then the final norm's."""
        return self.layer_vector_values * self.model.num_layers + self.model.hidden_size

    @property
    def vector_lanes(self) -> int:
        """Lanes of a rank that have vectors of their own."""
        own = self.model.lanes is not None and not self.model.lanes.shared_norm_scales
        return self.lanes_here if own else 1

    @property
    def logit_rows(self) -> int:
        """A column's logits that a rank makes, in the order of the vocabulary, and padding."""
        if self.model.lanes is None:
            return self.head.matrix.units * 8
        return -(-self.share.vocab_size * self.lanes_here // 8) * 8

    @cached_property
    def workspace(self) -> dict[str, Buffer]:
        """Exchange buffers in global memory, in copies that take turns."""
        rows = self.qkv.matrix.units * 8
        columns, blocks = MAX_COLUMNS, self.blocks

        def operand(op: Operation) -> tuple[int, ...]:
            # [32 columns of the matrix][column of the round][32] 16-bit values
            return (TURNS, op.matrix.steps * STEP_COLUMNS // 32, columns, 32 * 2)

        buffers = {
            "hidden_in": operand(self.qkv),
            "hidden_mid": operand(self.gate_up),
            "attended": operand(self.attention_output),
            "gated": operand(self.down),
            "squares_in": (TURNS, columns, blocks, 2 * 4),
            "squares_mid": (TURNS, columns, blocks, 2 * 4),
            "projected": (TURNS, columns, rows, 4),
            "partial": (TURNS, columns, self.query_heads, self.splits, self.head_dim, 4),
            "partial_stats": (TURNS, columns, self.query_heads, self.splits, 2 * 4),
        }
        if self.meets:
            buffers |= {
                "hidden_out": operand(self.head),
                "squares_out": (TURNS, columns, blocks, 2 * 4),
            }
        if self.model.lanes is None:
            buffers["best"] = (2, columns, self.ranks * blocks, 16)
        if self.model.lanes is None and self.ranks > 1:
            # Partial sums of the rows that a block owns, from every rank.
            sums = (TURNS, self.ranks, columns, self.down.matrix.units * 8, 4)
            buffers |= {"sums_mid": sums, "sums_in": sums}
            # For kernels that sample: which blocks' logits are here, and all of them.
            buffers |= self._sampled(blocks)
        return stack(buffers, value_bytes=1)

    @cached_property
    def told(self) -> dict[str, Buffer]:
        """What lanes tell each other, once in each rank, behind its lanes' workspaces.

        Values are pairs of 32 bits: a number and the turn that it is of.
        """
        if self.model.lanes is None:
            return {}
        lanes, columns = self.lanes, MAX_COLUMNS
        rows = self.down.matrix.units * 8
        buffers: dict[str, tuple[int, ...]] = {"best": (2, columns, lanes * self.blocks, 16)}
        for name, module in zip(("told_mid", "told_in"), modules_of(self.model), strict=True):
            if any(module.tells(layer) for layer in range(self.model.num_layers)):
                buffers[name] = (self.lane_turns, lanes, columns, rows, 8)
        if self.meets:
            buffers["told_out"] = (lanes, columns, rows, 8)
        if self.ranks > 1:
            buffers |= self._sampled(self.grid_blocks)
        return stack(buffers, value_bytes=1)

    @property
    def lane_workspace_bytes(self) -> int:
        """All exchange buffers of one lane."""
        return end_of(self.workspace)

    @property
    def sampled_rows(self) -> int:
        """Logits from one column to the next where tokens are sampled: on ranks, all of them."""
        return self.logit_rows if self.ranks == 1 else -(-self.model.vocab_size // 8) * 8

    def _sampled(self, blocks: int) -> dict[str, tuple[int, ...]]:
        return {"arrivals": (self.ranks, blocks, 4), "logits": (MAX_COLUMNS, self.sampled_rows, 4)}

    @property
    def workspace_bytes(self) -> int:
        """All exchange buffers of a rank."""
        return self.lane_workspace_bytes * self.lanes_here + end_of(self.told)

    @cached_property
    def shared(self) -> dict[str, Buffer]:
        """Shared memory of a block apart from the ring, in bytes."""
        hidden_rows, columns = self.down.matrix.max_units * 8, self.columns
        rows = 16 if columns == 1 else 16 * self.row_tiles
        return stack(
            {
                "reduce": (self.reduce_bytes,),
                "queries": (rows, self.head_dim, 2),
                "new_kv": (columns, 2, self.head_dim, 2),
                "residual": (columns, hidden_rows, 4),
                "stats": (self.softmax_lanes, rows, 2, 4),
                "rope": (columns, self.head_dim // 2, 2, 4),
                "sampling": (768,),
                "control": (384,),
            },
            value_bytes=1,
        )

    @property
    def reduce_bytes(self) -> int:
        """Shared memory in which warps add up their sums, and softmax lanes their results.

        One column needs room for the rows of the largest multiply, twice, so that a reduction may
        start while the last one is still read. What samples has its scratch there, too.
        """
        if self.columns > 1 or self.samples:
            return REDUCE_BYTES
        tiles = max(op.group_tiles for op in (*self.layer_operations, self.head))
        rows = -(-tiles * TILE_ROWS // 32) * 32
        attended = self.softmax_lanes * self.group * self.head_dim * 4
        return max(2 * CONSUMER_WARPS * rows * 4, attended)

    @property
    def wide_reduce_bytes(self) -> int:
        """What reductions may use outside of attention: the buffer and what lies behind it."""
        return self.shared["residual"].offset

    @cached_property
    def ring_slots(self) -> int:
        """16 KB slots of the ring: all the shared memory that is left."""
        used = sum(b.num_bytes for b in self.shared.values()) + 1024  # 1 KB for static variables
        return max(0, self.gpu.shared_bytes - used) // SLOT_BYTES

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self.ring_slots * SLOT_BYTES + sum(b.num_bytes for b in self.shared.values())

    def describe(self) -> str:
        """The plan for people."""
        lines = [
            f"{self.model.family} {self.dtype.value} on {self.gpu.arch}: {self.grid_blocks} of "
            f"{self.gpu.num_sms} SMs, {self.streamed_bytes / 1e9:.3f} GB of weights a round, "
            f"{max(self.block_bytes(b) for b in range(self.blocks)) / 1e6:.2f} MB in the busiest "
            f"block (mean {self.streamed_bytes / self.grid_blocks / 1e6:.2f})",
            f"ring {self.ring_slots} x {SLOT_BYTES // 1024} KB of {self.shared_bytes:,} bytes; "
            f"attention: up to {self.splits} splits a KV head, {self.softmax_lanes} softmax lanes",
        ]
        if self.model.lanes is not None:
            lines.append(self._describe_lanes())
        for op in (*self.layer_operations, self.head):
            m = op.matrix
            lines.append(
                f"  {m.name:<17} {m.rows:>7,} x {m.columns:<6,} {m.order:<8} "
                f"{m.units // m.blocks}-{m.max_units} units a block, {m.steps} steps, "
                f"{op.group_tiles} tiles together, {op.depth} steps ahead"
            )
        return "\n".join(lines)

    def _describe_lanes(self) -> str:
        lanes, (attention, mlp) = rules_of(self.model), modules_of(self.model)
        told = sum(m.tells(i) for m in (attention, mlp) for i in range(self.model.num_layers))
        waits = sum(m.sums(i) for m in (attention, mlp) for i in range(self.model.num_layers))
        row_bytes = 8 * self.model.hidden_size
        return (
            f"{self.lanes_here} of {self.lanes} lanes a rank, {self.blocks} blocks each; of "
            f"{2 * self.model.num_layers} partial results a round a lane tells {told}, "
            f"{row_bytes:,} bytes to each rank, heard {lanes.delay_layers} layers later; "
            f"{waits} are waited for"
        )


def make_plan(model: ModelConfig, dtype: Dtype, gpu: Gpu, ranks: int = 1) -> Plan:
    """The plan that wastes least: its busiest block's bytes times the number of blocks.

    All blocks share the memory's bandwidth, so what counts is how even the shares are.

    Args:
        model: the whole.
        dtype: of weights and keys and values.
        gpu: each rank's, or its part of one.
        ranks: over how many the model is spread.

    Raises:
        ShapeUnsupported: the kernel cannot run this model; the message says why.
    """
    _require_supported(model, dtype)
    if model.lanes is not None:
        require_lanes(model, ranks)
    first = Plan(model, dtype, gpu, 1, ranks)
    kv_heads = first.kv_heads
    # Every block has rows of every matrix: readers must not run ahead of the exchanges they skip.
    # Of q, k and v ranks and lanes have few; blocks without publish enough in the rest of a layer.
    whole = ranks == 1 and model.lanes is None
    owned = first.layer_operations[0 if whole else 1 :]
    most = min(gpu.num_sms // first.lanes_here, *(op.matrix.units for op in owned))
    if most < kv_heads:
        raise ShapeUnsupported(f"{kv_heads} KV heads", f"at most {most}, one for each block")
    # A tenth fewer SMs still draw the memory's full bandwidth.
    candidates = range(max(kv_heads, math.ceil(0.9 * most)), most + 1)
    plans = [Plan(model, dtype, gpu, blocks, ranks) for blocks in candidates]
    plan = min(plans, key=lambda p: p.blocks * max(map(p.block_bytes, range(p.blocks))))
    _require_fits(plan)
    return plan


def _require_fits(plan: Plan) -> None:
    """Shared memory has room for a ring, and registers for the sums of every multiply."""
    if plan.ring_slots < LEAST_RING_SLOTS:
        other = plan.shared_bytes - plan.ring_slots * SLOT_BYTES
        raise ShapeUnsupported(
            f"this model with {plan.gpu.shared_bytes:,} bytes of shared memory a block",
            f"{other + 1024 + LEAST_RING_SLOTS * SLOT_BYTES:,} and more",
        )
    for op in plan.layer_operations:
        rows, most = op.group_tiles * TILE_ROWS, plan.most_tiles * TILE_ROWS
        if rows > most:
            given = f"{rows} rows of {op.matrix.name} in one of {plan.blocks} blocks"
            raise ShapeUnsupported(given, f"at most {most}")


def _require_supported(model: ModelConfig, dtype: Dtype) -> None:
    first = model.layers[0]
    attention, mlp = first.attention, first.mlp
    checks = [
        # Lanes' rows are brought into the order that turns halves; see rope_in_halves.
        (
            model.lanes is not None or not model.rope.interleaved,
            "interleaved rope",
            "rope that is not interleaved",
        ),
        (dtype is not Dtype.FP32, "fp32 weights", "bf16 or fp16"),
        (
            attention.head_dim in (32, 64, 96, 128),
            f"head_dim {attention.head_dim}",
            "32, 64, 96, 128",
        ),
        (
            attention.queries_per_kv_head <= 8,
            f"{attention.queries_per_kv_head} query heads to a KV head",
            "at most 8",
        ),
        (model.hidden_size % 8 == 0, f"hidden_size {model.hidden_size}", "a multiple of 8"),
        (
            mlp.intermediate_size % 8 == 0,
            f"intermediate_size {mlp.intermediate_size}",
            "a multiple of 8",
        ),
    ]
    for layer in model.layers:
        same = (
            layer.mlp == mlp
            and layer.attention.num_query_heads == attention.num_query_heads
            and layer.attention.num_kv_heads == attention.num_kv_heads
            and layer.attention.head_dim == attention.head_dim
            and layer.attention.qk_norm == attention.qk_norm
            and layer.attention.qkv_bias == attention.qkv_bias
            and layer.attention.output_bias == attention.output_bias
        )
        checks.append(
            (same, "layers of different shapes", "layers that differ in window and rope only")
        )
    for fine, given, allowed in checks:
        if not fine:
            raise ShapeUnsupported(given, allowed)
