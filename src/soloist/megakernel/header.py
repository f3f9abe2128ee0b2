"""Plan → the header that the CUDA sources are compiled with: every constant and layout, by name."""

import math
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from soloist.kv.layout import page_constants
from soloist.megakernel.abi import MAX_STOPS, enumeration, structs
from soloist.megakernel.drafting import drafting_constants
from soloist.megakernel.image import Image
from soloist.megakernel.layer_kind import LOADED_STEPS, LayerKind, Operation
from soloist.megakernel.limits import CONSUMER_WARPS, EXCHANGE_COPIES, MAX_QUERIES, THREADS
from soloist.megakernel.plan import Plan
from soloist.megakernel.program import (
    LAST,
    LAYER,
    OF_EXPERTS,
    PHASES,
    Phase,
    phases_of,
    products_of,
    products_of_phase,
)
from soloist.megakernel.sampling_header import (
    sample_workspace_bytes,
    sampling_constants,
    sampling_words,
)
from soloist.megakernel.tile import (
    HALF_TILE_ROWS,
    HALF_TILE_VALUES,
    STEP_COLUMNS,
    tile_places,
)
from soloist.megakernel.trace import num_time_words
from soloist.megakernel.trace import num_words as num_trace_words
from soloist.megakernel.weight_format import READERS
from soloist.model.dtype import Dtype
from soloist.sampling.constraint import num_words

Value: TypeAlias = bool | int | float

# Queries that a launch may have, of each of the two builds that serve requests.
BUILT_FOR = (1, MAX_QUERIES)
# A block that gets nowhere for so long is stuck.
STUCK_NS = 2_000_000_000
# The same where it waits for the host to say which tokens are allowed: that may take a while on a
# busy machine, and is no fault of the kernel's.
MASK_NS = 60_000_000_000
# Words from one query's count of masks to the next: each in a cache line of its own.
MASK_READY_WORDS = 16
# No block has this number.
_NO_BLOCK = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Build:
    """How a kernel is built beside its plan; as it stands here, to run greedy requests.

    Attributes:
        samples: choose tokens by their queries' `Choice`, not only the largest logit.
        drafts: rounds check what the kernel drafts itself, for each sequence of a launch.
        queries: how many a launch may have: one, which takes the least code, or `MAX_QUERIES`. A
            query's bits are the same.
        trace_round: take time stamps in this round of a launch.
        ablation: leave something out: a value of `ABLATIONS`. Its tokens mean nothing.
        silent_block: a block that never publishes its activations, so that the others get stuck.
        cleaner_cycles: by which all cleaning of exchange buffers is late: no bit depends on that.
        stuck_ns: how long a block may get nowhere, less than 2^32.
        mask_ns: how long it may wait for the host to say which tokens are allowed.
        alone: the first rank of several runs without the others, and publishes to itself what they
            would. To see what a token would take; its own tokens mean nothing.
        racecheck: for compute-sanitizer's tool of that name: every thread tells a slot's barrier
            itself what its warp's first lane tells for all, and the watchdog does not look.
    """

    samples: bool = False
    drafts: bool = False
    queries: int = MAX_QUERIES
    trace_round: int | None = None
    ablation: int = 0
    silent_block: int | None = None
    cleaner_cycles: int = 0
    stuck_ns: int = STUCK_NS
    mask_ns: int = MASK_NS
    alone: bool = False
    racecheck: bool = False


# What builds leave out; the order is that of the constants in cuda/sync/wait.cuh.
ABLATIONS = {"none": 0, "waits": 1, "stream": 2, "multiply": 3}


def header(plan: Plan, build: Build = Build()) -> str:
    """The text of spec.cuh for a kernel that holds one model, the struct `Model`."""
    return header_of({"Model": plan}, build)


