// Products of many tokens with a matrix as it is packed for the decode kernel, on Hopper: out [T, rows] = x [T, K] · matrixᵀ.
//
// wgmma takes 64 rows of the matrix from registers in the order in which they are packed, and kTokens tokens from shared memory. Where
// each warp's 16 rows lie, and where their results go, is in a table (prefill/fragments.py). Activations come with the words of 32
// columns transposed (`arranged_column` there). Weights that are no numbers of 16 bits become such in registers.
//
// A *span* of tokens, of one chunk of 64 columns or of two, comes to a slot of a ring, and the weights of kWeightChunks chunks to slots of another. A warp issues
// a bulk copy in some 60 cycles, lane by lane: so a copy brings several chunks, and kWeightWarps share the weights. kGroups groups of
// four warps multiply 64 rows each by the same tokens. A result's sum is made in one order, by rising columns: kTokens, T, and what
// lies beside it do not matter. Where a few tokens would leave SMs idle, kParts tiles have a part of the columns each, and give fp32.
//
// Where a tile has rows for one group alone, the groups are *slices*: each has a part of the columns, and the first one adds their sums
// ("sliced-K"). So both groups work on a tile of few tokens: 5 to 10 % of its time.
//
// Results leave through a third ring, 32 tokens of a tile in a slot, by a warp that stores them to memory: stores of all SMs at once
// take as long as a tenth of a tile, in which the next one is multiplied.
// Blocks take tiles in turn, first along the tokens: those that run at once share rows of the matrix in the L2.
//
// The kernel begins while the one before it still runs: weights come to their slots meanwhile. All that other kernels write is read
// by threads that have awaited these, or behind what such a thread has had copied. Products of experts begin when the kernel before them
// is over, since it says which weights they read.
//
// While a group's products are made it makes the next span's operands, and reads the weights of the one after from shared memory.
//
// kEightBits: both factors have 8 bits, e4m3. Codes of the matrix are operands as they are stored, and tokens come in 8 bits with a scale
// each (kernels/quantize_rows.cu). A sum is multiplied by its row's scale times its token's and then rounded as others are. The tensor
// cores of Hopper are said to keep some 14 bits of such a sum at each step: fewer than fp32 has, and enough beside factors of 4 bits.
//
// kGrouped: rows of x are those of experts, one expert's after another's, and each expert has a matrix of its own. Which rows are whose
// only the device knows: a table has pieces of at most kTokens rows of one expert. Blocks take tiles first along a piece's rows of the
// matrix. What lies behind a piece's last row is multiplied with it and not written.
#include "ptx/bulk.cuh"
#include "ptx/cluster.cuh"
#include "ptx/dependent.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tensor.cuh"
#include "ptx/transposed.cuh"
#include "ptx/turns.cuh"
#include "ptx/wgmma.cuh"
#include "sync/slots.cuh"
#include "tile/fragments.cuh"
#include "tile/silu.cuh"

inline constexpr u32 kMultiplyingWarps = 4 * kGroups, kRowWarps = kMultiplyingWarps / kSlices, kFragments = kRowWarps;
inline constexpr u32 kBoxValues = 64;  // of 16 bits, or pairs of 8
inline constexpr u32 kBoxes = kEightBits ? 1 : kSpanChunks, kBoxBytes = kTokens * kBoxValues * 2, kTokenBytes = kBoxes * kBoxBytes;
inline constexpr u32 kSlotSpans = kWeightChunks / kSpanChunks, kProducts = 4 * kBoxes;
// Of a slot's chunks, the next but one follows in memory where steps are paired: a half's part of them is copied in two runs.
inline constexpr u32 kRuns = kPairsSteps && kWeightChunks > 1 ? 2 : 1, kRunChunks = kWeightChunks / kRuns;
inline constexpr u32 kRunBytes = kRunChunks * kPieceBytes, kMoreRunBytes = kRunChunks * kMoreBytes;
// Of a fragment in a slot: pieces of all its chunks, and then what integers of 6 bits have more.
inline constexpr u32 kMoreFrom = 2 * kWeightChunks * kPieceBytes;
inline constexpr u32 kSlotFragmentBytes = kWeightChunks * kFragmentBytes, kWeightBytes = kFragments * kSlotFragmentBytes;
inline constexpr u32 kTokenRing = kTokenSlots * kTokenBytes, kWeightRing = kWeightSlots * kWeightBytes;
inline constexpr u32 kSums = kTokens / 2;
// A slice's sums on their way to those that are added to: words of all threads of a group.
inline constexpr u32 kRowThreads = kRowWarps * 32, kSlicedBytes = kSlices > 1 ? kSums * kRowThreads * 4 : 0;
// A slot of results has kBatch tokens of a tile, of which kLeaving are there: places of kPlaceBytes, so that no bank has two of what lanes
// store or read at once, kTokenPlaceBytes of a token. A place has 8 rows, or as fp32 a fragment's 16.
inline constexpr u32 kBatch = 32, kLeaving = kTokens < kBatch ? kTokens : kBatch;
inline constexpr u32 kFragmentPlaces = kOut == Out::kWide ? 1 : 2;
inline constexpr u32 kResultRing = kResultSlots * kResultBytes;

