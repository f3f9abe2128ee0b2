"""The multiply of integers (`tile/multiply.cuh` and what it includes), compiled by g++.

A warp's lanes are coroutines, which meet where they exchange registers or multiply together. The
loop over turns, slots, tiles and pairs of steps, the readers of formats and the digits are the
kernel's own; the ring is an array. The interpreter has to come to the same bits.
"""

import ctypes
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import product as product_of
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from interpreter.models import gpu
from interpreter.quantised import FORMATS, random_parts
from plan.shapes import SMALL
from soloist.megakernel.header import _operation
from soloist.megakernel.interpreter.multiply import product
from soloist.megakernel.interpreter.tiles import unpacked
from soloist.megakernel.layer_kind import CONVERTED_STEPS, LOADED_STEPS, Operation
from soloist.megakernel.limits import CONSUMER_WARPS, MAX_QUERIES
from soloist.megakernel.partition import Matrix, RowOrder
from soloist.megakernel.plan import make_plan
from soloist.megakernel.tile import HALF_TILE_ROWS, HALF_TILE_VALUES, STEP_COLUMNS
from soloist.megakernel.weight_format import READERS, quantized_format
from soloist.model.dtype import Dtype
from soloist.model.quantized import Codes
from soloist.weights.packing import pack
from unit.megakernel.lanes_on_host import LANES, place
from unit.megakernel.test_sample_cuda_on_host import CUDA, MEMORY

# What the kernel's code includes as it is.
REAL = (
    "activations", "digits", "formats", "integers", "multiply", "one_query", "padding", "scaled",
    "slot_of_warp", "sums", "super_blocks",
)  # fmt: skip

SPEC = f"""
#pragma once
#include "ptx/types.cuh"
constexpr u32 kMaxQueries = {MAX_QUERIES}, kConsumerWarps = {CONSUMER_WARPS}, kMostChains = 4;
constexpr u32 kLoadedSteps = {LOADED_STEPS}, kStepColumns = {STEP_COLUMNS};
constexpr u32 kHalfTileRows = {HALF_TILE_ROWS}, kHalfTileValues = {HALF_TILE_VALUES};
constexpr u32 kAblation = 0, kNoWaits = 1, kNoMultiply = 3, kWarpLanes = 32;
constexpr bool kSamples = false, kDrafts = false;
"""

MULTIPLY = r"""
#pragma once
#include "ptx/memory.cuh"
inline float from_fp16(u16 x) {
  _Float16 y;
  std::memcpy(&y, &x, 2);
  return static_cast<float>(y);
}
inline float from_half(u16 x) {
  return kBf16 ? __uint_as_float(static_cast<u32>(x) << 16) : from_fp16(x);
}
inline float low_half(u32 pair) { return from_half(static_cast<u16>(pair)); }
inline float high_half(u32 pair) { return from_half(static_cast<u16>(pair >> 16)); }
inline u32 pack_fp16(float, float) { std::abort(); }
template <bool = false, class... T> void mma(float (&)[4], T...) { std::abort(); }

inline i32 dot2(u32 a, u32 b, bool upper, i32 c) {
  for (u32 i = 0; i < 2; ++i) {
    const i32 byte = b >> (16 * upper + 8 * i) & 0xFF;
    c += static_cast<short>(a >> 16 * i) * byte;
  }
  return c;
}
inline i32 signed_byte(u32 x, u32 byte) { return static_cast<signed char>(x >> 8 * byte); }

// d = a b + c of m16n8k32 (PTX ISA, matrix fragments for mma.m16n8k32).
template <bool kSigned, bool kSignedB = true>
inline void mma(i32 (&d)[4], uint4 a, u32 b0, u32 b1, const i32 (&c)[4]) {
  const u32 g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  const Left* all = meet({{a.x, a.y, a.z, a.w, b0, b1}});
  for (u32 i = 0; i < 4; ++i) {
    i64 sum = c[i];
    for (u32 k = 0; k < 32; ++k) {
      const u32 quad = k % 16 / 4, byte = k % 4 * 8, part = k / 16;
      const u32 left = all[g * 4 + quad].words[part * 2 + i / 2] >> byte & 0xFF;
      const u32 right = all[(2 * q + i % 2) * 4 + quad].words[4 + part] >> byte & 0xFF;
      const i64 value = kSigned ? static_cast<signed char>(left) : static_cast<i32>(left);
      sum += value * (kSignedB ? static_cast<signed char>(right) : static_cast<i32>(right));
    }
    if (sum != static_cast<i32>(sum)) std::abort();
    d[i] = static_cast<i32>(sum);
  }
}
"""