def header_of(plans: Mapping[str, Plan], build: Build) -> str:
    """The text of spec.cuh for a kernel that holds several models.

    Args:
        plans: by the name of the model's struct. They share the grid, the type of values, the GPU
            and the ranks.
        build: how the kernel is built.
    """
    plans = {
        name: plan.with_room_for(build.queries, samples=build.samples)
        for name, plan in plans.items()
    }
    first = next(iter(plans.values()))
    for plan in plans.values():
        assert _shared(plan) == _shared(first), "models of one kernel"
    words = max(map(num_trace_words, plans.values()))
    experts = any(plan.has_experts for plan in plans.values())
    return "\n".join(
        [
            "// Generated from the plan; see header.py.",
            "#pragma once",
            '#include "ptx/types.cuh"',
            *_constants(
                _of_kernel(first, build)
                | _conversion(plans.values())
                | {
                    "kTraceWords": words,
                    "kAttentionBlocks": first.attending(build.queries, drafts=build.drafts),
                }
            ),
            *page_constants(),
            *tile_places(),
            sampling_constants(),
            sampling_words(),
            enumeration("Phase", (phase.name for phase in PHASES)),
            drafting_constants(),
            *(struct.cuda for struct in structs(first.ranks, drafts=build.drafts, experts=experts)),
            *READERS,
            *(line for name, plan in plans.items() for line in _model(name, plan, build)),
            "",
        ]
    )


def _shared(plan: Plan) -> tuple[object, ...]:
    return (plan.grid_blocks, plan.ranks, plan.dtype, plan.gpu)


def _conversion(plans: Collection[Plan]) -> dict[str, Value]:
    """How activations of one query are converted for weights that are quantised."""
    room = {plan.shared.converted_steps for plan in plans if plan.shared.converts}
    assert len(room) <= 1, "models of one kernel"
    return {"kLoadedSteps": LOADED_STEPS, "kConvertedSteps": max(room, default=LOADED_STEPS)}


def _of_kernel(plan: Plan, build: Build) -> dict[str, Value]:
    """What does not depend on a model, beyond what all models of a kernel share."""
    tuning = plan.gpu.architecture.tuning
    return {
        "kBf16": plan.dtype is Dtype.BF16,
        "kNumBlocks": plan.grid_blocks,
        "kPeers": plan.ranks,
        "kConsumerWarps": CONSUMER_WARPS,
        "kConsumerThreads": CONSUMER_WARPS * 32,
        "kThreads": THREADS,
        "kMovesRegisters": plan.gpu.architecture.moves_registers,
        "kConsumerRegisters": plan.gpu.architecture.consumer_registers,
        "kHelperRegisters": plan.gpu.architecture.helper_registers,
        "kMaxQueries": MAX_QUERIES,
        "kMostQueries": build.queries,
        "kSamples": build.samples,
        "kDrafts": build.drafts,
        "kMaxStops": MAX_STOPS,
        "kStuckNs": build.stuck_ns,
        "kMaskNs": build.mask_ns,
        "kMaskReadyWords": MASK_READY_WORDS,
        "kRacecheck": build.racecheck,
        "kAlone": build.alone,
        "kSilentBlock": _NO_BLOCK if build.silent_block is None else build.silent_block,
        "kCleanerCycles": build.cleaner_cycles,
        "kAblation": build.ablation,
        "kTrace": build.trace_round is not None,
        "kTraceRound": build.trace_round or 0,
        "kExchangeCopies": EXCHANGE_COPIES,
        "kLayerPhases": len(LAYER),
        "kMarksOfRoundsEnd": sum(len(phase.marks) for phase in LAST),
        "kPagesPhase": next(i for i, phase in enumerate(LAYER) if phase.streams_pages),
        "kGateUpPhase": next(i for i, phase in enumerate(LAYER) if phase.name == OF_EXPERTS[0]),
        "kStepColumns": STEP_COLUMNS,
        "kHalfTileRows": HALF_TILE_ROWS,
        "kHalfTileValues": HALF_TILE_VALUES,
        "kChunkPages": plan.attention.chunk_pages,
        "kPageCopies": tuning.page_copies_in_flight,
        "kFetchCycles": tuning.fetch_cycles,
        "kMostChains": tuning.max_chains,
        "kBatch": tuning.batch_slots,
        "kSampleWorkspaceBytes": sample_workspace_bytes(plan.grid_blocks),
    }