static_assert(kPackedShared == kTokenRing + kWeightRing + kResultRing + kSlicedBytes, "slots");
static_assert(kSlices == 1 || (kSlices == kGroups && kGroups == 2 && !kGrouped), "a group of each slice");
static_assert(kResultBytes == kFragments * kFragmentPlaces * kPlaceBytes, "a place for all that a slot has");
static_assert(1 + kWeightWarps + 1 == 4, "tokens, weights and results");
static_assert(kPackedThreads == (kMultiplyingWarps + 4) * 32, "one group of warps more than multiply");
static_assert(kBoxBytes % 1024 == 0, "tokens are swizzled in whole kilobytes");
static_assert(!kGrouped || kParts == 1, "rows of an expert are many");
static_assert(kParts == 1 || (kChunks % (2 * kParts) == 0 && kOut == Out::kWide), "equal parts, whose sums are added elsewhere");
static_assert(kChunks % (kParts * kSlices) == 0, "equal slices");
static_assert(kTokenSlots % kSlices == 0 && kWeightSlots % kSlices == 0, "a slot is always the same slice's: who waits for it has seen it full before");
static_assert(kChunks / (kParts * kSlices) % kWeightChunks == 0 && 2 * kStepChunks % kWeightChunks == 0, "slots begin with a part, and end in a step");
static_assert(kWeightChunks % kSpanChunks == 0, "a span's weights come together");
static_assert(!kEightBits || kSpanChunks == 2, "as many bytes as one chunk in 16 bits");
static_assert(!kEightBits || (kCodes == Codes::kFp8 && kGroup == kStepColumns && !kGrouped), "a scale for each row, which all steps have");

// Slots, and their barriers of 8 bytes each.
struct Ring {
  u32 data, full, empty;
};
struct Rings {
  Ring tokens, weights, results;
  u32 sliced;  // where the second slice's sums are
};
using TokenSlot = SlotState<kTokenSlots>;
using WeightSlot = SlotState<kWeightSlots>;
using ResultSlot = SlotState<kResultSlots>;
// What all tiles have in common.
struct Product {
  const u8* image;    // where the first block has the matrix
  const Half* table;  // [row tiles][BLOCK_FRAGMENTS][2]
  u8* out;
  u32 tokens, token_tiles, tiles, pitch;  // of out, in values
  u32 results;                            // values of a row that there are
  const u32* num_pieces;                  // grouped: `tiles` are those of one of them
  const Piece* pieces;
  u64 expert_bytes;           // from one expert's matrix to the next's
  const float* token_scales;  // in 8 bits; read in pairs, so there is one more where tokens are odd
};
inline constexpr u32 kTableHalves = 16;
// What a tile is of: rows, and where sums are made in parts, some of their chunks. Slices have as many each; what is copied for them
// comes in turns, a slot for each.
inline constexpr u32 kOwnChunks = kChunks / (kParts * kSlices), kOwnSpans = kOwnChunks / kSpanChunks;
static_assert(kOwnChunks % kSpanChunks == 0, "whole spans");
struct Tile {
  u32 token, row_tile, part;
  u32 stop;         // behind the last row of x that is its own
  const u8* image;  // where the first block has the matrix
  __device__ __forceinline__ Tile(const Product& product, u32 tile) {
    if constexpr (kGrouped) {
      const uint4 piece = __ldg(reinterpret_cast<const uint4*>(product.pieces) + tile / product.tiles);
      token = piece.y, stop = piece.z, row_tile = tile % product.tiles, part = 0;
      image = product.image + piece.x * product.expert_bytes;
    } else {
      token = tile % product.token_tiles * kTokens, row_tile = tile / product.token_tiles / kParts;
      part = kParts > 1 ? tile / product.token_tiles % kParts : 0;
      stop = product.tokens, image = product.image;
    }
  }
  // Of a slice.
  __device__ __forceinline__ u32 first_chunk(u32 slice) const { return (part * kSlices + slice) * kOwnChunks; }
  __device__ __forceinline__ u32 first_span(u32 slice) const { return (part * kSlices + slice) * kOwnSpans; }
};
__device__ __forceinline__ u32 num_tiles(const Product& product) {
  if constexpr (kGrouped) return *product.num_pieces * product.tiles;
  return product.tiles;
}

