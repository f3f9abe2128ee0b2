"""Plan → the header that the CUDA sources are compiled with: every constant and layout, by name."""

import math
import struct
from dataclasses import dataclass
from typing import TypeAlias

from soloist.megakernel.abi import MAX_STOPS, enumeration, structs
from soloist.megakernel.layer_kind import Operation
from soloist.megakernel.limits import CONSUMER_WARPS, MAX_COLUMNS, THREADS, TURNS
from soloist.megakernel.plan import Plan
from soloist.megakernel.program import PHASES
from soloist.megakernel.sampling_header import (
    sample_workspace_bytes,
    sampling_constants,
    sampling_words,
)
from soloist.megakernel.tile import SLOT_BYTES
from soloist.megakernel.trace import num_words as num_trace_words
from soloist.model.dtype import Dtype
from soloist.sampling.constraint import num_words

Value: TypeAlias = bool | int | float

# Columns that a launch may have, of each of the two builds that serve requests.
BUILT_FOR = (1, MAX_COLUMNS)
# A block that gets nowhere for so long is stuck.
STUCK_NS = 2_000_000_000
# The same where it waits for the host to say which tokens are allowed: that may take a while on a
# busy machine, and is no fault of the kernel's.
MASK_NS = 60_000_000_000
# Words from one column's turn to the next: each in a cache line of its own.
MASK_TURN_WORDS = 16
# No block has this number.
_NO_BLOCK = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Build:
    """How a kernel is built beside its plan; as it stands here, to run greedy requests.

    Attributes:
        samples: choose tokens by their columns' `Choice`, not only the largest logit.
        columns: how many a launch may have: one, which takes the least code, or `MAX_COLUMNS`. A
            column's bits are the same.
        trace_round: take time stamps in this round of a launch.
        ablation: leave something out: a value of `ABLATIONS`. Its tokens mean nothing.
        silent_block: a block that never publishes its activations, so that the others get stuck.
        cleaner_cycles: by which all cleaning of exchange buffers is late: no bit depends on that.
        stuck_ns: how long a block may get nowhere, less than 2^32.
        mask_ns: how long it may wait for the host to say which tokens are allowed.
        alone: the first rank of several runs without the others: what it tells them, it tells
            itself in their stead. To see what a token would take; its own mean nothing.
        racecheck: for compute-sanitizer's tool of that name: every thread tells a slot's barrier
            itself what its warp's first lane tells for all, and the watchdog does not look.
    """

    samples: bool = False
    columns: int = MAX_COLUMNS
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
    """The text of spec.cuh."""
    plan = plan.with_room_for(build.columns, samples=build.samples)
    model, kind = plan.model, plan.image.kinds[0]
    attention, mlp = kind.layer.attention, kind.layer.mlp
    shape, attending, exchanges, shared = plan.shape, plan.attention, plan.exchanges, plan.shared
    tuning = plan.gpu.architecture.tuning
    # The rows of one column fit a tile; which warps have rows is left as it is, for the bits' sake.
    warp_tiles = 1 if build.columns == 1 else attending.warp_tiles
    constants: dict[str, Value] = {
        "kBf16": plan.dtype is Dtype.BF16,
        "kNumBlocks": plan.grid_blocks,
        "kLaneBlocks": plan.blocks,
        "kConsumerWarps": CONSUMER_WARPS,
        "kConsumerThreads": CONSUMER_WARPS * 32,
        "kThreads": THREADS,
        "kMovesRegisters": plan.gpu.architecture.moves_registers,
        "kConsumerRegisters": plan.gpu.architecture.consumer_registers,
        "kHelperRegisters": plan.gpu.architecture.helper_registers,
        "kMaxColumns": MAX_COLUMNS,
        "kMostColumns": build.columns,
        "kSamples": build.samples,
        "kMaxStops": MAX_STOPS,
        "kStuckNs": build.stuck_ns,
        "kMaskNs": build.mask_ns,
        "kMaskTurnWords": MASK_TURN_WORDS,
        "kRacecheck": build.racecheck,
        "kAlone": build.alone,
        "kSilentBlock": _NO_BLOCK if build.silent_block is None else build.silent_block,
        "kCleanerCycles": build.cleaner_cycles,
        "kLayers": model.num_layers,
        "kHidden": model.hidden_size,
        "kTurns": TURNS,
        "kVocab": model.vocab_size,
        "kVocabRows": exchanges.logit_rows,
        "kSampledRows": exchanges.sampled_rows,
        "kVocabWords": num_words(model.vocab_size),
        "kRanks": 1 if model.lanes else plan.ranks,
        "kPeers": plan.ranks,
        "kShareVocab": plan.share.vocab_size,
        "kQueryHeads": shape.query_heads,
        "kKvHeads": shape.kv_heads,
        "kGroup": shape.group,
        "kHeadDim": shape.head_dim,
        "kTiedHead": plan.share.tied_head,
        "kQkNorm": attention.qk_norm,
        "kQkvBias": attention.qkv_bias,
        "kOutputBias": attention.output_bias,
        "kMlpBias": mlp.bias,
        "kEpsilon": float(model.norm_epsilon),
        "kScoreScale": shape.head_dim**-0.5 * math.log2(math.e),
        "kRingSlots": shared.ring_slots,
        "kSlotBytes": SLOT_BYTES,
        "kCopies": plan.copies_in_flight[0],
        "kHalfCopies": plan.copies_in_flight[1],
        "kEmptyCopies": plan.copies_in_flight[2],
        "kHeadCopies": plan.head_copies_in_flight,
        "kPageCopies": tuning.page_copies_in_flight,
        "kFetchSlots": plan.fetch_slots,
        "kFetchCycles": tuning.fetch_cycles,
        "kAblation": build.ablation,
        "kTrace": build.trace_round is not None,
        "kTraceRound": build.trace_round or 0,
        "kTraceWords": num_trace_words(plan),
        "kReduceBytes": shared.reduce_bytes,
        "kWideReduceBytes": shared.wide_reduce_bytes,
        "kSplits": attending.splits,
        "kSplitBits": attending.splits.bit_length() - 1,
        "kNearPositions": attending.near_positions,
        "kSplitPositions": attending.split_positions,
        "kTurnLayers": attending.turn_layers,
        "kChunkPages": attending.chunk_pages,
        "kEarlySlots": plan.early_slots,
        "kMostChains": tuning.max_chains,
        "kBatch": tuning.batch_slots,
        "kRowTiles": attending.row_tiles // attending.warp_tiles * warp_tiles,
        "kWarpTiles": warp_tiles,
        "kSoftmaxLanes": attending.softmax_lanes,
        "kPageSlot": attending.page_slot,
        "kBlockStride": plan.image.block_stride,
        "kLayerBytes": kind.num_bytes,
        "kLayerVectors": kind.vector_values,
    }
    constants |= _lanes(plan)
    for name in _VECTORS:
        buffer = kind.vectors.get(name)
        constants[f"kVec{_pascal(name)}"] = buffer.offset // 4 if buffer else 0
    names = ("sums_mid", "sums_in", "arrivals", "logits", "hidden_out", "squares_out")
    for name in names:  # of some plans only
        constants[f"kWs{_pascal(name)}"] = constants[f"kWs{_pascal(name)}Bytes"] = 0
    for name, buffer in exchanges.workspace.items():
        constants[f"kWs{_pascal(name)}"] = buffer.offset
        constants[f"kWs{_pascal(name)}Bytes"] = buffer.num_bytes
    for name, buffer in exchanges.told.items():  # behind the lanes' workspaces
        constants[f"kWs{_pascal(name)}"] = exchanges.lane_bytes * shape.lanes_here + buffer.offset
    for name, buffer in shared.buffers.items():
        constants[f"kSh{_pascal(name)}"] = buffer.offset
        constants[f"kSh{_pascal(name)}Bytes"] = buffer.num_bytes
    constants["kSampleWorkspaceBytes"] = sample_workspace_bytes(plan.grid_blocks)
    windows = ", ".join(str(x.attention.window or 0) for x in model.layers)
    rotations = ", ".join(str(int(x.attention.rope)) for x in model.layers)
    return "\n".join(
        [
            "// Generated from the plan; see header.py.",
            "#pragma once",
            '#include "ptx/types.cuh"',
            *(_constant(name, value) for name, value in constants.items()),
            plan.kv_layout.cuda,
            *(_operation(op, kind.matrix_offset(name)) for name, op in kind.operations.items()),
            _operation(plan.head, plan.image.head_offset),
            f"__constant__ const int kWindow[kLayers] = {{{windows}}};",
            f"__constant__ const bool kRotated[kLayers] = {{{rotations}}};",
            sampling_constants(),
            sampling_words(),
            enumeration("Phase", (phase.name for phase in PHASES)),
            *(struct.cuda for struct in structs(plan.ranks)),
            "",
        ]
    )