def _of_model(plan: Plan, build: Build) -> dict[str, Value]:
    model, shape, attention = plan.model, plan.shape, plan.attention
    exchanges, shared = plan.exchanges, plan.shared
    slots = {op.slot_bytes for op in plan.operations}
    half_tiles = {op.matrix.format.half_tile_bytes for op in plan.operations}
    # The rows of one query fit a tile; which warps have rows is left as it is, for the bits' sake.
    warp_tiles = 1 if build.queries == 1 else attention.warp_tiles
    constants: dict[str, Value] = {
        "kLaneBlocks": plan.blocks,
        "kLayers": model.num_layers,
        "kHidden": model.hidden_size,
        "kVocab": model.vocab_size,
        "kVocabRows": exchanges.logit_rows,
        "kSampledRows": exchanges.sampled_rows,
        "kVocabWords": num_words(model.vocab_size),
        "kRanks": shape.summing_ranks,
        "kShareVocab": plan.share.vocab_size,
        "kQueryHeads": shape.query_heads,
        "kKvHeads": shape.kv_heads,
        "kGroup": shape.group,
        "kWideQueries": attention.has_wide_queries,
        "kQueryRows": attention.query_rows,
        "kQueriesTogether": attention.queries_together,
        "kHeadDim": shape.head_dim,
        "kTiedHead": plan.share.tied_head,
        "kEpsilon": float(model.norm_epsilon),
        "kScoreScale": shape.head_dim**-0.5 * math.log2(math.e),
        "kRingSlots": shared.ring_slots,
        "kRingBytes": shared.ring_slots * shared.slot_bytes,
        "kCopies": plan.copies_in_flight[0],
        "kHalfCopies": plan.copies_in_flight[1],
        "kEmptyCopies": plan.copies_in_flight[2],
        "kWaitingCopies": plan.waiting_copies_in_flight,
        "kHeadCopies": plan.head_copies_in_flight,
        "kExpectsEarly": plan.expects_early,
        "kElectsLane": plan.elects_lane,
        "kPageBatchSlots": plan.page_batch_slots,
        "kRestCycles": plan.rest_cycles,
        "kHasWayForFew": plan.has_way_for_few,
        "kFetchSlots": plan.fetch_slots,
        "kReduceBytes": shared.reduce_bytes,
        "kWideReduceBytes": shared.wide_reduce_bytes,
        "kSplits": attention.splits,
        "kSplitBits": attention.splits.bit_length() - 1,
        "kUnsplitPositions": attention.unsplit_positions,
        "kSplitPositions": attention.split_positions,
        "kRotationLayers": attention.rotation_layers,
        "kEarlySlots": plan.early_slots,
        "kQuantizedBatch": plan.quantized_batch_slots,
        "kReleasesLate": plan.releases_late(build.queries),
        "kRowTiles": attention.row_tiles // attention.warp_tiles * warp_tiles,
        "kWarpTiles": warp_tiles,
        "kSoftmaxLanes": attention.softmax_lanes,
        "kPageSlot": attention.page_slot,
        "kBlockStride": plan.image.block_stride,
        "kFinalNorm": plan.image.final_norm_offset,
        "kSlotBytes": shared.slot_bytes,
        # 0 where matrices differ.
        "kWeightSlotBytes": next(iter(slots)) if len(slots) == 1 else 0,
        "kHalfTileBytes": next(iter(half_tiles)) if len(half_tiles) == 1 else 0,
    }
    constants |= _lanes(plan) | _experts(plan)
    names = (
        "sums_mid", "sums_in", "arrivals", "logits", "hidden_out", "squares_out", "hidden_router",
        "outcome", "left",
    )  # fmt: skip
    constants["kShConverted"] = constants["kShConvertedBytes"] = 0
    for name in names:  # of some plans only
        constants[f"kWs{_pascal(name)}"] = constants[f"kWs{_pascal(name)}Bytes"] = 0
    for name, buffer in exchanges.workspace.items():
        if name.startswith(("gated", "shared_gated")):  # each layer knows its own
            continue
        constants[f"kWs{_pascal(name)}"] = buffer.offset
        constants[f"kWs{_pascal(name)}Bytes"] = buffer.num_bytes
    for name, buffer in exchanges.published.items():
        constants[f"kWs{_pascal(name)}"] = buffer.offset
    for name, buffer in shared.buffers.items():
        constants[f"kSh{_pascal(name)}"] = buffer.offset
        constants[f"kSh{_pascal(name)}Bytes"] = buffer.num_bytes
    return constants