// One thread: all tokens.
__device__ __forceinline__ void load_tokens(const Ring& ring, const TensorMap& x, const Product& product) {
  TokenSlot to;
#pragma unroll 1
  for (u32 tile = blockIdx.x, end = num_tiles(product); tile < end; tile += gridDim.x) {
    const Tile own(product, tile);
#pragma unroll 1
    for (u32 i = 0; i < kOwnSpans * kSlices; ++i, to.next()) {
      const u32 span = own.first_span(i % kSlices) + i / kSlices;
      const u32 full = ring.full + to.slot * 8;
      wait_or_trap(ring.empty + to.slot * 8, to.round ^ 1);
      mbarrier_expect(full, kTokenBytes);
#pragma unroll
      for (u32 box = 0; box < kBoxes; ++box)
        load_box(ring.data + to.slot * kTokenBytes + box * kBoxBytes, x, (span * kBoxes + box) * kBoxValues, own.token, full);
    }
  }
}

// One of kWeightWarps: a lane for each of its halves. What goes with codes is read past the slots, and comes to the L2 meanwhile.
__device__ __forceinline__ void load_weights(const Ring& ring, const Product& product, u32 warp, u32 lane) {
  const u32 piece = lane * kWeightWarps + warp;
  WeightSlot to;
#pragma unroll 1
  for (u32 tile = blockIdx.x, end = num_tiles(product); tile < end; tile += gridDim.x) {
    const Tile own(product, tile);
    Half half{};
    if (piece < 2 * kFragments) half = product.table[own.row_tile * kTableHalves + piece];
    const bool copies = half.kind != HalfKind::kNone;
    const u32 bytes = __popc(__ballot_sync(~0u, copies)) * (kWeightChunks * (kPieceBytes + kMoreBytes));
#pragma unroll 1
    for (u32 i = 0; i < kOwnChunks * kSlices; i += kWeightChunks, to.next()) {
      const u32 number = i / kWeightChunks, chunk = own.first_chunk(number % kSlices) + number / kSlices * kWeightChunks;
      const u32 full = ring.full + to.slot * 8;
      wait_or_trap(ring.empty + to.slot * 8, to.round ^ 1);
      if (lane == 0) mbarrier_expect(full, bytes);
      __syncwarp();
      if (copies) {
        const u32 which = piece % 2, fragment = ring.data + to.slot * kWeightBytes + piece / 2 * kSlotFragmentBytes;
        const u32 at = fragment + which * kRunBytes, more = fragment + kMoreFrom + which * kMoreRunBytes;
#pragma unroll
        for (u32 run = 0; run < kRuns; ++run) {
          copy_bulk(at + run * 2 * kRunBytes, own.image + piece_at(half, which, chunk + run, kRunBytes), kRunBytes, full);
          if constexpr (kMoreBytes > 0)
            copy_bulk(more + run * 2 * kMoreRunBytes, own.image + more_at(half, which, chunk + run, kMoreRunBytes), kMoreRunBytes, full);
        }
        // In 8 bits all steps have the same ones.
        const u32 prefetched = !kEightBits ? kWeightChunks : i == 0 ? 1 : 0;
#pragma unroll 1
        for (u32 k = 0; k < prefetched; ++k) Shared::prefetch(own.image, half, which, chunk + k);
      }
    }
  }
}

// A fragment's results of kBatch tokens, from `first` on, become what leaves, in their place of a slot. 8 rows of a token are 16 bytes.
__device__ __forceinline__ void put_values(const float (&sums)[kSums], u32 first, u32 place, u32 lane) {
#pragma unroll
  for (u32 j = 0; j < kBatch; j += 16) {
    u32 words[4];  // 8 tokens of rows g and of rows g + 8, and the next 8
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      const u32 at = (first + j) / 8 * 4 + i * 2;
      words[i] = at < kSums ? pack_pair(sums[at % kSums], sums[(at + 1) % kSums]) : 0;
    }
    store_matrices_transposed(place + lane / 8 % 2 * kPlaceBytes + (j + lane / 16 * 8 + lane % 8) * 16, words);
  }
}

