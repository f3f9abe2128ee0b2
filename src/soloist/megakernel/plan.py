"""From (model, precision, GPU) to all the kernel is compiled with. Pure: no torch, no device.

The plan puts together over how many blocks the work is spread, what each kind of layer is made of
(`layer_kind.py`), in which order weights lie in memory (`image.py`), how attention splits the KV
cache (`attention_plan.py`), what blocks exchange and what shared memory holds (`buffers.py`).
`docs/kernel.md` explains why.
"""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

from soloist.errors import ShapeUnsupported
from soloist.kv.layout import KvLayout
from soloist.megakernel.attention_plan import AttentionPlan
from soloist.megakernel.buffers import Exchanges, SharedMemory
from soloist.megakernel.gpu import Gpu
from soloist.megakernel.image import Image
from soloist.megakernel.lanes import shape_of_lanes
from soloist.megakernel.layer_kind import CONVERTED_STEPS, LayerKind, Operation, Spread
from soloist.megakernel.limits import LEAST_RING_SLOTS, MAX_QUERIES
from soloist.megakernel.maths import require_kv, require_maths
from soloist.megakernel.program import matrix_shape, place_of, products_of, tensor_of
from soloist.megakernel.shape import ModelShape, shape_of_ranks
from soloist.megakernel.tile import TILE_ROWS
from soloist.megakernel.weight_format import WeightFormat, format_of
from soloist.model.config import Layer, ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.kv_format import PAGE_FORMATS, KvFormat
from soloist.parallel.lanes import LaneShare
from soloist.parallel.share import Share, part_of