def _model(name: str, plan: Plan, build: Build) -> Iterator[str]:
    """A struct of all that depends on the model, with one in it for each kind of its layers."""
    layers, inline = plan.model.layers, "static __device__ __forceinline__"
    variants = variants_of(plan.image)
    loops = segments(variants.alike)
    windows = ", ".join(str(x.attention.window or 0) for x in layers)
    rotations = ", ".join(str(int(x.attention.rope)) for x in layers)
    yield f"__constant__ const int k{name}Window[] = {{{windows}}};"
    yield f"__constant__ const bool k{name}Rotated[] = {{{rotations}}};"
    yield from variants.cuda(name, plan.image)
    yield f"struct {name} {{"
    yield from _indented(_constants(_of_model(plan, build), "static "))
    yield from _indented(plan.kv_layout.members("static "))
    head_at = plan.image.head_offset, plan.image.head_table_offset
    yield f"  {_operation(plan.head, *head_at, plan.depth_of(plan.head, build.queries))}"
    yield "  // Rows of the residual: attention_output and down of every layer have the same."
    yield f"  {_residual(plan.image)}"
    # By layer. References, since functions around the loads would make longer code of them.
    yield f"  static constexpr const int (&kWindow)[{len(layers)}] = k{name}Window;"
    yield f"  static constexpr const bool (&kRotated)[{len(layers)}] = k{name}Rotated;"
    for segment in loops:
        yield from _indented(_layers_of(name, plan, segment, variants, build.queries))
    yield "  // Calls `use` with the kind of a layer."
    yield "  template <class Use>"
    yield f"  {inline} void of_layer(unsigned layer, const Use& use) {{"
    yield from _indented(_choice_of_kind(name, loops, variants), 2)
    yield "  }"
    yield from _norms(plan)
    yield "  // All layers in order."
    yield "  template <class C>"
    yield f"  {inline} void run_layers(C& cx) {{"
    yield from _indented(_layer_loops(loops), 2)
    yield "  }"
    yield "};"


def _norms(plan: Plan) -> Iterator[str]:
    """Functions that say where the norms of a layer lie among all vectors."""
    inline = "static __device__ __forceinline__"
    yield "  // Where the norm before a layer lies; after the last layer, the final one."
    yield f"  {inline} unsigned long long attention_norm(unsigned layer) {{"
    yield "    unsigned long long at = kFinalNorm;"
    yield "    if (layer < kLayers) of_layer(layer, [&](auto kind) {"
    yield "      using L = decltype(kind);"
    yield "      at = L::vectors(layer) + L::kVecAttentionNorm;"
    yield "    });"
    yield "    return at;"
    yield "  }"
    if not plan.routes_early:
        return
    yield "  // The same of the norm before an MLP; after the last layer, that of the first."
    yield f"  {inline} unsigned long long mlp_norm(unsigned layer) {{"
    yield "    const unsigned own = layer < kLayers ? layer : 0;"
    yield "    unsigned long long at = 0;"
    yield "    of_layer(own, [&](auto kind) {"
    yield "      using L = decltype(kind);"
    yield "      at = L::vectors(own) + L::kVecMlpNorm;"
    yield "    });"
    yield "    return at;"
    yield "  }"


def _layers_of(
    model: str, plan: Plan, segment: "Segment", variants: "Variants", queries: int
) -> Iterator[str]:
    for first in segment.firsts:
        for layer in variants.of_place(segment, first):
            yield from _layer(model, plan, segment, first, layer, queries)