// The same as fp32.
__device__ __forceinline__ void put_wide(const float (&sums)[kSums], u32 first, u32 place, u32 lane) {
#pragma unroll
  for (u32 j = 0; j < kLeaving; j += 8)
#pragma unroll
    for (u32 i = 0; i < 4; ++i)
      store_shared1(place + (j + lane % 4 * 2 + i % 2) * kTokenPlaceBytes + (i / 2 * 8 + lane / 4) * 4,
                    __float_as_uint(sums[(first + j) / 8 * 4 + i]));
}

// Of a tile's results the values that a lane stores, kOwnValues neighbours at a time: always of the same rows, and of every kLaneTokens-th
// token. Lanes that are neighbours have a token's values side by side.
inline constexpr u32 kResultBits = kOut == Out::kWide ? 32 : 16, kOwnValues = 128 / kResultBits;
inline constexpr u32 kTokenLanes = kFragments * (kOut == Out::kWide ? 4 : kOut == Out::kValues ? 2 : 1);
inline constexpr u32 kLaneTokens = 32 / kTokenLanes;
struct Leaving {
  u32 from;  // of its first token, in a slot
  i32 out;   // in a row of results
  bool exists;
  __device__ __forceinline__ Leaving(const Half* halves, u32 lane) {
    const u32 own = lane % kTokenLanes, token = lane / kTokenLanes;
    u32 half;
    i32 beside = 0;
    if constexpr (kOut == Out::kValues) {
      half = own, from = half * kPlaceBytes + token * 16;
    } else if constexpr (kOut == Out::kWide) {
      half = own / 2, beside = own % 2 * 4, from = own / 4 * kPlaceBytes + own % 4 * 16 + token * kTokenPlaceBytes;
    } else if constexpr (kOut == Out::kGated) {
      half = own * 2, from = half * kPlaceBytes + token * 16;
    } else {
      // A group's four warps have 32 neurons in order: as the next product reads them, 16 bytes of a token are a word of each.
      half = own / 4 * 8, beside = own % 4 * 8, from = half * kPlaceBytes + own % 4 * 4 + token * 16;
    }
    exists = half < 2 * kFragments && halves[half].kind != HalfKind::kNone;
    if (!exists) from = 0;
    out = halves[half].out + beside;
  }
  // Gated: a fragment's first place has gate's rows, the other one up's of the same 8 neurons. Products are rounded to 16 bits before
  // SwiGLU, as where a library multiplies.
  __device__ __forceinline__ uint4 read(u32 at) const {
    const auto gated = [&](u32 fragment) {
      const u32 gate = at + fragment * (2 * kPlaceBytes);
      return gated_pair(load_shared1(gate), load_shared1(gate + kPlaceBytes));
    };
    if constexpr (kOut == Out::kArranged) return make_uint4(gated(0), gated(1), gated(2), gated(3));
    const uint4 v = load_shared(at);
    if constexpr (kOut != Out::kGated) return v;
    const uint4 up = load_shared(at + kPlaceBytes);
    return make_uint4(gated_pair(v.x, up.x), gated_pair(v.y, up.y), gated_pair(v.z, up.z), gated_pair(v.w, up.w));
  }
};

// `left`: how many values of the row there are from the first one on.
__device__ __forceinline__ void store_result(u8* to, const uint4& v, u32 pitch, i32 left) {
  if (pitch % kOwnValues == 0 && left >= static_cast<i32>(kOwnValues)) {
    *reinterpret_cast<uint4*>(to) = v;
    return;
  }
  const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (u32 k = 0; k < kOwnValues; ++k) {
    if (static_cast<i32>(k) >= left) break;
    if constexpr (kResultBits == 32) reinterpret_cast<u32*>(to)[k] = words[k];
    else reinterpret_cast<u16*>(to)[k] = static_cast<u16>(words[k / 2] >> k % 2 * 16);
  }
}

