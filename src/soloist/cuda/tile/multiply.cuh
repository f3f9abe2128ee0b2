// Weights from the ring times activations: up to 8 queries in the n dimension of m16n8k16 or m16n8k32.
//
// The eight warps split K: of every step of 512 columns a warp takes 64. weights/packing.py puts the weights in the order in
// which lanes take them. Every warp ends with partial sums of all rows.
#pragma once
#include "tile/padding.cuh"
#include "tile/ring.cuh"
#include "tile/sums.cuh"

// Which tiles come in `kDepth` steps: of two steps at a time the tiles of the first, those of the second, and the 8 rows
// that both have left over if `kHalves` is odd.
template <u32 kHalves, u32 kDepth>
struct TileOrder {
  static constexpr u32 kTiles = kHalves / 2, kStepTiles = kTiles ? kTiles : 1;
  static constexpr bool kOdd = kHalves % 2;
  static constexpr u32 kCount = kDepth / 2 * kHalves + kDepth % 2 * (kTiles + kOdd);

  static constexpr __device__ __forceinline__ bool is_lone(u32 i) { return i / kHalves == kDepth / 2; }
  // 8 rows each of this step and, if there is one, of the next.
  static constexpr __device__ __forceinline__ bool is_left_over(u32 i) {
    return kOdd && i % kHalves == (is_lone(i) ? kTiles : 2 * kTiles);
  }
  static constexpr __device__ __forceinline__ u32 tile(u32 i) {
    return is_left_over(i) ? kTiles : i % kHalves % kStepTiles;
  }
  // Among the `kDepth`. Of a tile that is not left over it is said without a choice: what a choice of indices picks from would stay in
  // local memory.
  static constexpr __device__ __forceinline__ u32 step_of_tile(u32 i) { return i / kHalves * 2 + i % kHalves / kStepTiles; }
  static constexpr __device__ __forceinline__ u32 step(u32 i) { return is_left_over(i) ? i / kHalves * 2 : step_of_tile(i); }
  static constexpr __device__ __forceinline__ bool is_full(u32 i) { return !is_left_over(i) || !is_lone(i); }
};

// Tile `i` of a turn of the loop, whose steps are those from `first` on as far as they exist.
template <class Order, class Steps, class Sums, class Fragments, class Exists>
__device__ __forceinline__ void multiply_tile(Steps& steps, Sums& sums, u32 i, u32 first, const Fragments& w, const Exists& exists) {
  const u32 t = Order::tile(i);
  if (!Order::is_left_over(i)) {
    const u32 d = Order::step_of_tile(i);
    if (t == 0) steps.prepare(d, first);
    steps.multiply_tile(sums, t, d, w);
    if (t + 1 == Order::kTiles && !Order::kOdd) steps.release(d, first);
  } else {
    const u32 d = Order::step(i);
#pragma unroll
    for (u32 e = 0; e < 2; ++e) {
      if (!exists(d + e, first)) continue;
      if (t == 0) steps.prepare(d + e, first);
      steps.multiply_half_tile(sums, t, d + e, w, e);
      steps.release(d + e, first);
    }
  }
}

// Tiles `i` and `i + 1` of a turn, which are those of the same rows in a pair of steps.
template <u32 kTiles, class Steps, class Sums, class Fragments>
__device__ __forceinline__ void multiply_pair(Steps& steps, Sums& sums, u32 i, u32 first, const Fragments& one, const Fragments& other) {
  const u32 d = i / (2 * kTiles) * 2, t = i / 2 % kTiles;
  if (t == 0) steps.prepare(d, first);
  steps.multiply_tile(sums, t, d, one, other);
}