RING = r"""
#pragma once
#include "ptx/memory.cuh"
#include "sync/wait.cuh"
static u32 warp, slots_read;
template <class M>
struct Ring {
  u32 slot = 0, num_free = 0;
  u32 take() {
    if (slot - num_free >= M::kRingSlots) std::abort();  // the producer would wait for ever
    return M::kSlotBytes * slot++;
  }
  // Each slot is given back once, in order, and none before it was taken.
  void release(u32, u32 first, u32 count, u32 = 0) {
    if (count && first != num_free) std::abort();
    num_free += count;
    if (num_free > slot) std::abort();
  }
  // Of many slots all are the same here, and a warp gives back the one that it read.
  u32 wait(u32) const { return 0; }
  void release_for_all(u32, u32 ahead, u32) const {
    if (ahead != warp) std::abort();
    slots_read += 1;
  }
};
"""

# Nothing is copied here.
STAGE = r"""
#pragma once
#include "ptx/memory.cuh"
constexpr u32 kStagingLanes = 1;
inline void mbarrier_expect(u32, u32) { std::abort(); }
inline void copy_expected(u32, const u8*, u32, u32, u64) { std::abort(); }
"""

MAIN = r"""
#include "tile/slot_of_warp.cuh"

struct Context {
  u32 warp, lane, queries;
  struct { u32 converted() const { return kConvertedAt; } } shared;
  const float* vectors(u64) const { return nullptr; }
};
static const u8* activations;
static u32 num_queries;
static float* out;  // [warp][row][query]

// Stores sums of the first tiles when they are said to be complete.
template <class Store>
struct First {
  static constexpr u32 kTiles = kFirstTiles;
  const Store& store;
  void operator()() const {
    for (u32 t = 0; t < kTiles; ++t) store(t);
  }
};

static void run_lane(u32 lane) {
  const u32 rows = Any::kUnits * 8;
  Ring<Kernel> ring;
  Sums<Any> sums;
  GlobalOperand<Any> operand(activations, Context{warp, lane, num_queries});
  constexpr u32 kGroups = (Any::kUnits + 2 * Any::kTiles - 1) / (2 * Any::kTiles);
  static_assert(kGroups == 1, "one group of tiles");
  Ahead<Any> ahead;
  ahead.fill(operand);
  if (kOfSecondGroup) {  // after another one, whose sums nobody looks at
    multiply<Any::kUnits, true>(ring, warp, lane, operand, ahead, sums, [] {});
    ring.slot = ring.num_free = 0;
  }
  const auto store = [&](u32 t) {
    for (u32 i = 0; i < 4; ++i) {
      const u32 row = t * 16 + i / 2 * 8 + lane / 4, query = lane % 4 * 2 + i % 2;
      if (row >= rows || query >= num_queries) continue;
      float& place = out[(warp * rows + row) * kMaxQueries + query];
      if (place != 0) std::abort();  // each is stored once
      place = sums.total(t, i);
    }
  };
  const First<decltype(store)> part{store};
  multiply<Any::kUnits, false>(ring, warp, lane, operand, ahead, sums, [] {}, part);
  if (ring.num_free != ring.slot) std::abort();
  if constexpr (kDealsTiles<Any>) {
    for_each_dealt(sums, Any::kUnits, lane, [&](u32 row, float x) {
      out[(warp * rows + row) * kMaxQueries] = x;
    });
  } else {
    for (u32 t = kFirstTiles; t < Any::kTiles; ++t) store(t);
  }
}

extern "C" void multiply_all(const u8* packed, u64 bytes, const u8* given, u32 queries,
                             float* results) {
  if (bytes > kConvertedAt) std::abort();
  std::memcpy(shared, packed, bytes);
  activations = given, num_queries = queries, out = results;
  for (warp = 0; warp < kConsumerWarps; ++warp) run_warp(warp, run_lane);
}

template <class Op>
static void run_lane_alone(u32 lane) {
  if constexpr (kConverts<Op> && SlotOfWarp<Op>::kFits) {
    const GlobalOperand<SlotOfWarp<Op>> of_warp(nullptr, Context{warp, lane, 1});
    const auto operand = operand_of_slot(activations, of_warp, lane);
    Ahead<SlotOfWarp<Op>> ahead;
    ahead.fill(operand);
    multiply_slot(Ring<Kernel>(), warp, lane, operand, ahead, operand.converted);
  }
}

// A slot that one warp multiplies; returns the number of parts of its columns.
extern "C" u32 multiply_alone(const u8* packed, u64 bytes, const u8* given, u32 which,
                              float* results) {
  std::memcpy(shared, packed, bytes);
  activations = given, warp = which, slots_read = 0;
  run_warp(warp, run_lane_alone<Any>);
  const u32 at = kConvertedAt + warp * (kConvertedSteps * 128), parts = SlotOfWarp<Any>::kParts;
  std::memcpy(results, shared + at, parts * 16 * sizeof(float));  // [part][row]
  return slots_read == kWarpLanes ? parts : 0;
}
"""