// Of a tile: slots of results that it fills, and those of them that are in the ring once the last one is.
inline constexpr u32 kFilled = kTokens / kLeaving, kKept = kFilled < kResultSlots ? kFilled : kResultSlots;
// Where a lane's results of a tile go.
struct Way {
  Leaving leaving;
  u32 row, stop;  // its first token, and behind the last one
  u64 pitch;      // bytes of a row
  u8* to;         // of its first token
  i32 left;       // values of the row from its first one on
  __device__ __forceinline__ Way(const Product& product, const Tile& tile, u32 lane)
      : leaving(product.table + tile.row_tile * kTableHalves, lane), row(tile.token + lane / kTokenLanes), stop(tile.stop),
        pitch(static_cast<u64>(product.pitch) * (kResultBits / 8)), left(static_cast<i32>(product.results) - leaving.out) {
    if (!leaving.exists) left = 0;
    to = product.out + leaving.out * static_cast<i64>(kResultBits / 8) + row * pitch;
    if constexpr (kParts > 1) to += tile.part * product.tokens * pitch;
  }
  // Of a slot the tokens from `begin` to `end`, multiples of kAtOnce turns; the slot's first one is the tile's `first`.
  __device__ __forceinline__ void store(u32 slot, const Product& product, u32 first, u32 begin, u32 end) const {
#pragma unroll 1
    for (u32 token = begin; token < end; token += kAtOnce * kLaneTokens) {
      const u32 from = slot + leaving.from + token * kTokenPlaceBytes, own = row + first + token;
      u8* const at = to + (first + token) * pitch;
      uint4 values[kAtOnce];
#pragma unroll
      for (u32 k = 0; k < kAtOnce; ++k) values[k] = leaving.read(from + k * (kLaneTokens * kTokenPlaceBytes));
#pragma unroll
      for (u32 k = 0; k < kAtOnce; ++k)
        if (left > 0 && own + k * kLaneTokens < stop) store_result(at + k * kLaneTokens * pitch, values[k], product.pitch, left);
    }
  }
  // As many as a warp that does not multiply has registers for.
  static constexpr u32 kMost = kOut == Out::kGated || kOut == Out::kArranged ? 2 : 4;
  static constexpr u32 kAtOnce = kLeaving / kLaneTokens < kMost ? kLeaving / kLaneTokens : kMost;
};

// The results' warp: all but what is in the ring at the end.
__device__ __forceinline__ void store_results(const Ring& ring, const Product& product, u32 lane) {
  ResultSlot at;
#pragma unroll 1
  for (u32 tile = blockIdx.x, tiles = num_tiles(product); tile < tiles; tile += gridDim.x) {
    const Way way(product, Tile(product, tile), lane);
    const u32 filled = tile + gridDim.x < tiles ? kFilled : kFilled - kKept;
#pragma unroll 1
    for (u32 i = 0; i < filled; ++i, at.next()) {
      wait_or_trap(ring.full + at.slot * 8, at.round);
      way.store(ring.data + at.slot * kResultBytes, product, i * kLeaving, 0, kLeaving);
      __syncwarp();
      if (lane == 0) mbarrier_arrive(ring.empty + at.slot * 8);
    }
  }
}

// Those, by the warps that multiply, which have nothing else to do: kShares of a slot. `from`: the first slot of the block's last tile.
__device__ __forceinline__ void store_last_results(const Ring& ring, const Product& product, const Tile& tile, const ResultSlot& from, u32 warp,
                                                   u32 lane) {
  constexpr u32 kMost = kMultiplyingWarps / kKept, kTurns = kLeaving / (Way::kAtOnce * kLaneTokens);
  constexpr u32 kShares = kMost <= 1 ? 1 : kMost < kTurns ? kMost : kTurns, kShare = kLeaving / kShares;
  static_assert(kTurns % kShares == 0, "equal shares");
  const Way way(product, tile, lane);
#pragma unroll 1
  for (u32 i = warp; i < kKept * kShares; i += kMultiplyingWarps) {
    const u32 number = kFilled - kKept + i % kKept, begin = i / kKept * kShare;
    ResultSlot at = from;
#pragma unroll 1
    for (u32 n = 0; n < number; ++n) at.next();
    wait_or_trap(ring.full + at.slot * 8, at.round);
    way.store(ring.data + at.slot * kResultBytes, product, number * kLeaving, begin, begin + kShare);
  }
}

// All slots of a tile's results, by a warp that multiplies: `put` what it has of kLeaving tokens from one on.
template <class Put>
__device__ __forceinline__ void put_results(const Ring& ring, ResultSlot& to, u32 lane, const Put& put) {
#pragma unroll
  for (u32 first = 0; first < kTokens; first += kLeaving, to.next()) {
    wait_or_trap(ring.empty + to.slot * 8, to.round ^ 1);
    put(first, ring.data + to.slot * kResultBytes);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(ring.full + to.slot * 8);
  }
}

// The same by a warp of another slice than the first.
__device__ __forceinline__ void pass_results(ResultSlot& to) {
#pragma unroll
  for (u32 i = 0; i < kFilled; ++i) to.next();
}

// The next slot that comes for a warp's own slice.
template <class Slot>
__device__ __forceinline__ void go_on_to_own(Slot& slot) {
#pragma unroll
  for (u32 i = 0; i < kSlices; ++i) slot.next();
}