_VECTORS = (
    "attention_norm", "mlp_norm", "q_norm", "k_norm",
    "qkv_bias", "attention_output_bias", "gate_up_bias", "down_bias",
)  # fmt: skip


def _lanes(plan: Plan) -> dict[str, Value]:
    """Constants of lanes; an ordinary model has one, which hears nobody."""
    constants: dict[str, Value] = {
        "kHasLanes": plan.model.lanes is not None,
        "kLanes": plan.shape.lanes,
        "kLanesHere": plan.shape.lanes_here,
        "kLaneWorkspaceBytes": plan.exchanges.lane_bytes,
        "kLaneVectors": plan.image.vector_values if plan.shape.vector_lanes > 1 else 0,
        "kMeets": plan.shape.meets,
        "kWsToldMid": 0, "kWsToldIn": 0, "kWsToldOut": 0,
    }  # fmt: skip
    if plan.model.lanes is None:
        return constants | {
            "kDelayLayers": 1, "kLaneTurns": 1, "kEarlySum": False, "kAttentionTalks": False,
            "kMlpTalks": False, "kSumBeforeNorm": False, "kAloneScale": 1.0,
        }  # fmt: skip
    lanes = plan.model.lanes
    return constants | {
        "kDelayLayers": lanes.delay_layers,
        "kLaneTurns": plan.shape.lane_turns,
        "kEarlySum": lanes.early_sum,
        "kAttentionTalks": lanes.attention_comm,
        "kMlpTalks": lanes.mlp_comm,
        "kSumBeforeNorm": lanes.sum_before_norm,
        "kAloneScale": math.sqrt(lanes.num_lanes),
    }


def _operation(op: Operation, offset: int) -> str:
    matrix = op.matrix
    values = {
        "kUnits": matrix.units,
        "kMaxUnits": matrix.max_units,
        "kSteps": matrix.steps,
        "kTiles": op.group_tiles,
        "kEven": matrix.units % matrix.blocks == 0,
        "kUnitHalves": matrix.unit_half_tiles,
        "kDepth": op.depth,
        "kOffset": offset,
    }
    inside = " ".join(f"static {_constant(name, value)}" for name, value in values.items())
    return f"struct {_pascal(matrix.name)} {{ {inside} }};"


def _constant(name: str, value: Value) -> str:
    if isinstance(value, bool):
        return f"constexpr bool {name} = {str(value).lower()};"
    if isinstance(value, float):
        return f"constexpr float {name} = {struct.unpack('f', struct.pack('f', value))[0].hex()}f;"
    if value >= 1 << 31:
        return f"constexpr unsigned long long {name} = {value}ull;"
    return f"constexpr unsigned {name} = {value}u;"


def _pascal(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))