// Weights of 16 bits.
template <u32 kHalves, bool kAgain, class Op, class Arrived, class M>
__device__ __forceinline__ void multiply_plain(Ring<M>& ring, u32 warp, u32 lane, const GlobalOperand<Op>& operand, Ahead<Op>& ahead,
                                               Sums<Op>& sums, const Arrived& arrived) {
  using Order = TileOrder<kHalves, Op::kDepth>;
  using Fragments = typename Op::Format;
  constexpr bool kWhole = Op::kSteps % Op::kDepth == 0;
  constexpr u32 kTiles = Order::kCount;
  // Beside all that sampling several queries takes, sums in four chains leave registers for fewer.
  constexpr bool kFew = kSamples && !kDrafts && kMostQueries > 1 && kChains<Op> == 4;
  constexpr u32 kMostEarly = M::kEarlySlots / (kFew ? 2 : 1), kEarlyTiles = kMostEarly / kBatch * kBatch;
  constexpr i32 kEarly = kAgain ? 0 : kTiles < kEarlyTiles ? kTiles : kEarlyTiles;  // groups need not wait
  static_assert(Op::kSlotTiles == 1, "a tile fills a slot");
  const typename Fragments::Place place(warp, lane);
  PlainSteps<Op, kAgain> steps(operand, ahead, lane);
  static_assert(!Op::kEndsInHalf || (kHalves == 2 && Op::kTiles == 1), "half a step is half a slot");
  // Tile `i` of a turn whose steps are those from `first` on.
  const auto load = [&](Fragments& w, u32 i, u32 first) {
    if constexpr (Op::kEndsInHalf)
      if (first + Order::step(i) + 1 == Op::kSteps) return w.load_half_step(ring.take(), place);
    w.load(ring.take(), place, Order::is_full(i), Order::is_left_over(i));
    if constexpr (kLeavesOutPadding<Op>)
      if (warp >= warps_with_columns<Op>(first + Order::step(i))) w.clear();
  };
  Fragments early[kTiles + 1];  // no more of them are used
  Fragments later[kBatch];
  const auto is_early = [&](u32 i) { return static_cast<i32>(i) < kEarly; };
  const auto fragments = [&](u32 i, u32 j) -> Fragments& { return is_early(i) ? early[i + j] : later[j]; };
  // Steps `d` from `first` on.
  const auto exists = [&](u32 d, u32 first) { return d < Op::kDepth && (kWhole || first + d < Op::kSteps); };
  // A batch comes to registers, if it has not yet; returns how many slots it was.
  const auto load_batch = [&](u32 i, u32 first) {
    u32 count = 0;
#pragma unroll
    for (u32 j = 0; j < kBatch; ++j) {
      if (i + j >= kTiles || !exists(Order::step(i + j), first)) continue;
      load(fragments(i, j), i + j, first);
      ++count;
    }
    return count;
  };
  if constexpr (kEarly > 0) {
    const u32 taken = ring.slot;
#pragma unroll
    for (i32 i = 0; i < kEarly; ++i) load(early[i], i, 0);
    ring.release(lane, taken, kEarly, early[kEarly - 1].loaded());
  }
  arrived();
#pragma unroll 1
  for (u32 first = 0; first < Op::kSteps; first += Op::kDepth) {
#pragma unroll
    for (u32 i = 0; i < kTiles; i += kBatch) {
      const u32 taken = ring.slot, count = !is_early(i) || first > 0 ? load_batch(i, first) : 0;
#pragma unroll
      for (u32 j = 0; j < kBatch; ++j)
        if (i + j < kTiles && exists(Order::step(i + j), first))
          multiply_tile<Order>(steps, sums, i + j, first, fragments(i, j), exists);
      if (count) ring.release(lane, taken, count);
    }
  }
}

// How a warp reads a tile of quantised weights.
template <class Op, bool = Op::kPairsSteps>
struct FragmentsOf {
  using Type = typename Op::Format;
};
template <class Op>
struct FragmentsOf<Op, true> {
  using Type = Paired<typename Op::Format>;
};

// So many steps that a turn of the loop has.
template <u32 kCount>
struct Count {
  static constexpr u32 kValue = kCount;
};

// With several queries there are registers left beside few tiles of integers without zeros.
template <class Op, Arithmetic = kArithmetic<Op>>
inline constexpr bool kFewIntegers = false;
template <class Op>
inline constexpr bool kFewIntegers<Op, Arithmetic::kIntegers> = Op::kTiles <= 4 && !Op::Format::kZeros && !Op::kPermuted;

// Called within the last turn of a multiply, with the sums of the first `kTiles` tiles complete; of none, as a rule.
struct NoPart {
  static constexpr u32 kTiles = 0;
  __device__ __forceinline__ void operator()() const {}
};

// Slots whose weights are on their way to registers.
struct Taken {
  u32 first, count, loaded;