// A group without rows in a tile: it gives back what comes.
__device__ __forceinline__ void pass_by(const Rings& rings, TokenSlot& tokens, WeightSlot& weights, u32 lane) {
#pragma unroll 1
  for (u32 span = 0; span < kOwnSpans; ++span, go_on_to_own(tokens)) {
    if (span % kSlotSpans == 0) {
      wait_or_trap(rings.weights.full + weights.slot * 8, weights.round);
      if (lane == 0) mbarrier_arrive(rings.weights.empty + weights.slot * 8);
      go_on_to_own(weights);
    }
    wait_or_trap(rings.tokens.full + tokens.slot * 8, tokens.round);
    if (lane == 0) mbarrier_arrive(rings.tokens.empty + tokens.slot * 8);
  }
}

// Of 8 rows and tokens: a sum's share of both scales is one factor. Lanes have tokens in pairs.
__device__ __forceinline__ void scale_sums(float (&sums)[kSums], const Product& product, const Shared& with, u32 token, u32 stop, u32 lane) {
  const Shared::Scale rows[2] = {with.scale(0, 0), with.scale(1, 0)};
  const u32 last = (stop - 1) / 2 * 2;  // what lies behind it is not written
#pragma unroll
  for (u32 j = 0; j < kTokens / 8; ++j) {
    const u32 own = token + j * 8 + lane % 4 * 2;
    // Not __ldg: they may be written while this kernel runs already.
    const float2 tokens = *reinterpret_cast<const float2*>(product.token_scales + (own < last ? own : last));
#pragma unroll
    for (u32 h = 0; h < 2; ++h) {
      sums[j * 4 + h * 2] = __fmul_rn(sums[j * 4 + h * 2], __fmul_rn(rows[h], tokens.x));
      sums[j * 4 + h * 2 + 1] = __fmul_rn(sums[j * 4 + h * 2 + 1], __fmul_rn(rows[h], tokens.y));
    }
  }
}

// Sums of the second slice join those of the first. Named barriers: 1 is that they are in shared memory, 2 that they have been read.
__device__ __forceinline__ void add_slices(float (&sums)[kSums], u32 sliced, u32 slice, bool is_first_tile, bool goes_on) {
  const u32 own = sliced + threadIdx.x % kRowThreads * 16;
  if (slice > 0) {
    if (!is_first_tile) await_turn(2, kSlices * kRowThreads);
#pragma unroll
    for (u32 i = 0; i < kSums; i += 4)
      *at_shared<float4>(own + i * kRowThreads * 4) = make_float4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]);
    give_turn(1, kSlices * kRowThreads);
  } else {
    await_turn(1, kSlices * kRowThreads);
#pragma unroll
    for (u32 i = 0; i < kSums; i += 4) {
      const float4 more = *at_shared<float4>(own + i * kRowThreads * 4);
      sums[i] += more.x, sums[i + 1] += more.y, sums[i + 2] += more.z, sums[i + 3] += more.w;
    }
    if (goes_on) give_turn(2, kSlices * kRowThreads);
  }
}

// What a warp has of a tile. Groups are filled from the first warp on.
struct Rows {
  const u8* image;
  u32 start;  // the first span
  Half halves[2];
  HalfKind of_group;
  __device__ __forceinline__ Rows(const Product& product, u32 number, u32 warp) {
    const Tile tile(product, number);
    const Half* const own = product.table + tile.row_tile * kTableHalves + warp % kRowWarps * 2;
    image = tile.image, start = tile.first_span(kSlices > 1 ? warp / kRowWarps : 0);
    halves[0] = own[0], halves[1] = own[1], of_group = own[-static_cast<i32>(warp % 4 * 2)].kind;
  }
  __device__ __forceinline__ bool is_tile() const { return halves[0].kind == HalfKind::kTile; }
};