def _layer(
    model: str, plan: Plan, segment: "Segment", first: int, variant: int, queries: int
) -> Iterator[str]:
    """A struct of the layers that have one place in the body of a loop, or one kind of them.

    Args:
        model: the name of its struct.
        plan: of the model.
        segment: the loop.
        first: the first of the layers.
        variant: the first of those of the same kind, which gives the struct its number.
        queries: that the build is for.
    """
    image, exchanges = plan.image, plan.exchanges
    kind, found = image.layer(variant), variants_of(image)
    variants = {found.number_of[layer]: layer for layer in found.of_place(segment, first)}
    attention, mlp = kind.layer.attention, kind.layer.each_mlp
    gated = exchanges.workspace[exchanges.gated(kind)]
    constants: dict[str, Value] = {
        "kQkNorm": attention.qk_norm,
        "kQkvBias": attention.qkv_bias,
        "kOutputBias": attention.output_bias,
        "kMlpBias": mlp.bias,
        "kWsGated": gated.offset,
        "kWsGatedBytes": gated.num_bytes,
        **_experts_of(kind),
        **_marks_of(kind),
    }
    for vector in (*_VECTORS, *(_ROUTER_VECTORS if kind.experts else ())):
        buffer = kind.vectors.get(vector)
        constants[f"kVec{_pascal(vector)}"] = buffer.offset // 4 if buffer else 0
    where = "static __device__ __forceinline__ unsigned long long"
    if len(variants) > 1:
        weights = f"k{model}Weights[layer]"
    else:
        weights = _place_of_layer(segment, first, image.layer_offset)
    vectors = _place_of_layer(segment, first, image.vector_offset)
    yield f"struct Layer{variant} {{"
    yield f"  using M = {model};"
    yield from _indented(_constants(constants, "static "))
    for name, op in kind.operations.items():
        table = kind.table_offset(name) if op.matrix.format.is_permuted else 0
        offset = kind.matrix_offset(name) if name in kind.in_blocks else 0
        yield f"  {_operation(op, offset, table, plan.depth_of(op, queries))}"
    if kind.experts:
        experts = _place_of_layer(segment, first, image.experts_offset)
        yield "  // Where all experts of a layer begin, and which block has what of them."
        yield f"  {where} experts(unsigned layer) {{ return {experts}; }}"
        yield from _indented((*kind.experts.cuda(), *_shared_mlp(plan, kind)))
    yield "  // Where a layer begins: its weights in a block's, in bytes; its vectors, in values."
    yield f"  {where} weights(unsigned layer) {{ return {weights}; }}"
    yield f"  {where} vectors(unsigned layer) {{ return {vectors}; }}"
    yield "  // Calls `use` with the matrix of a phase."
    yield "  template <class Use>"
    yield "  static __device__ __forceinline__ void of_phase(unsigned phase, const Use& use) {"
    yield from _indented(_choice_of_matrix(), 2)
    yield "  }"
    yield "  template <class C>"
    yield "  static __device__ __forceinline__ void run(C& cx, unsigned& layer) {"
    for phase in phases_of(kind.layer):
        yield from _indented(_run_of_phase(model, image, phase, variants), 2)
    yield "  }"
    yield "};"


def _marks_of(kind: LayerKind) -> dict[str, Value]:
    """Marks of a traced layer before attention and behind it, for blocks that only attend."""
    phases = phases_of(kind.layer)
    attention = next(i for i, phase in enumerate(phases) if phase.streams_pages)
    before, behind = phases[:attention], phases[attention + 1 :]
    return {
        "kMarksBefore": sum(len(phase.marks) for phase in before),
        "kMarksBehind": sum(len(phase.marks) for phase in behind),
    }


def _run_of_phase(
    model: str, image: Image, phase: Phase, variants: Mapping[int, int]
) -> Iterator[str]:
    """One phase of layers of these kinds: the code of each format once.

    Args:
        model: the name of its struct.
        image: of the model.
        phase: which.
        variants: a layer of each kind, by the kind's number.
    """
    numbers: dict[tuple[Operation, ...], list[int]] = {}
    for number, layer in variants.items():
        products = products_of_phase(phase, image.layer(layer).layer)
        ops = tuple(image.operation(layer, product.name) for product in products)
        numbers.setdefault(ops, []).append(number)
    function = phase.name
    if image.layer(next(iter(variants.values()))).experts and phase.name in OF_EXPERTS:
        function += "_of_experts"
    *others, last = numbers.values()
    for same in others:
        is_one = " || ".join(f"k{model}Variant[layer] == {number}u" for number in same)
        yield f"if ({is_one}) {function}(Layer{variants[same[0]]}{{}}, cx, layer);"
        yield "else"
    yield f"{function}(Layer{variants[last[0]]}{{}}, cx, layer);"


