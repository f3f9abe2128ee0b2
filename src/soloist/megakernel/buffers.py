"""The kernel's buffers: what blocks exchange in global memory, what a block has in shared. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product

from soloist.megakernel.attention_plan import AttentionPlan
from soloist.megakernel.experts import MOST_EXPERTS
from soloist.megakernel.layer_kind import CONVERTED_STEPS, LayerKind, Operation
from soloist.megakernel.layout import ALIGNMENT, Buffer, end_of, stack
from soloist.megakernel.limits import (
    CONSUMER_WARPS,
    EXCHANGE_COPIES,
    MAX_QUERIES,
    STATIC_SHARED_BYTES,
)
from soloist.megakernel.program import products_of
from soloist.megakernel.sampling_header import SAMPLE_SHARED_BYTES
from soloist.megakernel.shape import ModelShape
from soloist.megakernel.tile import HALF_TILE_ROWS, SLOT_BYTES, STEP_COLUMNS, TILE_ROWS

_REDUCE_BYTES = 16 * 1024
# Rows of each query that all warps add up at once, at least: a lane has one.
_LEAST_REDUCED_ROWS = 32
# 16-bit activations lie in chunks of so many columns of the matrix, one after the other.
OPERAND_COLUMNS = 32
# Of an activation that is converted: fp16, or two integers of 8 bits; see cuda/tile/one_query.cuh.
_CONVERTED_BYTES = 2
_POWER_BYTES = 4


@dataclass(frozen=True, slots=True)
class Activations:
    """What a buffer of 16-bit activations has room for.

    Attributes:
        columns: that a matrix is multiplied with.
        padded_columns: of all steps, the last of which may hold padding: zeros for good.
        slots: how many times that: once for each expert that the queries of a round can choose.
    """

    columns: int
    padded_columns: int
    slots: int = 1

    @property
    def slot_columns(self) -> int:
        """Columns from one slot to the next."""
        return self.padded_columns

    @property
    def chunks(self) -> int:
        """Of `OPERAND_COLUMNS` columns."""
        return self.slots * self.slot_columns // OPERAND_COLUMNS


@dataclass(frozen=True)
class Exchanges:
    """Buffers in global memory through which the blocks of all ranks exchange results.

    Attributes:
        shape: sizes.
        blocks: of each rank, or of each of its lanes.
        kinds: of the model's layers.
        head: the LM head.
        attention: how the cache is split.
        attention_blocks: see Plan.
    """

    shape: ModelShape
    blocks: int
    kinds: tuple[LayerKind, ...]
    head: Operation
    attention: AttentionPlan
    attention_blocks: int = 0

    @cached_property
    def operands(self) -> dict[str, Activations]:
        """Buffers of 16-bit activations, which matrices are multiplied with."""
        operands: dict[str, Activations] = {}
        for kind in self.kinds:
            for matrix in products_of(kind.layer):
                if matrix.operand not in ("gated", "shared_gated"):
                    activations = _activations(kind.operations[matrix.name])
                    operands.setdefault(matrix.operand, activations)
        for kind in self.kinds:
            operands.setdefault(self.gated(kind), _gated(kind))
            if (shared := _shared_gated(kind)) is not None:
                operands.setdefault(self.shared_gated(kind), shared)
        if any(kind.routes_early for kind in self.kinds):
            operands["hidden_router"] = operands["hidden_in"]
        return operands | ({"hidden_out": _activations(self.head)} if self.shape.meets else {})

    def gated(self, kind: LayerKind) -> str:
        """The buffer between gate_up and down: one for each size of MLP, or of experts.

        Padding columns of a matrix have to be zeros for good, and others are written.
        """
        return _numbered("gated", _gated(kind), map(_gated, self.kinds))

    def shared_gated(self, kind: LayerKind) -> str:
        """The same of an MLP beside experts, in a layer that has one."""
        own = _shared_gated(kind)
        assert own is not None, "there is one"
        found = (x for x in map(_shared_gated, self.kinds) if x is not None)
        return _numbered("shared_gated", own, found)

    @cached_property
    def workspace(self) -> dict[str, Buffer]:
        """Buffers of one rank (or lane), in copies that are used in turn."""
        shape, queries, blocks = self.shape, MAX_QUERIES, self.blocks

        def operand(activations: Activations) -> tuple[int, ...]:
            # [32 columns of the matrix][query of the round][32] 16-bit values
            return (EXCHANGE_COPIES, activations.chunks, queries, OPERAND_COLUMNS * 2)

        qkv = self.kinds[0].operations["qkv"].matrix  # of as many rows in all layers
        partial = (EXCHANGE_COPIES, queries, shape.query_heads, self.attention.splits)
        buffers = {
            **{name: operand(x) for name, x in self.operands.items() if name != "hidden_out"},
            "squares_in": (EXCHANGE_COPIES, queries, blocks, 2 * 4),
            "squares_mid": (EXCHANGE_COPIES, queries, blocks, 2 * 4),
            "projected": (EXCHANGE_COPIES, queries, qkv.units * HALF_TILE_ROWS, 4),
            "partial": (*partial, shape.head_dim, 4),
            "partial_stats": (*partial, 2 * 4),
        }
        logits = [kind.experts.num_logits for kind in self.kinds if kind.experts]
        if logits:
            parts = shape.summing_ranks if any(kind.routes_early for kind in self.kinds) else 1
            buffers["expert_logits"] = (EXCHANGE_COPIES, parts, queries, max(logits), 4)
        if self.attention_blocks:
            # How rounds ended, for blocks that choose no token; which of them have left.
            buffers["outcome"] = (4,)
            buffers["left"] = (self.attention_blocks, 4)
        if shape.meets:
            buffers["hidden_out"] = operand(_activations(self.head))
            buffers["squares_out"] = (EXCHANGE_COPIES, queries, blocks, 2 * 4)
        return stack(buffers | ({} if shape.has_lanes else self._for_all), value_bytes=1)

    @cached_property
    def published(self) -> dict[str, Buffer]:
        """What lanes write for each other, once in each rank, behind its lanes' workspaces."""
        if not self.shape.has_lanes:
            return {}
        start = self.lane_bytes * self.shape.lanes_here
        buffers = stack(self._for_all, value_bytes=1)
        return {name: replace(b, offset=start + b.offset) for name, b in buffers.items()}

    @property
    def _for_all(self) -> dict[str, tuple[int, ...]]:
        """What blocks of all ranks (and lanes) write."""
        shape = self.shape
        blocks = self.blocks * shape.lanes_here
        best = (2, MAX_QUERIES, shape.ranks * blocks, 16)
        buffers = {"best": best, **shape.partial_results}
        if shape.ranks > 1:
            # For kernels that sample: which blocks' logits are here, and all of them.
            buffers["arrivals"] = (shape.ranks, blocks, 4)
            buffers["logits"] = (MAX_QUERIES, self.sampled_rows, 4)
        return buffers

    @property
    def best(self) -> Buffer:
        """The best tokens of all blocks, in a rank."""
        return (self.workspace | self.published)["best"]

    @property
    def lane_bytes(self) -> int:
        """The workspace of one rank, or of one of its lanes."""
        return end_of(self.workspace)

    @property
    def num_bytes(self) -> int:
        """All exchange buffers of a rank."""
        return max(self.lane_bytes * self.shape.lanes_here, end_of(self.published))

    @property
    def logit_rows(self) -> int:
        """A query's logits that a rank makes, in the order of the vocabulary, and padding."""
        if not self.shape.has_lanes:
            return self.head.matrix.units * HALF_TILE_ROWS
        return _padded(self.shape.share.vocab_size * self.shape.lanes_here)

    @property
    def sampled_rows(self) -> int:
        """Logits from one query to the next where tokens are sampled: on ranks, all of them."""
        if self.shape.ranks == 1:
            return self.logit_rows
        return _padded(self.shape.model.vocab_size)