class Conversion(NamedTuple):
    """Steps of one query that have room and that are converted at once; for a second group."""

    room: int = CONVERTED_STEPS[0]
    at_once: int = CONVERTED_STEPS[0]
    of_second_group: bool = False


ALL_AT_ONCE = Conversion()


def library(
    op: Operation, queries: int, depth: int, dtype: Dtype, moves: bool, folder: Path,
    conversion: Conversion = ALL_AT_ONCE, releases_late: bool = False, first_tiles: int = 0,
) -> ctypes.CDLL:  # fmt: skip
    """The multiply of a matrix, in a build for so many queries with so many steps in a turn."""
    compiler = shutil.which("g++")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs g++ on Linux to compile the kernel's code for the host")
    bools = {
        "kBf16": dtype is Dtype.BF16, "kMovesRegisters": moves,
        "kOfSecondGroup": conversion.of_second_group,
    }  # fmt: skip
    spec = [SPEC, *(f"constexpr bool {name} = {str(x).lower()};" for name, x in bools.items())]
    spec += [f"constexpr u32 kConvertedSteps = {conversion.room}, kFirstTiles = {first_tiles};"]
    at_once = f"kStepsAtOnce = {conversion.at_once}"
    spec += [f"constexpr u32 kMostQueries = {queries}, kBatch = {2 if moves else 1};", *READERS]
    model = f"""
    struct Kernel {{
      static constexpr u32 kEarlySlots = {4 if moves else 0}, kQuantizedBatch = {2 if moves else 1};
      static constexpr u32 kRingSlots = 12, kSlotBytes = {op.slot_bytes};
      static constexpr bool kReleasesLate = {str(releases_late).lower()};
    }};
    {re.sub("kStepsAtOnce = [^;]+", at_once, _operation(op, 0, 0, depth))}
    """
    wait = (CUDA / "sync/wait.cuh").read_text(encoding="utf-8")
    files = {
        "spec.cuh": "\n".join(spec),
        "ptx/memory.cuh": MEMORY + '#include "spec.cuh"\n' + LANES,
        "ptx/types.cuh": (CUDA / "ptx/types.cuh").read_text(encoding="utf-8"),
        "ptx/mma.cuh": MULTIPLY,
        # Which integers do not need.
        "ptx/e4m3.cuh": "uint2 fp16_of_e4m3(u32);",
        "ptx/e4m3_bits.cuh": "uint2 small_fp16_of_e4m3(u32);",
        "sync/wait.cuh": "#pragma once\n" + wait[wait.index("// Data from other blocks") :],
        "ptx/stage.cuh": STAGE,
        "tile/ring.cuh": RING,
        "main.cpp": MAIN.replace("struct Context", model + "struct Context", 1),
        **{f"tile/{n}.cuh": (CUDA / f"tile/{n}.cuh").read_text(encoding="utf-8") for n in REAL},
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    made = folder / "multiply.so"
    options = ["-std=c++17", "-O1", "-w", "-ffp-contract=off", "-shared", "-fPIC", f"-I{folder}"]
    done = subprocess.run(
        [compiler, *options, folder / "main.cpp", "-o", made],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(made))


def published(x: Tensor, room: int, dtype: torch.dtype) -> Tensor:
    """Activations [columns, 8] as they are exchanged: [columns / 32][queries][32]."""
    chunks = x[:, :room].to(dtype).unflatten(0, (-1, 32))
    return chunks.transpose(1, 2).contiguous()


# Kinds with and without zeros, groups that fit a pair of steps and narrower ones; 8 rows left over.
SUPER = [kind for kind, stored in FORMATS.items() if stored.super_block]
CASES = [
    ("int4", 48, 2048),
    ("int4", 16, 14336),  # two turns of converted activations, the last of them short
    ("int4-wide", 32, 1024),
    ("int4", 40, 2048),
    ("int4", 16, 1536),
    ("int4-zeros", 32, 1024),
    ("int8", 32, 2048),
    ("int8-zeros", 32, 1024),
    ("int4-offsets", 40, 1536),
    *((kind, 32, 2048) for kind in SUPER),
    *((kind, 40, 1536) for kind in SUPER),
    *((kind, 16, 2048) for kind in SUPER),  # one tile of two pairs of steps
    *((kind, 112, 2048) for kind in SUPER),  # four tiles and three of a pair of steps
]


@pytest.mark.few(25)
@pytest.mark.parametrize("moves", [True, False], ids=["hopper", "older"])
@pytest.mark.parametrize(
    ("queries", "fewer"), [(1, 0), (MAX_QUERIES, 2), (MAX_QUERIES, 4)],
    ids=["one", "two steps a turn", "four steps a turn"],
)  # fmt: skip
@pytest.mark.parametrize(("kind", "rows", "columns"), CASES)
def test_the_interpreter_has_the_bits_of_the_kernel(
    kind: str, rows: int, columns: int, queries: int, fewer: int, moves: bool, tmp_path: Path
) -> None:
    require_the_interpreters_bits(kind, rows, columns, queries, fewer, moves, tmp_path)


@pytest.mark.parametrize("of_second_group", [False, True])
@pytest.mark.parametrize(("room", "at_once"), [(16, 8), (16, 4), (8, 4), (4, 4)])
@pytest.mark.parametrize(
    ("kind", "rows", "columns"),
    # Turns of two and of eight steps; three steps of one turn; eight steps, of which all may stay.
    [("int4", 16, 14336), ("int4", 112, 4096), ("int4", 40, 1536), ("int8", 32, 4096)],
)
def test_activations_of_a_few_steps_are_converted_at_once(
    kind: str, rows: int, columns: int, room: int, at_once: int, of_second_group: bool,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Whether what is converted stays for another group of tiles or not."""
    conversion = Conversion(room, at_once, of_second_group)
    require_the_interpreters_bits(kind, rows, columns, 1, 0, True, tmp_path, conversion)


@pytest.mark.parametrize(
    ("queries", "of_second_group"), [(1, False), (1, True), (MAX_QUERIES, False)]
)
@pytest.mark.parametrize(
    ("kind", "rows", "columns"),
    # Many turns; many tiles; a turn of fewer steps at the end; several steps that are one turn.
    [("int4", 32, 14336), ("int4", 112, 4096), ("int4", 16, 7680), ("int8", 40, 1536)],
)
def test_slots_are_given_back_after_the_multiply(
    kind: str, rows: int, columns: int, queries: int, of_second_group: bool, tmp_path: Path
) -> None:
    conversion = Conversion(of_second_group=of_second_group)
    require_the_interpreters_bits(
        kind, rows, columns, queries, 2, True, tmp_path, conversion, releases_late=True
    )


@pytest.mark.parametrize("releases_late", [False, True])
@pytest.mark.parametrize(
    ("kind", "rows", "columns", "first_tiles"),
    # One turn and several; tiles in even and odd number; few and most of them.
    [
        ("int4", 112, 1024, 2),
        ("int4", 128, 4096, 4),
        ("int4", 224, 2048, 10),
        ("int8", 96, 2048, 4),
    ],
)  # fmt: skip
def test_the_first_tiles_are_complete_within_the_last_turn(
    kind: str, rows: int, columns: int, first_tiles: int, releases_late: bool, tmp_path: Path
) -> None:
    """Whoever wants them need not wait for the other ones."""
    require_the_interpreters_bits(
        kind, rows, columns, MAX_QUERIES, 2, True, tmp_path, releases_late=releases_late,
        first_tiles=first_tiles,
    )  # fmt: skip


def require_the_interpreters_bits(
    kind: str, rows: int, columns: int, queries: int, fewer: int, moves: bool, folder: Path,
    conversion: Conversion = ALL_AT_ONCE, releases_late: bool = False, first_tiles: int = 0,
) -> None:  # fmt: skip
    dtype = Dtype.FP16 if kind == "int4-wide" else Dtype.BF16
    half = torch.float16 if dtype is Dtype.FP16 else torch.bfloat16
    stored = FORMATS[kind]
    assert stored.codes is not Codes.FP8
    matrix = Matrix(
        "any", rows, columns, RowOrder.NATURAL, blocks=1, format=quantized_format(stored)
    )
    op = Operation(matrix, -(-rows // 16), gpu(9))
    packed = pack(make_plan(SMALL, dtype, gpu(9)), op, random_parts(rows, columns, stored))
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(matrix.steps * STEP_COLUMNS, MAX_QUERIES, generator=draw)
    x = (x * torch.logspace(-3, 3, MAX_QUERIES)).to(half).float()
    wanted = product(unpacked(packed.flatten(), op, rows, half), matrix, x, half, rounds=True)
    depth = op.depth_for(queries, fewer)
    built = library(
        op, queries, depth, dtype, moves, folder, conversion, releases_late, first_tiles
    )
    for num_queries in {1, queries, min(queries, 3)}:
        given = published(x, queries, half)
        out = torch.zeros(CONSUMER_WARPS, rows, MAX_QUERIES)
        flat = packed.flatten().contiguous()
        built.multiply_all(
            place(flat), ctypes.c_uint64(flat.numel()), place(given), num_queries, place(out)
        )
        first, *others = out.unbind()
        seen = sum(others, first)
        assert torch.equal(seen[:, :num_queries], wanted[:, :num_queries])


def left_out(matrix: Matrix) -> Tensor:
    """Which bytes of a row of tiles are padding that is not copied: values of whole warps."""
    values, tile = (2 * x for x in (
        matrix.format.half_tile_values_bytes, matrix.format.half_tile_bytes,
    ))  # fmt: skip
    found = torch.zeros(matrix.steps, tile, dtype=torch.bool)
    by_warp = found[:, :values].view(matrix.steps, -1, CONSUMER_WARPS, 512)
    for step, warp in product_of(range(matrix.steps), range(CONSUMER_WARPS)):
        first = step * STEP_COLUMNS + warp * 64
        if matrix.pairs_steps:
            first = step // 2 * 2 * STEP_COLUMNS + warp * 128
        by_warp[step, :, warp] = first >= matrix.columns
    return found.flatten()


@pytest.mark.parametrize("queries", [1, MAX_QUERIES])
@pytest.mark.parametrize(
    ("kind", "columns"),
    [("int4", 768), ("int4-zeros", 768), ("int4-offsets", 200), ("int8", 768), ("int8-zeros", 64)],
)
def test_padding_that_is_not_copied_may_be_anything(
    kind: str, columns: int, queries: int, tmp_path: Path
) -> None:
    """Whose activations are zeros."""
    op, flat, x, wanted = slot_with_padding(kind, columns)
    built = library(op, queries, op.depth_for(queries, 2), Dtype.BF16, True, tmp_path)
    given = published(x, queries, torch.bfloat16)
    out = torch.zeros(CONSUMER_WARPS, 16, MAX_QUERIES)
    num_bytes = ctypes.c_uint64(flat.numel())
    built.multiply_all(place(flat), num_bytes, place(given), queries, place(out))
    first, *others = out.unbind()
    assert torch.equal(sum(others, first)[:, :queries], wanted[:, :queries])


@pytest.mark.parametrize("warp", [0, 7])
@pytest.mark.parametrize(
    ("kind", "columns"),
    [
        ("int4", 768), ("int4-wide", 704), ("int4-zeros", 768), ("int4-offsets", 200),
        ("int8", 768), ("int8-zeros", 64),
    ],
)  # fmt: skip
def test_a_slot_of_one_warp_has_the_bits_of_one_that_all_share(
    kind: str, columns: int, warp: int, tmp_path: Path
) -> None:
    op, flat, x, wanted = slot_with_padding(kind, columns)
    built = library(op, 1, op.depth_for(1, 2), Dtype.BF16, True, tmp_path)
    given = published(x, 1, torch.bfloat16)
    out = torch.full((CONSUMER_WARPS, 16), torch.nan)
    parts = built.multiply_alone(
        place(flat), ctypes.c_uint64(flat.numel()), place(given), warp, place(out)
    )
    each = 128 if op.matrix.pairs_steps else 64
    assert parts == min(-(-columns // each), CONSUMER_WARPS)
    first, *others = out[:parts].unbind()
    assert torch.equal(sum(others, first), wanted[:, 0])


def slot_with_padding(kind: str, columns: int) -> tuple[Operation, Tensor, Tensor, Tensor]:
    """A tile of all columns, in which padding is arbitrary; activations and what it gives."""
    matrix = Matrix("any", 16, columns, RowOrder.NATURAL, 1, quantized_format(FORMATS[kind]))
    assert matrix.may_skip_padding
    op = Operation(replace(matrix, skips_padding=True), 1, gpu(9))
    plan, parts = make_plan(SMALL, Dtype.BF16, gpu(9)), random_parts(16, columns, FORMATS[kind])
    packed = pack(plan, op, parts)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(matrix.steps * STEP_COLUMNS, MAX_QUERIES, generator=draw).bfloat16().float()
    x[columns:] = 0
    weights = unpacked(packed.flatten(), op, 16, torch.bfloat16)
    wanted = product(weights, matrix, x, torch.bfloat16, rounds=True)
    flat = packed.flatten().contiguous()
    padding = left_out(matrix)
    assert padding.any()
    assert len(padding) == len(flat)
    flat[padding] = torch.randint(0, 256, (int(padding.sum()),), generator=draw).to(torch.uint8)
    return op, flat, x, wanted