@dataclass(frozen=True)
class Plan:
    """The decode kernel of every rank for one model.

    Of a model with lanes every rank runs several, side by side. A lane is to the kernel what a
    rank of an ordinary model is: sizes, buffers and blocks are those of one lane, if not said
    otherwise.

    Attributes:
        model: the whole.
        dtype: of activations, and of matrices that have no format of their own.
        gpu: each rank's, or its part of one.
        blocks: of each rank, or of each of its lanes.
        ranks: over how many the model is spread.
        queries: that shared memory has room for, up to `MAX_QUERIES`. Fewer leave more of it to the
            ring; the rest of the plan is the same, and so are a query's bits.
        samples: it also has room for choosing tokens otherwise than by the largest logit.
        formats: of matrices that are stored otherwise than in `dtype`, by the name of their tensor,
            such as 'layers.3.down' or 'layers.3.experts.5.down'. All experts of a layer have one.
        kv: how keys and values are stored; None stores them in `dtype`.
    """

    model: ModelConfig
    dtype: Dtype
    gpu: Gpu
    blocks: int
    ranks: int = 1
    queries: int = MAX_QUERIES
    samples: bool = True
    formats: dict[str, WeightFormat] = field(default_factory=dict, hash=False)
    kv: KvFormat | None = None

    def with_room_for(self, queries: int, *, samples: bool) -> "Plan":
        """The same plan for launches of so many queries at most, that sample or do not."""
        return replace(self, queries=queries, samples=samples)

    @cached_property
    def shape(self) -> ModelShape:
        """Sizes of what each rank (or lane) has."""
        of_model = shape_of_lanes if self.model.lanes else shape_of_ranks
        return of_model(self.model, self.ranks)

    @property
    def share(self) -> ModelConfig:
        """What each rank (or lane) has, as a model."""
        return self.shape.share

    def part_of(self, rank: int) -> Share | LaneShare:
        """What a rank has of the model."""
        return part_of(self.model, self.ranks, rank)

    @property
    def grid_blocks(self) -> int:
        """Blocks of a rank: those of its lanes, one lane after the other."""
        return self.blocks * self.shape.lanes_here

    # Layers ---------------------------------------------------------------------------------------

    def format_of(self, name: str) -> WeightFormat:
        """How a matrix is stored, by the name of its tensor."""
        return self.formats.get(name, format_of(self.dtype))

    @cached_property
    def image(self) -> Image:
        """Which kinds of layers there are, and where the weights of each layer lie."""
        found: dict[LayerKind, int] = {}
        kind_of = [
            found.setdefault(self._kind(layer), len(found))
            for layer in range(self.shape.num_layers)
        ]
        return Image(
            tuple(found), tuple(kind_of), self.head, self.blocks, self.shape.lanes_here,
            self.shape.hidden_size,
        )  # fmt: skip

    def _kind(self, layer: int) -> LayerKind:
        own = self.shape.kind_of(layer)
        formats = tuple(
            (p.name, self.format_of(tensor_of(own, layer, p.name, 0))) for p in products_of(own)
        )
        return LayerKind(own, self.shape.hidden_size, formats, self._spread)

    @property
    def _spread(self) -> Spread:
        return Spread(self.blocks, self.gpu, self.shape.is_shared)

    @cached_property
    def head(self) -> Operation:
        """The LM head."""
        stored = self.format_of("embedding" if self.share.tied_head else "head")
        return self._spread.head(self.share.vocab_size, self.shape.hidden_size, stored)

    @property
    def has_experts(self) -> bool:
        """Some layers are mixtures of experts."""
        return self.image.experts_bytes > 0

    @property
    def has_shared_mlp(self) -> bool:
        """Some mixture has an MLP that all tokens take beside its experts."""
        return any("shared.down" in kind.operations for kind in self.image.kinds)

    @property
    def operations(self) -> tuple[Operation, ...]:
        """Every multiply of a round that differs from the others, the head last."""
        layers = [op for kind in self.image.kinds for op in kind.operations.values()]
        return (*layers, self.head)

    # The rest -------------------------------------------------------------------------------------

    @cached_property
    def attention(self) -> AttentionPlan:
        """How attention is spread."""
        return AttentionPlan(self.shape, self.blocks, self.gpu, self.kv_layout)

    @cached_property
    def attention_blocks(self) -> int:
        """Blocks without weights that attend to a round's only query, one for each KV head.

        They run beside `grid_blocks` in some builds (`attending`), on SMs that would have nothing
        to do. 0 where there are too few of these, and where some layer sees a window: once a cache
        is split these blocks leave, and all layers have to be at that point together.
        """
        tuning, kv_heads = self.gpu.architecture.tuning, self.shape.kv_heads
        idle = self.gpu.num_sms - self.grid_blocks
        sees_all = all(layer.attention.window is None for layer in self.model.layers)
        wanted = tuning.has_attention_blocks and self.has_experts
        return kv_heads if wanted and sees_all and idle >= kv_heads else 0

    def attending(self, queries: int, *, drafts: bool) -> int:
        """Attention blocks in a build for so many queries: one query's, if it does not draft."""
        return self.attention_blocks if queries == 1 and not drafts else 0

    @cached_property
    def kv_layout(self) -> KvLayout:
        """Where keys and values lie in the pages of a rank's pool."""
        shape, stored = self.shape, self.kv or PAGE_FORMATS[self.dtype]
        return KvLayout(shape.num_layers, shape.pool_kv_heads, shape.head_dim, stored)

    @cached_property
    def exchanges(self) -> Exchanges:
        """Buffers in global memory."""
        return Exchanges(
            self.shape, self.blocks, self.image.kinds, self.head, self.attention,
            self.attention_blocks,
        )  # fmt: skip

    @cached_property
    def shared(self) -> SharedMemory:
        """A block's shared memory: the longest ring, then room for the most converted steps.

        Steps that all have room are converted once for several groups of tiles, and experts' slots
        together; elsewhere room for those that are multiplied next is enough.
        """
        hidden_rows = max(kind.operations["down"].matrix.max_units for kind in self.image.kinds) * 8
        widest = SharedMemory(
            self.shape, self.attention, self.operations, hidden_rows, self.gpu.shared_bytes,
            self.queries, self.samples, self._most_slots, self._gates_shared, self.routes_early,
            self._tiles_together,
            shortens_reductions=self._shortens_reductions,
        )  # fmt: skip
        if not widest.converts or self.has_experts:
            return widest
        least = max(op.steps_at_once for op in self.operations if not op.matrix.format.is_plain)
        steps = (n for n in CONVERTED_STEPS if n >= least)
        return max(
            (replace(widest, converted_steps=n) for n in steps), key=lambda own: own.ring_slots
        )

    @property
    def _shortens_reductions(self) -> bool:
        """Reductions of several queries take as little room as they may, for a longer ring.

        Of 4 bits alone: with 8 bits no gain was measured.
        """
        return self.gpu.architecture.tuning.several_short_reductions and self._has_four_bits

    @property
    def _has_four_bits(self) -> bool:
        """All layers are dense, with weights of 4 bits that are no super-blocks."""
        return self._all_have(4)

    def _all_have(self, bits: int) -> bool:
        if self.has_experts:
            return False
        return all(f.value_bits == bits and not f.super_block for f in self._layer_formats)

    @property
    def _most_slots(self) -> int:
        """Distinct experts that the queries of a launch can choose; 0 where there are none."""
        experts = [kind.experts for kind in self.image.kinds if kind.experts]
        return max((x.most_slots(self.queries) for x in experts), default=0)

    @property
    def _tiles_together(self) -> int:
        """Tiles of experts' gate_up that are added up side by side with one query; else 0."""
        experts = [kind.experts for kind in self.image.kinds if kind.experts]
        return max((x.tiles_together for x in experts if self.queries == 1), default=0)

    @property
    def _gates_shared(self) -> bool:
        """Some layer's MLP beside experts has a gate."""
        return any(kind.experts.gates_shared for kind in self.image.kinds if kind.experts)

    @property
    def routes_early(self) -> bool:
        """Some layer's logits of experts come beside attention_output, see LayerKind."""
        return any(kind.routes_early for kind in self.image.kinds)

    # The stream -----------------------------------------------------------------------------------

    @property
    def copies_in_flight(self) -> tuple[int, int, int]:
        """Slots of weights that a block has asked for and that have not come yet, at most.

        With up to a third of the ring free, up to two thirds, and more.
        """
        tuning = self.gpu.architecture.tuning
        if self.ranks == 1:
            if self._pauses:
                return (self._pausing_copies[1],) * 3
            if self._waits_for_instructions:
                return (tuning.several_copies_in_flight,) * 3
            few = self._streams_little
            return (tuning.few_copies_in_flight if few else tuning.copies_in_flight,) * 3
        if self.queries == 1 and self.has_experts:
            return tuning.ranks_experts_copies_in_flight
        few = self._streams_little or (
            self.shape.summing_ranks > 1
            and self.image.busiest_layer_bytes <= tuning.few_ranks_layer_bytes
        )
        return tuning.few_ranks_copies_in_flight if few else tuning.ranks_copies_in_flight

    @property
    def waiting_copies_in_flight(self) -> int:
        """The same while the block waits for others; 0 where it makes no difference.

        Blocks of a mixture do both: they wait until the choice is known, then for the memory.
        """
        tuning = self.gpu.architecture.tuning
        if self.ranks > 1:
            return 0
        if self._pauses:
            return self._pausing_copies[0]
        if self._streams_little:
            waiting = tuning.few_waiting_copies_in_flight
            differs = self.queries == 1 and self._has_four_bits
        else:
            waiting, most = tuning.waiting_copies_in_flight, tuning.waiting_layer_bytes
            differs = self._is_quantized and self.image.busiest_layer_bytes <= most
        return waiting if differs and waiting < self.copies_in_flight[0] else 0

    @property
    def expects_early(self) -> bool:
        """Whether a slot's bytes are expected before it is the turn of their copy.

        Where few copies are in flight the next one follows sooner. One query loses by it.
        """
        return self.gpu.architecture.tuning.several_expect_early and self._waits_for_instructions

    @property
    def page_batch_slots(self) -> int:
        """Slots of pages that a block attends to before it gives them back.

        Half of the ring, since the other half is filled meanwhile. Where memory has time up to two
        thirds: the rest has room for attention_output, whose weights come next.
        """
        ring, most = self.shared.ring_slots, self.gpu.architecture.tuning.several_page_slots
        if not self._waits_for_instructions:
            return ring // 2
        return max(ring // 2, min(ring * 2 // 3, most))

    @property
    def rest_cycles(self) -> int:
        """For how long blocks that do not attend ask for nothing while others do.

        Small layers have no time for it.
        """
        rests = self._waits_for_instructions and not self._streams_little
        return self.gpu.architecture.tuning.several_rest_cycles if rests else 0

    @property
    def has_way_for_few(self) -> bool:
        """Whether a warp that takes one tile of rows has code of its own for half of one.

        Of heads with 128 values, which gain by it; with 96 the code costs more than it saves.
        Mixtures were not timed.
        """
        tuning = self.gpu.architecture.tuning
        gains = self.shape.head_dim == 128 and not self.has_experts
        return tuning.several_few_rows and gains and self._waits_for_instructions

    @property
    def elects_lane(self) -> bool:
        """Whether the lane that asks for copies of weights is elected right there.

        Copies take half as many instructions then. Builds of 16 bits and of one query of 4 bits
        would gain, too, and have not been tested with it.
        """
        has_eight_bits = self.ranks == 1 and self._all_have(8)
        gains = has_eight_bits or self._waits_for_instructions
        return self.gpu.architecture.tuning.elects_lane and gains

    @property
    def _waits_for_instructions(self) -> bool:
        """Multiplies of several queries take longer than their weights of 4 bits, on one GPU."""
        return self.ranks == 1 and self.queries > 1 and self._has_four_bits

    @property
    def _streams_little(self) -> bool:
        """Blocks wait for each other most of the time, not for the memory."""
        return self.image.busiest_layer_bytes <= self.gpu.architecture.tuning.few_layer_bytes

    @property
    def _pauses(self) -> bool:
        """Memory is to pause while blocks wait, and to hurry between: of mixtures, and K-quants."""
        formats = self._layer_formats
        return self.has_experts or (
            not self._streams_little and any(f.super_block for f in formats)
        )

    @property
    def _pausing_copies(self) -> tuple[int, int]:
        """Copies in flight while a block that pauses waits for others, and while it multiplies."""
        tuning = self.gpu.architecture.tuning
        alone = self.queries == 1 and self.has_experts and self._is_quantized
        if alone and self._streams_little:
            return tuning.few_pausing_copies_in_flight
        return tuning.pausing_copies_in_flight

    @property
    def _is_quantized(self) -> bool:
        return any(not f.is_plain for f in self._layer_formats)

    @property
    def _layer_formats(self) -> list[WeightFormat]:
        kinds = self.image.kinds
        return [op.matrix.format for kind in kinds for op in kind.operations.values()]

    @property
    def head_copies_in_flight(self) -> int:
        """The same for the head, which streams without exchanges."""
        most = self.gpu.architecture.tuning.copies_in_flight
        # Memory that pauses for exchanges hurries between them, of which the head has none.
        return most if self.waiting_copies_in_flight else max(most, self.copies_in_flight[2])

    @property
    def fetch_slots(self) -> int:
        """Slots that are brought to the L2 while the ring is full."""
        tuning = self.gpu.architecture.tuning
        waits = (
            self.ranks > 1
            and not self.has_experts
            and self.image.busiest_layer_bytes <= tuning.fetch_layer_bytes
        )
        return tuning.fetch_slots if waits else 0

    @property
    def quantized_batch_slots(self) -> int:
        """Slots of quantised weights that a warp takes together, with one query.

        Several let more tiles overlap. One returns sooner to the ring, which counts where blocks
        wait for the memory rather than for each other.
        """
        slots = self.gpu.architecture.tuning.few_quantized_batch_slots
        few = self.ranks == 1 and self._streams_little
        return slots if few and self.shared.ring_slots >= 2 * slots else 1

    def releases_late(self, queries: int) -> bool:
        """Whether slots of quantised weights are given back after the multiply behind their loads.

        In a build for so many queries. Of several only matrices of integers do
        (`kFewIntegers` in cuda/tile/multiply.cuh).
        """
        tuning = self.gpu.architecture.tuning
        if queries > 1:
            return self._is_quantized and tuning.several_release_late
        is_mixture = self.has_experts and not self.has_shared_mlp
        return self._is_quantized and is_mixture and tuning.experts_release_late

    def depth_of(self, op: Operation, queries: int) -> int:
        """Steps of a turn of a multiply's loop, in a build for so many queries."""
        tuning = self.gpu.architecture.tuning
        few = self._streams_little
        fewer = tuning.few_several_quantized_depth if few else tuning.several_quantized_depth
        return op.depth_for(queries, fewer)

    @property
    def early_slots(self) -> int:
        """Slots whose weights wait in registers, where the ring has twice as many."""
        slots = self.gpu.architecture.tuning.early_slots
        return slots if self.shared.ring_slots >= 2 * slots else 0

    def describe(self) -> str:
        """The plan for people."""
        beside = f", {self.attention_blocks} more attend" if self.attention_blocks else ""
        lines = [
            f"{self.model.family} {self.dtype.value} on {self.gpu.arch}: {self.grid_blocks} of "
            f"{self.gpu.num_sms} SMs{beside}, "
            f"{self.image.streamed_bytes / 1e9:.3f} GB of weights a round, "
            f"{self.image.max_block_bytes / 1e6:.2f} MB in the busiest "
            f"block (mean {self.image.streamed_bytes / self.grid_blocks / 1e6:.2f})",
            f"ring {self.shared.ring_slots} x {self.shared.slot_bytes / 1024:g} KB of "
            f"{self.shared.num_bytes:,} bytes; attention: up to {self.attention.splits} splits a "
            f"KV head, {self.attention.softmax_lanes} softmax lanes",
        ]
        if self.shape.has_lanes:
            lines.append(
                f"{self.shape.lanes_here} of {self.shape.lanes} lanes a rank, {self.blocks} blocks "
                f"each; {self.shape.delays_in_words}"
            )
        for op in self.operations:
            m = op.matrix
            lines.append(
                f"  {m.name:<17} {m.rows:>7,} x {m.columns:<6,} {m.order:<8} "
                f"{m.units // m.blocks}-{m.max_units} units a block, {m.steps} steps, "
                f"{op.group_tiles} tiles together, {op.depth} steps ahead"
            )
        return "\n".join(lines)


def make_plan(
    model: ModelConfig,
    dtype: Dtype,
    gpu: Gpu,
    ranks: int = 1,
    formats: dict[str, WeightFormat] | None = None,
    kv: KvFormat | None = None,
) -> Plan:
    """The plan that wastes least: its busiest block's bytes times the number of blocks.

    All blocks share the memory's bandwidth, so what counts is how even the shares are.

    Args:
        model: the whole.
        dtype: of activations, and of all that has no format of its own.
        gpu: each rank's, or its part of one.
        ranks: over how many the model is spread.
        formats: as of `Plan`.
        kv: the same.

    Raises:
        ShapeUnsupported: the kernel cannot run this model; the message says why.
    """
    _require_supported(model, dtype)
    kv = None if kv is None or kv.is_plain else kv
    if kv is not None:
        require_kv(kv, dtype)
    first = Plan(model, dtype, gpu, 1, ranks, formats=formats or {}, kv=kv)
    _require_formats(first)
    kv_heads = first.shape.kv_heads
    # Every block has rows of every matrix: readers must not run ahead of the exchanges they skip.
    # Of q, k and v ranks and lanes have few; blocks without publish enough in the rest of a layer.
    # An MLP beside experts may be small; blocks without wait for all logits of the router.
    few = {"shared.gate_up", *(("qkv",) if first.shape.is_shared else ())}
    owned = [
        op.matrix.units
        for kind in first.image.kinds
        for name, op in kind.in_blocks.items()
        if name not in few
    ]
    most = min(gpu.num_sms // first.shape.lanes_here, *owned)
    if most < kv_heads:
        raise ShapeUnsupported(f"{kv_heads} KV heads", f"at most {most}, one for each block")
    # A tenth fewer SMs still draw the memory's full bandwidth.
    candidates = range(max(kv_heads, math.ceil(0.9 * most)), most + 1)
    plans = [replace(first, blocks=blocks) for blocks in candidates]
    plan = min(plans, key=lambda p: p.blocks * p.image.max_block_bytes)
    _require_fits(plan)
    return plan


def _require_fits(plan: Plan) -> None:
    """Shared memory has room for a ring, and registers for the sums of every multiply."""
    if plan.shared.ring_slots < LEAST_RING_SLOTS:
        raise ShapeUnsupported(
            f"this model with {plan.gpu.shared_bytes:,} bytes of shared memory a block",
            f"{plan.shared.bytes_with(LEAST_RING_SLOTS):,} and more",
        )
    for kind in plan.image.kinds:
        kind.require_fits()


def _require_formats(plan: Plan) -> None:
    """Each format is that of a matrix, which the kernel can read."""
    layers = range(plan.shape.num_layers)
    names = {f"layers.{i}.{name}" for i in layers for name in plan.image.layer(i).in_blocks}
    for layer in layers:
        names |= _formats_of_experts(plan, layer)
        shared = plan.image.layer(layer).operations.get("shared.down")
        if shared is not None and shared.matrix.format.super_block:
            # Its sums join those of experts, which super-blocks deal out in another way.
            given = f"down of shared experts in {shared.matrix.format.name}"
            raise ShapeUnsupported(given, "formats without super-blocks")
    names |= set() if plan.share.tied_head else {"head"}
    for name, stored in plan.formats.items():
        if name not in names:
            # Of a tied head tokens are looked up, in 16 bits.
            allowed = "formats of its layers' matrices and of a head that is not tied"
            raise ShapeUnsupported(f"a format of {name}", allowed)
        columns, whole = _columns(plan.share, name), _columns(plan.model, name)
        group = (stored.meaning.super_block or stored.meaning.group) if stored.meaning else 0
        if columns != whole and group and (columns % group or whole % group):
            given = f"{name} in {stored.name} with {columns} columns on each of {plan.ranks} ranks"
            raise ShapeUnsupported(given, f"multiples of {group}")


def _formats_of_experts(plan: Plan, layer: int) -> set[str]:
    """Names of the matrices of a layer's experts, which all have one format that is read."""
    experts, own = plan.image.layer(layer).experts, plan.shape.kind_of(layer)
    names: set[str] = set()
    for matrix in () if experts is None else (experts.gate_up, experts.down):
        assert experts is not None, "there are some"
        each = [
            tensor_of(own, layer, matrix.name, number)
            for number in range(experts.router.num_experts)
        ]
        if len({plan.format_of(name) for name in each}) > 1:
            given = f"experts of layer {layer} with {matrix.name} in several formats"
            raise ShapeUnsupported(given, "one for all experts of a layer")
        if matrix.format.is_permuted or matrix.format.super_block:
            given = f"{matrix.name} of experts in {matrix.format.name}"
            raise ShapeUnsupported(given, "formats without super-blocks, in the order of columns")
        names.update(each)
    return names


def _columns(model: ModelConfig, name: str) -> int:
    """Columns of a matrix of a model, or of a rank's share of one."""
    if not name.startswith("layers."):
        return model.hidden_size
    layer, short = place_of(name)
    return matrix_shape(short, model.layers[layer], model.hidden_size)[1]


def _require_supported(model: ModelConfig, dtype: Dtype) -> None:
    require_maths(model)
    attention = model.layers[0].attention
    checks = [
        (dtype is not Dtype.FP32, "fp32 weights", "bf16 or fp16"),
        (
            attention.head_dim in (32, 64, 96, 128),
            f"head_dim {attention.head_dim}",
            "32, 64, 96, 128",
        ),
        (
            attention.queries_per_kv_head <= TILE_ROWS,
            f"{attention.queries_per_kv_head} query heads to a KV head",
            f"at most {TILE_ROWS}",
        ),
        (model.hidden_size % 8 == 0, f"hidden_size {model.hidden_size}", "a multiple of 8"),
    ]
    for layer in model.layers:
        neurons = layer.each_mlp.intermediate_size
        checks += [
            (neurons % 8 == 0, f"intermediate_size {neurons}", "a multiple of 8"),
            (
                _heads(layer) == _heads(model.layers[0]),
                "layers with other heads than the first",
                "layers that differ in biases, norms of queries and keys, MLP, window and rope",
            ),
        ]
    for fine, given, allowed in checks:
        if not fine:
            raise ShapeUnsupported(given, allowed)


def _heads(layer: Layer) -> tuple[int, int, int]:
    """What attention of all layers has alike."""
    attention = layer.attention
    return attention.num_query_heads, attention.num_kv_heads, attention.head_dim