def _activations(op: Operation) -> Activations:
    return Activations(op.matrix.columns, op.matrix.padded_columns)


def _gated(kind: LayerKind) -> Activations:
    """What lies between gate_up and down."""
    activations = _activations(kind.operations["down"])
    if kind.experts is None:
        return activations
    return replace(activations, slots=kind.experts.most_slots(MAX_QUERIES))


def _shared_gated(kind: LayerKind) -> Activations | None:
    """The same of an MLP beside experts, where there is one."""
    down = kind.operations.get("shared.down")
    return None if down is None else _activations(down)


def _numbered(name: str, own: Activations, of_kinds: Iterable[Activations]) -> str:
    """`name`, or `name_1` and so on where kinds of layers have activations of several sizes."""
    place = list(dict.fromkeys(of_kinds)).index(own)
    return f"{name}_{place}" if place else name


# Which buffers come after which.
_ORDER = ("reduce", "q_rows", "new_kv", "residual", "stats", "rope", "sampling", "control")
_CONVERTING_ORDER = (
    "reduce", "converted", "new_kv", "residual", "rope", "sampling", "control"
)  # fmt: skip


def _reduction_bytes(op: Operation) -> int:
    """Sums of all warps for the rows of a group of tiles, in fp32, of one query."""
    return _sums_bytes(op.group_tiles)