// A warp of those that multiply. A span's weights are read two spans ahead, and become operands one span ahead, while the tensor
// cores multiply by those before: these have other registers, and their products are awaited before the next ones begin. So it
// goes on from a tile to the block's next one.
__device__ __forceinline__ void multiply(const Rings& rings, const Product& product, u32 warp, u32 lane) {
  const u32 slice = kSlices > 1 ? warp / kRowWarps : 0;
  TokenSlot tokens;
  WeightSlot weights;
  if (slice > 0) tokens.next(), weights.next();
  ResultSlot results;
  uint4 operands[2][kProducts];
  Stored stored[kSpanChunks];
  Shared with[kBoxes];  // of the weights that become operands next; in 8 bits a tile has the same ones throughout
  const u32 tiles = num_tiles(product);
  if (blockIdx.x >= tiles) return;
  Rows rows(product, blockIdx.x, warp);  // of the tile whose weights are read
  const auto await_weights = [&] { wait_or_trap(rings.weights.full + weights.slot * 8, weights.round); };
  const auto read_chunk = [&](u32 chunk, Stored& to) {
    const u32 run = chunk % kRuns, at_run = chunk % kWeightChunks / kRuns;
    const bool alternate = rows.is_tile() && parts_alternate(ChunkPlace(chunk).step);
    const u32 fragment = rings.weights.data + weights.slot * kWeightBytes + warp % kRowWarps * kSlotFragmentBytes;
    const u32 slot = fragment + run * 2 * kRunBytes;
    const u32 from = slot + at_run * (alternate ? 2 * kPieceBytes : kPieceBytes), apart = alternate ? kPieceBytes : kRunBytes;
    const u32 more_apart = alternate ? kMoreBytes : kMoreRunBytes;
    const u32 more = fragment + kMoreFrom + run * 2 * kMoreRunBytes + at_run * (alternate ? 2 * kMoreBytes : kMoreBytes);
    to.load(
        lane, rows.is_tile(), [&](u32 piece, u32 at) { return load_shared(from + piece * apart + at); },
        [&](u32 piece, u32 at) { return load_shared2(from + piece * apart + at); },
        [&](u32 piece, u32 at) { return load_shared1(more + piece * more_apart + at); });
  };
  const auto read = [&](u32 span) {
#pragma unroll
    for (u32 i = 0; i < kSpanChunks; ++i) read_chunk(span * kSpanChunks + i, stored[i]);
  };
  const auto load_scales = [&](u32 span) {
#pragma unroll
    for (u32 i = 0; i < kBoxes; ++i) with[i].load(rows.image, rows.halves, span * kSpanChunks + i, lane);
  };
  // Once what was read is in registers: before a span that begins a slot. `end`: the tile's.
  const auto give_back = [&](u32 span, u32 end) {
    if (kept(span) % kSlotSpans) return;
    if (lane == 0) mbarrier_arrive_after(stored[kSpanChunks - 1].last(), rings.weights.empty + weights.slot * 8);
    go_on_to_own(weights);
    if (span < end) await_weights();
  };
  const auto convert = [&](uint4 (&a)[kProducts]) {
#pragma unroll
    for (u32 k = 0; k < kProducts; ++k) {
      if constexpr (kEightBits) a[k] = codes_operand(stored[k / 2], rows.is_tile(), k % 2);
      else a[k] = operand_of(stored[k / 4], with[k / 4], rows.is_tile(), k / 2 % 2, k % 2);
    }
#pragma unroll
    for (u32 k = 0; k < kProducts; ++k) finish_operand(a[k]);
  };
  // The first span's operands.
  const auto begin = [&](uint4 (&a)[kProducts]) {
    const u32 start = rows.start;
    load_scales(start);
    await_weights();
    read(start);
    give_back(start + 1, start + kOwnSpans);
    convert(a);
  };
  bool begun = false;
#pragma unroll 1
  for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const Tile place(product, tile);
    const bool goes_on = tile + gridDim.x < tiles;
    const auto go_on = [&] {
      if (goes_on) rows = Rows(product, tile + gridDim.x, warp);
    };
    ResultSlot filled = results;
    if (rows.of_group == HalfKind::kNone) {
      go_on();
      pass_by(rings, tokens, weights, lane);
      put_results(rings.results, results, lane, [](u32, u32) {});
    } else {
      if (!begun) begin(operands[0]);
      begun = false;
      if (kOwnSpans > 1 && !kEightBits) load_scales(rows.start + 1);
      if (kOwnSpans > 1) read(rows.start + 1);
      // The loop stays one that is entered: else the compiler has products wait for each other.
      const u32 start = place.first_span(slice), end = kept(start + kOwnSpans);
      const Shared of_sums = with[0];
      float sums[kSums];
      // `ahead`: what is done while products are made.
      const auto take = [&](u32 span, uint4 (&now)[kProducts], const auto& ahead) {
        wait_or_trap(rings.tokens.full + tokens.slot * 8, tokens.round);
        const u32 own = rings.tokens.data + tokens.slot * kTokenBytes;
        begin_products();
#pragma unroll
        for (u32 k = 0; k < kProducts; ++k)
          multiply_rows(sums, now[k], along(wgmma_operand(own + k / 4 * kBoxBytes), k % 4 * kWgmmaDepth), (span - start) | k);
        commit_products();
        ahead();
        wait_for_products<0>();
        if (lane == 0) mbarrier_arrive(rings.tokens.empty + tokens.slot * 8);
        go_on_to_own(tokens);
      };
      const auto take_and_read = [&](u32 span, uint4 (&now)[kProducts], uint4 (&next)[kProducts]) {
        take(span, now, [&] {
          // It comes before the conversion, or the compiler would begin that before the products.
          give_back(span + 2, end);
          convert(next);
          if (span + 2 < end && !kEightBits) load_scales(span + 2);
          if (span + 2 < end) read(span + 2);
        });
      };
      const auto begin_next = [&] {
        if (!goes_on || rows.of_group == HalfKind::kNone) return;
        begin(operands[0]);
        begun = true;
      };
      constexpr u32 kLast = kOwnSpans % 2 == 1 ? 1 : 2;
      if constexpr (kOwnSpans > kLast) {
        u32 span = start;
#pragma unroll 1
        do {
          take_and_read(span, operands[0], operands[1]);
          take_and_read(span + 1, operands[1], operands[0]);
          span += 2;
        } while (span + kLast < end);
      }
      if constexpr (kLast == 2) {
        take(end - 2, operands[0], [&] {
          give_back(end, end);
          convert(operands[1]);
          go_on();
        });
        take(end - 1, operands[1], begin_next);
      } else {
        take(end - 1, operands[0], go_on);
        begin_next();
      }
      take_sums(sums);
      if constexpr (kSlices > 1) add_slices(sums, rings.sliced, slice, tile == blockIdx.x, goes_on);
      if constexpr (kEightBits) scale_sums(sums, product, of_sums, place.token, place.stop, lane);
      const auto put = [&](u32 first, u32 slot) {
        const u32 own = slot + warp % kRowWarps * (kFragmentPlaces * kPlaceBytes);
        if constexpr (kOut == Out::kWide) put_wide(sums, first, own, lane);
        else put_values(sums, first, own, lane);
      };
      if (slice == 0) put_results(rings.results, results, lane, put);
      else pass_results(results);
    }
    if (!goes_on) store_last_results(rings.results, product, place, filled, warp, lane);
  }
}