  // The next ones.
  __device__ __forceinline__ void add(Taken next) {
    if (!count) first = next.first;
    count += next.count;
    loaded |= next.loaded;
  }
};

// Weights that are worked on before they are multiplied, several tiles to a slot. With one query the next slot's come meanwhile.
template <u32 kHalves, bool kAgain, class Op, class Arrived, class Part, class M>
__device__ __forceinline__ void multiply_quantized(Ring<M>& ring, u32 warp, u32 lane, const GlobalOperand<Op>& operand,
                                                   Ahead<Op>& ahead, Sums<Op>& sums, const Arrived& arrived, const Part& part) {
  using Whole = TileOrder<kHalves, Op::kDepth>;
  using Fragments = typename FragmentsOf<Op>::Type;
  constexpr u32 kSlotTiles = Op::kSlotTiles, kTileBytes = 2 * Fragments::kHalfBytes, kTiles = Whole::kCount;
  constexpr u32 kRest = Op::kSteps % Op::kDepth;  // steps of a last turn of its own
  // A warp takes kBatch slots together, or the tiles of one or more, so that their loads and multiplies overlap.
  constexpr u32 kSlots = kMostQueries == 1 ? M::kQuantizedBatch : 1;
  constexpr u32 kLeast = kBatch < 2 && Op::kPairsSteps ? 2 : kBatch;
  constexpr u32 kTogether = kLeast > kSlotTiles * kSlots ? kLeast : kSlotTiles * kSlots;
  // Slots are free after the multiply that follows their loads, so that no warp waits for a load before it needs it.
  constexpr bool kReleasesLate = M::kReleasesLate && (kMostQueries == 1 || kFewIntegers<Op>);
  // Registers are shared with sums, scales and digits.
  constexpr u32 kFewSlots = Op::kTiles > 4 || (kMostQueries > 1 && kReleasesLate) ? 0 : kMostQueries > 1 ? 1 : 3;
  constexpr u32 kMostEarly = M::kEarlySlots < kFewSlots ? M::kEarlySlots : kFewSlots;
  constexpr u32 kEarlyTiles = kMostEarly * kSlotTiles / kTogether * kTogether;
  constexpr i32 kEarly = kAgain ? 0 : kTiles < kEarlyTiles ? kTiles : kEarlyTiles;  // groups need not wait
  // There is no room for the next weights where threads have few registers.
  constexpr bool kPipelined = kMostQueries == 1 && kMovesRegisters;
  // Several queries that are gathered leave no register to wait with.
  constexpr bool kLate = kReleasesLate || (kMostQueries > 1 && Op::kPermuted && kEarly == 0);
  // Where the last batch of a turn has the registers of the first one, the next turn's first one waits in others.
  constexpr u32 kLast = (kTiles - 1) / kTogether * kTogether;
  constexpr bool kMoves = kLast == 0 || (kEarly == 0 && kLast / kTogether % 2 == 0);
  static_assert((kLate && kPipelined ? 2 : 1) * kTogether / kSlotTiles <= M::kRingSlots, "a warp takes that many before it releases one");
  static_assert(kTiles % kSlotTiles == 0 || Op::kDepth == Op::kSteps, "a turn begins with a slot");
  static_assert(!Whole::kOdd || Op::kDepth % 2 == 0 || Op::kDepth == Op::kSteps, "steps come in pairs");
  static_assert(!kLeavesOutPadding<Op> || (kHalves == 2 && Op::kSteps == Op::kDepth && Op::kSteps <= kSlotTiles), "a slot has all steps");
  static_assert(!Op::kPairsSteps || (kHalves % 2 == 0 && Op::kDepth % 2 == 0 && Op::kSteps % 2 == 0), "whole tiles of two steps");
  static_assert(Part::kTiles == 0 || (Op::kPairsSteps && Op::kDepth == 2 && kRest == 0 && 2 * Part::kTiles % kTogether == 0),
                "a last turn has two steps, and the part whole batches");
  const typename Fragments::Place place(warp, lane);
  typename StepsOf<Op, kAgain, kHalves>::Type steps(operand, ahead, lane);
  Fragments early[kEarly + 1], later[kPipelined ? 2 : 1][kTogether];
  const auto is_early = [&](u32 i) { return static_cast<i32>(i) < kEarly; };
  const auto fragments = [&](u32 i, u32 j) -> Fragments& {
    return is_early(i) ? early[i + j] : later[kPipelined ? i / kTogether % 2 : 0][j];
  };
  // Tiles from `i` on of a turn of so many steps come to registers; the slots are free then, if not later.
  const auto take = [&](Fragments* w, u32 i, u32 most, auto steps_of_turn, auto is_late) -> Taken {
    using Order = TileOrder<kHalves, decltype(steps_of_turn)::kValue>;
    [[maybe_unused]] const u32 taken = ring.slot;
    u32 slot = 0, count = 0, loaded = 0;
#pragma unroll
    for (u32 j = 0; j < most; ++j) {
      if (i + j >= Order::kCount) continue;
      if ((i + j) % kSlotTiles == 0) slot = ring.take(), ++count;
      const u32 tile = slot + (i + j) % kSlotTiles * kTileBytes;
      if constexpr (kDealsTiles<Op>) steps.template load<Order>(w[j], i + j, tile, place);
      else w[j].load(tile, place, Order::is_full(i + j), Order::is_left_over(i + j));
      if constexpr (kLeavesOutPadding<Op>)
        if (warp >= warps_with_columns<Op>(Order::step(i + j))) w[j].clear();
      loaded |= w[j].loaded();
    }
    if constexpr (decltype(is_late)::kValue) return {taken, count, loaded};
    ring.release(lane, taken, count, loaded);
    return {0, 0, 0};
  };
  // The latest slots, after a multiply. Gathered activations leave it no time: it has waited for all loads.
  const auto give_back = [&](Taken slots) {
    if constexpr (!kLate) return;
    else if constexpr (kReleasesLate) ring.release(lane, slots.first, slots.count, slots.loaded);
    else ring.release(lane, ring.before(slots.count), slots.count);
  };
  // `is_taken`: its first batch is in registers, or all that are early; of its slots `taken` are not given back. `again`: a whole turn
  // follows.
  const auto turn = [&](u32 first, bool is_taken, bool again, auto steps_of_turn, Taken taken) {
    using Order = TileOrder<kHalves, decltype(steps_of_turn)::kValue>;
    const auto exists = [](u32 d, u32) { return d < decltype(steps_of_turn)::kValue; };
    const bool has_early = first == 0;
    if (!is_taken) taken.add(take(&fragments(0, 0), 0, kTogether, steps_of_turn, Count<kLate>()));
#pragma unroll
    for (u32 i = 0; i < Order::kCount; i += kTogether) {
      const u32 next = i + kTogether;
      if (kPipelined && next < Order::kCount) {
        if (!is_early(next) || !has_early) taken.add(take(&fragments(next, 0), next, kTogether, steps_of_turn, Count<kLate>()));
      } else if (kPipelined && again) {
        taken.add(take(kMoves ? later[1] : &fragments(0, 0), 0, kTogether, Count<Op::kDepth>(), Count<kLate>()));
      } else if (!kPipelined && i > 0 && (!is_early(i) || !has_early)) {
        taken.add(take(&fragments(i, 0), i, kTogether, steps_of_turn, Count<kLate>()));
      }
#pragma unroll
      for (u32 j = 0; j < kTogether; ++j) {
        if (i + j >= Order::kCount) continue;
        if constexpr (!Op::kPairsSteps) multiply_tile<Order>(steps, sums, i + j, first, fragments(i, j), exists);
        else if (j % 2) multiply_pair<kHalves / 2>(steps, sums, i + j - 1, first, fragments(i, j - 1), fragments(i, j));
      }
      give_back(taken);
      taken = {0, 0, 0};
      if constexpr (Part::kTiles > 0)
        if (next == 2 * Part::kTiles && !again) part();
    }
    if (kPipelined && again && kMoves)
#pragma unroll
      for (u32 j = 0; j < kTogether; ++j) fragments(0, j) = later[1][j];
  };
  // Where activations are waited for the ring has to have its slots meanwhile; groups that follow others need not wait.
  Taken begun{0, 0, 0};
  if (kEarly) take(early, 0, kEarly, Count<Op::kDepth>(), Count<0>());
  else if (kPipelined) begun = take(later[0], 0, kTogether, Count<Op::kDepth>(), Count<kLate && kAgain>());
  arrived();
  steps.start();
#pragma unroll 1
  for (u32 first = 0; first + kRest < Op::kSteps; first += Op::kDepth) {
    turn(first, first == 0 ? kEarly > 0 || kPipelined : kPipelined, first + Op::kDepth + kRest < Op::kSteps, Count<Op::kDepth>(), begun);
    begun = {0, 0, 0};
  }
  if constexpr (kRest > 0) turn(Op::kSteps - kRest, false, false, Count<kRest>(), Taken{0, 0, 0});
}