def _choice_of_matrix() -> Iterator[str]:
    for place, phase in enumerate(LAYER):
        if phase is LAYER[-1]:
            yield f"use({_pascal(phase.name)}{{}});"
        elif phase.product:
            yield f"if (phase == {place}u) return use({_pascal(phase.name)}{{}});"


def _shared_mlp(plan: Plan, kind: LayerKind) -> Iterator[str]:
    """A struct of the MLP beside a layer's experts, with what that of a layer has of its MLP."""
    if "shared.down" not in kind.operations:
        return
    gated = plan.exchanges.workspace[plan.exchanges.shared_gated(kind)]
    constants = {"kWsGated": gated.offset, "kWsGatedBytes": gated.num_bytes}
    yield "// The MLP that all tokens take."
    yield "struct SharedMlp {"
    yield "  using GateUp = SharedGateUp;"
    yield "  using Down = SharedDown;"
    yield from _indented(_constants(constants, "static "))
    yield "};"


def _place_of_layer(segment: "Segment", first: int, offset: Callable[[int], int]) -> str:
    """An expression of `layer`, one of those that a struct is for: `first`, and a period later."""
    period = len(segment.kinds)
    if segment.end - segment.first == period:
        return f"{offset(first)}ull"
    stride = offset(first + period) - offset(first)
    count = "static_cast<unsigned long long>(layer)"
    if segment.first:
        count = f"static_cast<unsigned long long>(layer - {segment.first}u)"
    if period > 1:
        count = f"({count} / {period}u)"
    base = f"{offset(first)}ull + " if offset(first) else ""
    return f"{base}{count} * {stride}u"


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive layers whose kinds repeat.

    Attributes:
        first: its first layer.
        end: the layer after its last one.
        kinds: of the layers of one period.
    """

    first: int
    end: int
    kinds: tuple[int, ...]

    @property
    def firsts(self) -> range:
        """The layers of the first period."""
        return range(self.first, self.first + len(self.kinds))


@dataclass(frozen=True, slots=True)
class Variants:
    """Kinds of layers that differ in the formats of matrices only, and share all other code.

    Attributes:
        alike: for every layer a number; layers of one number differ in no more than formats.
        number_of: for every layer, which of the kinds with its number it is.
        kind_of: for every layer, its kind.
    """

    alike: tuple[int, ...]
    number_of: tuple[int, ...]
    kind_of: tuple[int, ...]

    def cuda(self, model: str, image: Image) -> Iterator[str]:
        """By layer which kind it is and where its weights begin, if some have to be asked."""
        if not any(self.number_of):
            return
        numbers = ", ".join(str(number) for number in self.number_of)
        offsets = ", ".join(f"{image.layer_offset(i)}ull" for i in range(len(self.number_of)))
        yield f"__constant__ const unsigned k{model}Variant[] = {{{numbers}}};"
        yield f"__constant__ const unsigned long long k{model}Weights[] = {{{offsets}}};"

    def of_place(self, segment: "Segment", first: int) -> list[int]:
        """Of each kind that layers of one place in a loop's body have, the first layer."""
        kinds: dict[int, int] = {}
        for layer in range(first, segment.end, len(segment.kinds)):
            kinds.setdefault(self.kind_of[layer], layer)
        if len(kinds) == 1:
            return [first]
        numbers = {self.number_of[layer]: layer for layer in kinds.values()}
        return [numbers[number] for number in sorted(numbers)]