def _sums_bytes(tiles: int) -> int:
    return CONSUMER_WARPS * -(-tiles * TILE_ROWS // 32) * 32 * 4


def _padded(rows: int) -> int:
    return -(-rows // HALF_TILE_ROWS) * HALF_TILE_ROWS


@dataclass(frozen=True)
class SharedMemory:
    """A block's dynamic shared memory: the ring, then buffers.

    Attributes:
        shape: sizes.
        attention: how a block attends.
        operations: all multiplies.
        hidden_rows: of the residual stream, in the block that has the most.
        room: bytes that a block may take.
        queries: of a launch, at most.
        samples: there is also room for choosing tokens otherwise than by the largest logit.
        most_slots: distinct experts that the queries of a launch can choose; 0 without experts.
        gates_shared: some layer's MLP beside experts has a gate.
        routes_early: see LayerKind.
        tiles_together: of experts' gate_up, that are added up side by side; 0 where none are.
        converted_steps: whose activations of one query have room in another form, for weights that
            are quantised.
        shortens_reductions: of several queries, where that makes the ring longer.
    """

    shape: ModelShape
    attention: AttentionPlan
    operations: Sequence[Operation]
    hidden_rows: int
    room: int
    queries: int
    samples: bool
    most_slots: int = 0
    gates_shared: bool = False
    routes_early: bool = False
    tiles_together: int = 0
    converted_steps: int = CONVERTED_STEPS[0]
    shortens_reductions: bool = False

    @cached_property
    def buffers(self) -> dict[str, Buffer]:
        """What lies behind the ring, in bytes from its end.

        Several queries' sums of a large gate_up are added up in parts, and fewer parts are quicker:
        what is too little for one more slot of the ring is room for them.
        """
        least = self._with_reductions_in(self._least_reduce_bytes)
        if self.queries == 1 or all(op.matrix.format.is_plain for op in self.operations):
            return least
        if self.shortens_reductions:
            shortest = self._with_reductions_in(self._shortest_reduce_bytes)
            if self._slots_beside(shortest) > self._slots_beside(least):
                least = shortest
        left = (self.room - STATIC_SHARED_BYTES - end_of(least)) % self.slot_bytes
        # Static variables grow with it: there is a list of the queries whose softmaxes lie there.
        left -= ALIGNMENT
        largest = self.queries * max(map(_reduction_bytes, self.operations))
        wanted = largest - least["residual"].offset
        more = max(0, min(left, wanted)) // ALIGNMENT * ALIGNMENT
        return self._with_reductions_in(least["reduce"].num_bytes + more)

    @property
    def _of_attention(self) -> dict[str, tuple[int, ...]]:
        """A block's queries, and the statistics of its softmax lanes."""
        rows = TILE_ROWS if self.queries == 1 else TILE_ROWS * self.attention.held_tiles
        return {
            "q_rows": (rows, self.shape.head_dim, 2),
            "stats": (self.attention.softmax_lanes, rows, 2, 4),
        }

    def _with_reductions_in(self, reduce_bytes: int) -> dict[str, Buffer]:
        queries, head_dim, of_attention = self.queries, self.shape.head_dim, self._of_attention
        found = {
            "reduce": (reduce_bytes,),
            **({"converted": (self._converting_bytes,)} if self.converts else of_attention),
            "new_kv": (queries, 2, head_dim, 2),
            "residual": (queries, self.hidden_rows, 4),
            "rope": (queries, head_dim // 2, 2, 4),
            "sampling": (768,),
            "control": (384,),
        }
        order = _CONVERTING_ORDER if self.converts else _ORDER
        sizes = {name: found[name] for name in order}
        if self.most_slots:
            # See `ExpertSlots` in cuda/tile/slots.cuh, and `router` in cuda/ops/experts.cuh.
            words = 1 + queries * (MOST_EXPERTS // 32) + self.most_slots * (2 + queries)
            words += queries if self.gates_shared else 0
            sizes["choice"] = (words, 4)
            parts = 2 if self.routes_early else 1  # of the stream, and of attention
            sizes["expert_logits"] = (2, parts, CONSUMER_WARPS, queries, 4)
        buffers = stack(sizes, value_bytes=1)
        if not self.converts:
            return buffers
        # No block attends and converts at the same time: what others wait for, it has read. Results
        # of its softmax lanes go on behind the reductions, as far as that.
        shared = stack(of_attention, value_bytes=1)
        start = buffers["new_kv"].offset - end_of(shared)
        assert start >= max(self._attended_bytes, buffers["converted"].offset), "room for attention"
        return buffers | {n: replace(b, offset=start + b.offset) for n, b in shared.items()}

    @property
    def _attended_bytes(self) -> int:
        """What the softmax lanes of a query of one KV head make of its values."""
        return self.attention.softmax_lanes * self.shape.group * self.shape.head_dim * 4

    @property
    def slot_bytes(self) -> int:
        """A slot of the ring: some tiles of any matrix, or a half page of the KV cache.

        What lies behind the ring is as aligned as its slots.
        """
        pages = self.attention.page_bytes if self.attention.page_slot else 0
        most = max(SLOT_BYTES, pages, *(op.slot_bytes for op in self.operations))
        return -(-most // ALIGNMENT) * ALIGNMENT

    @property
    def converts(self) -> bool:
        """Activations are converted in shared memory: those of one query, for quantised weights."""
        return self.queries == 1 and any(not op.matrix.format.is_plain for op in self.operations)

    @property
    def converted_bytes(self) -> int:
        """Room for what one query's activations become, and a power of two for each step."""
        if not self.converts:
            return 0
        step_bytes = STEP_COLUMNS * _CONVERTED_BYTES + CONSUMER_WARPS * _POWER_BYTES
        return self.converted_steps * step_bytes

    @property
    def _converting_bytes(self) -> int:
        """The same, or what a block has of its queries while it attends."""
        return max(self.converted_bytes, end_of(stack(self._of_attention, value_bytes=1)))

    @property
    def reduce_bytes(self) -> int:
        """Room in which warps add up their sums."""
        return self.buffers["reduce"].num_bytes

    @property
    def _least_reduce_bytes(self) -> int:
        """Room in which warps add up their sums, and softmax lanes their results.

        One query needs room for the rows of the largest multiply, twice, so that a reduction may
        start while the last one is still read. What samples has its scratch there, too. Where
        activations are converted, reductions lie at either end in turn, each with room for its own
        rows; the scratch, and results of softmax lanes, go on into the room for activations.
        """
        attended = self._attended_bytes
        if self.converts:
            reductions = max(self._reductions_bytes, self._with_tiles_together)
            beside = attended + end_of(stack(self._of_attention, value_bytes=1))
            most = max(beside, SAMPLE_SHARED_BYTES if self.samples else 0)
            return max(reductions, most - self._converting_bytes)
        if self.queries > 1 or self.samples:
            return _REDUCE_BYTES
        most = max(map(_reduction_bytes, self.operations))
        return max(2 * most, 2 * _sums_bytes(self.tiles_together), attended)

    @property
    def _shortest_reduce_bytes(self) -> int:
        """The same of several queries, with as few rows at once as there may be."""
        rows = CONSUMER_WARPS * self.queries * _LEAST_REDUCED_ROWS * 4
        return max(rows, self._attended_bytes, SAMPLE_SHARED_BYTES if self.samples else 0)

    @property
    def _with_tiles_together(self) -> int:
        """Of experts' gate_up, and of what comes before or after it."""
        *layers, _ = self.operations
        own = _sums_bytes(self.tiles_together)
        return own + max(map(_reduction_bytes, layers)) if own else 0

    @property
    def _reductions_bytes(self) -> int:
        """Of two reductions that follow each other, at most."""
        *layers, head = self.operations
        starts = [i for i, op in enumerate(layers) if op.matrix.name == "qkv"]
        kinds = [layers[i:end] for i, end in pairwise([*starts, len(layers)])]
        pairs = [pair for kind in kinds for pair in pairwise(kind)]
        pairs += [(op, op) for op in self.operations if op.matrix.max_tiles > op.group_tiles]
        firsts, lasts = [kind[0] for kind in kinds], [kind[-1] for kind in kinds]
        pairs += product([*lasts, head], [*firsts, head])
        return max(sum(map(_reduction_bytes, pair)) for pair in pairs)

    @property
    def wide_reduce_bytes(self) -> int:
        """What reductions may use outside of attention: the buffer and what lies behind it."""
        return self.buffers["residual"].offset

    @cached_property
    def ring_slots(self) -> int:
        """Slots of the ring: all the shared memory that is left."""
        return self._slots_beside(self.buffers)

    def _slots_beside(self, buffers: dict[str, Buffer]) -> int:
        used = end_of(buffers) + STATIC_SHARED_BYTES
        return max(0, self.room - used) // self.slot_bytes

    @property
    def num_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self.ring_slots * self.slot_bytes + end_of(self.buffers)

    def bytes_with(self, ring_slots: int) -> int:
        """What a block takes with a ring of so many slots, static variables included."""
        return end_of(self.buffers) + STATIC_SHARED_BYTES + ring_slots * self.slot_bytes