// One block an SM at most. The box of x's map: kTokens × kBoxValues, of 16 bits.
extern "C" __global__ void __launch_bounds__(kPackedThreads, 1)
    packed_product(const __grid_constant__ TensorMap x, const __grid_constant__ Product product) {
  extern __shared__ __align__(1024) u8 shared[];
  __shared__ u64 barriers[2 * (kTokenSlots + kWeightSlots + kResultSlots)];
  let_next_begin();
  const u32 data = kept(shared_address(shared)), full = kept(shared_address(barriers));
  const auto ring = [](u32 data, u32 barriers, u32 slots) { return Ring{data, barriers, barriers + slots * 8}; };
  const Ring tokens = ring(data, full, kTokenSlots);
  const Ring weights = ring(data + kTokenRing, full + 2 * kTokenSlots * 8, kWeightSlots);
  const Ring results = ring(data + kTokenRing + kWeightRing, full + 2 * (kTokenSlots + kWeightSlots) * 8, kResultSlots);
  // All lanes know that it is one warp's number.
  const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (u32 i = 0; i < kTokenSlots; ++i) {
      mbarrier_init(tokens.full + i * 8, 1);
      mbarrier_init(tokens.empty + i * 8, kRowWarps);
    }
#pragma unroll 1
    for (u32 i = 0; i < kWeightSlots; ++i) {
      mbarrier_init(weights.full + i * 8, kWeightWarps);
      mbarrier_init(weights.empty + i * 8, kRowWarps);
    }
#pragma unroll 1
    for (u32 i = 0; i < kResultSlots; ++i) {
      mbarrier_init(results.full + i * 8, kRowWarps);
      mbarrier_init(results.empty + i * 8, 1);
    }
    publish_barriers();
  }
  __syncthreads();
  if (warp >= kMultiplyingWarps) {
    if constexpr (kTradesRegisters) keep_registers<kLoadRegisters>();
    const u32 number = warp - kMultiplyingWarps;
    if (number == 0) {
      await_kernels_before();
      if (lane == 0) load_tokens(tokens, x, product);
    } else if (number <= kWeightWarps) {
      load_weights(weights, product, number - 1, lane);
    } else {
      await_kernels_before();
      store_results(results, product, lane);
    }
  } else {
    if constexpr (kTradesRegisters) gain_registers<kMultiplyRegisters>();
    if constexpr (kEightBits) await_kernels_before();  // tokens' scales
    multiply({tokens, weights, results, data + kTokenRing + kWeightRing + kResultRing}, product, warp, lane);
  }
}