def variants_of(image: Image) -> Variants:
    """Which kinds of layers share code."""
    keys = [
        (kind.layer, kind.hidden_size, kind.spread, kind.vector_values, kind.tables)
        for kind in image.kinds
    ]
    number: dict[object, int] = {}
    alike = [number.setdefault(key, len(number)) for key in keys]
    within = [alike[:kind].count(own) for kind, own in enumerate(alike)]
    return Variants(
        tuple(alike[kind] for kind in image.kind_of),
        tuple(within[kind] for kind in image.kind_of),
        image.kind_of,
    )


def segments(kinds: Sequence[int]) -> list[Segment]:
    """Layers in as few loops as periods allow: each takes the longest run that repeats."""
    found: list[Segment] = []
    first = 0
    while first < len(kinds):
        best = Segment(first, first + 1, (kinds[first],))
        for period in range(1, (len(kinds) - first) // 2 + 1):
            body, end = tuple(kinds[first : first + period]), first + period
            while tuple(kinds[end : end + period]) == body:
                end += period
            if end > best.end and end > first + period:
                best = Segment(first, end, body)
        found.append(best)
        first = best.end
    return found


def _layer_loops(loops: Sequence[Segment]) -> Iterator[str]:
    yield "unsigned layer = 0;"
    for segment in loops:
        body = [
            line
            for first in segment.firsts
            for line in (f"run_layer(Layer{first}{{}}, cx, layer);", "++layer;")
        ]
        if segment.end - segment.first == len(segment.kinds):
            yield from body
            continue
        yield "#pragma unroll 1"
        yield f"while (layer < {segment.end}u) {{"
        yield from _indented(body)
        yield "}"


def _choice_of_kind(name: str, loops: Sequence[Segment], variants: Variants) -> Iterator[str]:
    """Statements that call `use` with the kind of `layer`."""
    for segment in loops:
        period = len(segment.kinds)
        for place, first in enumerate(segment.firsts):
            conditions = []
            if segment is not loops[-1]:
                conditions.append(f"layer < {segment.end}u")
            if place + 1 < period:
                conditions.append(f"(layer - {segment.first}u) % {period}u == {place}u")
            *others, last = variants.of_place(segment, first)
            for layer in others:
                one = [*conditions, f"k{name}Variant[layer] == {variants.number_of[layer]}u"]
                yield f"if ({' && '.join(one)}) return use(Layer{layer}{{}});"
            if conditions:
                yield f"if ({' && '.join(conditions)}) return use(Layer{last}{{}});"
            else:
                yield f"use(Layer{last}{{}});"


_VECTORS = (
    "attention_norm", "mlp_norm", "q_norm", "k_norm",
    "qkv_bias", "attention_output_bias", "gate_up_bias", "down_bias",
)  # fmt: skip


_ROUTER_VECTORS = ("router", "router_correction", "router_output")


def _experts(plan: Plan) -> dict[str, Value]:
    """Constants of a model's experts; 0 where it has none."""
    kinds = [kind.experts for kind in plan.image.kinds if kind.experts]
    constants: dict[str, Value] = {
        "kMostSlots": plan.shared.most_slots, "kFeedsRouters": plan.routes_early,
    }  # fmt: skip
    if kinds:
        constants["kMostExperts"] = max(experts.router.num_experts for experts in kinds)
        constants["kMostLogits"] = max(experts.num_logits for experts in kinds)
        constants["kHasSharedMlp"] = plan.has_shared_mlp
        constants["kGatesShared"] = plan.shared.gates_shared
        constants["kTraceChosen"] = num_time_words(plan)
    return constants


def _experts_of(kind: LayerKind) -> dict[str, Value]:
    """Constants of a layer's experts."""
    experts = kind.experts
    if experts is None:
        return {"kExperts": 0, "kRoutesEarly": False}
    router = experts.router
    return {
        "kExperts": router.num_experts,
        "kChosen": router.num_chosen,
        "kSigmoid": router.scores == "sigmoid",
        "kCorrected": router.is_corrected,
        "kNormalises": router.normalises,
        "kLeastSum": router.least_sum,
        "kRouterScale": router.scale,
        "kExpertBytes": experts.num_bytes,
        "kGateUpBytes": experts.gate_up.num_bytes,
        "kTileBytes": experts.gate_up.unit_bytes,
        "kRowBytes": experts.down.unit_bytes,
        "kSlotColumns": experts.slot_columns,
        "kTilesTogether": experts.tiles_together,
        "kHasSharedMlp": "shared.down" in kind.operations,
        "kGatesShared": experts.gates_shared,
        "kRoutesEarly": kind.routes_early,
    }


def _lanes(plan: Plan) -> dict[str, Value]:
    """Constants of lanes; an ordinary model has one."""
    return {
        "kHasLanes": plan.shape.has_lanes,
        "kLanes": plan.shape.lanes,
        "kLanesHere": plan.shape.lanes_here,
        "kLaneWorkspaceBytes": plan.exchanges.lane_bytes,
        "kLaneVectors": plan.image.vector_values if plan.shape.vector_lanes > 1 else 0,
        "kMeets": plan.shape.meets,
        "kWsPublishedMid": 0, "kWsPublishedIn": 0, "kWsPublishedOut": 0,
        **plan.shape.delays,
    }  # fmt: skip


def _operation(op: Operation, offset: int, table: int, depth: int) -> str:
    """A struct of a multiply.

    Args:
        op: which.
        offset: bytes from the start of a block's layer, or its weights, to the matrix.
        table: values of 32 bits from the start of a layer's vectors, or of all, to the table of a
            permuted matrix.
        depth: steps of a turn of its loop.
    """
    matrix = op.matrix
    values: dict[str, Value] = {
        "kUnits": matrix.units,
        "kMaxUnits": matrix.max_units,
        "kBlocks": matrix.blocks,
        "kSteps": matrix.steps,
        "kColumns": matrix.columns,
        "kTiles": op.group_tiles,
        "kEven": matrix.units % matrix.blocks == 0,
        "kUnitHalves": matrix.unit_half_tiles,
        "kDepth": depth,
        "kStepsAtOnce": op.steps_at_once,
        "kHalfTileBytes": matrix.format.half_tile_bytes,
        "kHalfTileValueBytes": matrix.format.half_tile_values_bytes,
        "kSlotTiles": op.slot_tiles,
        "kOffset": offset,
        "kPermuted": matrix.format.is_permuted,
        "kPairsSteps": matrix.pairs_steps,
        "kEndsInHalf": matrix.ends_in_half,
        "kSkipsPadding": matrix.skips_padding,
    }
    if matrix.format.is_permuted:
        values["kTable"] = table
    lines = [f"using Format = {matrix.format.reader};", *_constants(values, "static ")]
    return f"struct {_pascal(matrix.name)} {{ {' '.join([*lines, *matrix.cuda()])} }};"


def _residual(image: Image) -> str:
    down, *others = (
        kind.operations[product.name].matrix
        for kind in image.kinds
        for product in products_of(kind.layer)
        if product.joins
    )
    for other in others:
        assert (down.units, down.blocks) == (other.units, other.blocks), "rows of the residual"
    values: dict[str, Value] = {
        "kUnits": down.units,
        "kMaxUnits": down.max_units,
        "kBlocks": down.blocks,
    }
    return f"struct Residual {{ {' '.join([*_constants(values, 'static '), *down.cuda()])} }};"


def _constants(values: Mapping[str, Value], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        yield prefix + _constant(name, value)


def _indented(lines: Iterable[str], levels: int = 1) -> Iterator[str]:
    for line in lines:
        yield line if line.startswith("#") else "  " * levels + line


def _constant(name: str, value: Value) -> str:
    if isinstance(value, bool):
        return f"constexpr bool {name} = {str(value).lower()};"
    if isinstance(value, float):
        return f"constexpr float {name} = {struct.unpack('f', struct.pack('f', value))[0].hex()}f;"
    if value >= 1 << 31:
        return f"constexpr unsigned long long {name} = {value}ull;"
    return f"constexpr unsigned {name} = {value}u;"


def _pascal(name: str) -> str:
    return "".join(part.capitalize() for part in name.replace(".", "_").split("_"))