// `kHalves`: how many times 8 rows this block has in this group of tiles. The code of a kernel has to fit
// the instruction cache, so loops are unrolled only as far as registers need constant indices.
// kAgain: another group with the same activations follows.
//
// Weights of the first slots come to registers before the activations are waited for: that makes room in
// the ring, and the stream goes on. `arrived` is called once the first activations are there.
template <u32 kHalves, bool kAgain, class Op, class Arrived, class M, class Part = NoPart>
__device__ __forceinline__ void multiply(Ring<M>& ring, u32 warp, u32 lane, const GlobalOperand<Op>& operand, Ahead<Op>& ahead,
                                         Sums<Op>& sums, const Arrived& arrived, const Part& part = Part()) {
  static_assert(Op::Format::kHalfBytes == Op::kHalfTileBytes, "the plan's layout");
  static_assert(kBatch <= M::kRingSlots, "a warp takes that many before it releases one");
  sums.clear();
  if (kAblation == kNoMultiply) {
    arrived();
    return part();
  }
  if constexpr (kArithmetic<Op> == Arithmetic::kPlain) multiply_plain<kHalves, kAgain>(ring, warp, lane, operand, ahead, sums, arrived);
  else multiply_quantized<kHalves, kAgain>(ring, warp, lane, operand, ahead, sums, arrived, part);
}

// Asks for activations of the first steps, those that are in flight together; whether they have come.
template <class Op>
__device__ __forceinline__ void ask_for_first(Ahead<Op>& ahead, const GlobalOperand<Op>& operand) {
  if constexpr (kConverts<Op>) {
    ahead.load(operand, 0);
  } else {
#pragma unroll
    for (u32 d = 0; d < Op::kDepth; ++d) ahead.load(operand, d, d);
  }
}
template <class Op>
__device__ __forceinline__ bool has_come(const Ahead<Op>& ahead) {
  if constexpr (kConverts<Op>) {
    return ahead.is_there();
  } else {
    float missing = 0.0f;
#pragma unroll
    for (u32 d = 0; d < Op::kDepth; ++d) missing = ahead.missing(d, missing);
    return __all_sync(~0u, missing == 0.0f);
  }
}

// The multiply of a block that owns `units` units: all blocks own as many, or some own one less, which may be none. kAsked:
// the first activations were asked for.
template <bool kAsked, class Op, class Arrived, class M, class Part = NoPart>
__device__ __forceinline__ void multiply_owned(Ring<M>& ring, u32 warp, u32 lane, u32 units, const GlobalOperand<Op>& operand,
                                               Ahead<Op>& ahead, Sums<Op>& sums, const Arrived& arrived, const Part& part = Part()) {
  constexpr u32 kMost = Op::kMaxUnits * Op::kUnitHalves, kFewer = kMost - Op::kUnitHalves;
  const auto fill = [&] {
    if (!kAsked || !has_come(ahead)) ahead.fill(operand);
    arrived();
  };
  if constexpr (Op::kEven) {
    multiply<kMost, false>(ring, warp, lane, operand, ahead, sums, fill, part);
  } else if (units == Op::kMaxUnits) {
    multiply<kMost, false>(ring, warp, lane, operand, ahead, sums, fill, part);
  } else if constexpr (kFewer > 0) {
    multiply<kFewer, false>(ring, warp, lane, operand, ahead, sums, fill, part);
  } else {
    arrived();
    part();
  }
}
template <class Op, class Arrived, class M, class Part = NoPart>
__device__ __forceinline__ void multiply_owned(Ring<M>& ring, u32 warp, u32 lane, u32 units, const GlobalOperand<Op>& operand,
                                               Sums<Op>& sums, const Arrived& arrived, const Part& part = Part()) {
  Ahead<Op> ahead;
  multiply_owned<false>(ring, warp, lane, units, operand, ahead, sums, arrived, part);
}
