// What the producer warp copies to the ring, one slot after the other: weights and KV pages.
#pragma once
#include "ops/attention/split.cuh"
#include "tile/kv_page.cuh"
#include "tile/padding.cuh"

struct Slots {
  u32 base, full, empty;
};

// What a block streams of one matrix.
struct Part {
  const u8* source;
  u32 halves;  // half tiles of a step
  u32 steps;
  u32 slot_bytes;  // of a full slot of it
  u32 half_bytes;  // of a half tile
};
// `layer`: where it begins in a block's weights.
template <class M, class Op>
__device__ __forceinline__ Part part_of(const u8* image, u64 layer) {
  return Part{weights_of<M, Op>(image, blockIdx.x, layer), Op::num_units(lane_block<M>()) * Op::kUnitHalves, Op::kSteps,
              2 * Op::kHalfTileBytes * Op::kSlotTiles, Op::kHalfTileBytes};
}
// What a phase of a layer streams of the weights.
template <class M>
__device__ __forceinline__ Part part_of_phase(const u8* image, u32 layer, u32 phase) {
  Part part;
  M::of_layer(layer, [&](auto kind) {
    using L = decltype(kind);
    L::of_phase(phase, [&](auto matrix) { part = part_of<M, decltype(matrix)>(image, L::weights(layer)); });
  });
  return part;
}

// The compiler makes half as many instructions of a copy that an elected lane asks for. Plans that elect fetch nothing to the L2.
template <class M>
__device__ __forceinline__ u32 staging_lane() {
  if constexpr (M::kElectsLane) return elected_lane();
  else return 0;
}

template <class M>
struct Producer {
  const Params& params;
  Slots slots;
  volatile Where* where;
  const volatile u32* waits;  // the consumers', of other blocks
  u64 policy;
  u32 lane, staging;  // staging: the lane that stages, where one does
  u32 slot, parity, issued;
  bool of_head;        // what is streamed now
  const u8* fetched;   // the end of what came to the L2 ahead of its copy
  u32 fetched_at;      // cycles

  __device__ __forceinline__ bool stages() const { return kStagingLanes > 1 || lane == staging; }

  // Until the slot is free. Meanwhile what comes after `source` is fetched to the L2, as fast as memory gives it, so that
  // memory need not rest while the ring is full and hurry when blocks exchange results.
  __device__ __forceinline__ void wait_for_room(const u8* source) {
    const u32 barrier = slots.empty + slot * 8;
    if constexpr (M::kFetchSlots > 0) {
      const u64 rest = params.image + static_cast<u64>(blockIdx.x + 1) * M::kBlockStride - source;
      const u64 most = min(rest, static_cast<u64>(M::kFetchSlots * M::kSlotBytes));
      if (static_cast<u64>(fetched - source) > most) fetched = source;
      while (fetched + M::kSlotBytes <= source + most && !mbarrier_test(barrier, parity ^ 1)) {
        const u32 now = static_cast<u32>(clock_cycles());
        if (now - fetched_at < kFetchCycles) continue;
        fetch_to_l2(fetched, M::kSlotBytes);
        fetched += M::kSlotBytes;
        fetched_at = now;
      }
    }
    mbarrier_wait(barrier, parity ^ 1);
  }
  // Copies in flight, by how much of the ring is free, and fewer while the consumers wait: then what they wait for comes sooner.
  __device__ __forceinline__ u32 planned() const {
    if (of_head) return M::kHeadCopies;
    if (M::kWaitingCopies > 0 && *waits) return M::kWaitingCopies;
    if (M::kCopies == M::kEmptyCopies) return M::kCopies;
    return is_free(M::kRingSlots * 2 / 3) ? M::kEmptyCopies : is_free(M::kRingSlots / 3) ? M::kHalfCopies : M::kCopies;
  }
  // Whether the slot so many places on is free, too.
  __device__ __forceinline__ bool is_free(u32 ahead) const {
    const bool wraps = slot + ahead >= M::kRingSlots;
    return mbarrier_test(slots.empty + (slot + ahead - (wraps ? M::kRingSlots : 0)) * 8, parity ^ 1 ^ wraps);
  }

  // Waits until the next slot is free, or until the phase of a barrier has passed; whether it was the former.
  __device__ __forceinline__ bool has_room_before(u32 barrier, u32 phase) const {
    for (;;) {
      if (mbarrier_test(barrier, phase)) return false;
      if (is_free(0)) return true;
    }
  }

  // `most`: copies of pages in flight, this one included; of weights the plan says. Called by the staging lanes.
  // `Row`: a matrix of whose row of tiles the padding stays out.
  template <bool kOfPage, class Row = AllBytes>
  __device__ __forceinline__ void copy(const u8* source, u32 bytes, u32 most = M::kRingSlots) {
    if (kAblation >= kNoStream) return;
    // Pairs with Ring::release in all consumer warps.
    if (kOfPage || of_head || M::kElectsLane) mbarrier_wait(slots.empty + slot * 8, parity ^ 1);
    else wait_for_room(source);
    // The barrier may expect the slot's bytes already here: then the copy takes fewer instructions once it is its turn.
    constexpr bool kIsExpected = M::kExpectsEarly && kStagingLanes == 1 && !Row::kSkipsPadding;
    if constexpr (kIsExpected) mbarrier_expect(slots.full + slot * 8, bytes);
    // A slot that was never copied to counts as full of its last phase.
    if (const u32 in_flight = kOfPage ? most : planned(); in_flight < M::kRingSlots && (M::kElectsLane || issued >= in_flight)) {
      const bool wraps = slot < in_flight;
      const u32 earlier = wraps ? slot + M::kRingSlots - in_flight : slot - in_flight;
      mbarrier_wait(slots.full + earlier * 8, wraps ? parity ^ 1 : parity);
    }
    if constexpr (Row::kSkipsPadding) stage_without_padding<Row>(slots.base + slot * M::kSlotBytes, source, slots.full + slot * 8, policy);
    else if constexpr (kIsExpected) copy_expected(slots.base + slot * M::kSlotBytes, source, bytes, slots.full + slot * 8, policy);
    else stage(slots.base + slot * M::kSlotBytes, source, bytes, slots.full + slot * 8, policy, lane);
    if (++slot == M::kRingSlots) {
      slot = 0;
      parity ^= 1;
    }
    ++issued;
    where->copies = issued;
  }

  // Slots `begin` ... `end - 1` of this block's part of a matrix, one after the other; the last one may be half a slot.
  __device__ __forceinline__ void weights(const Part& part, u32 begin = 0, u32 end = ~0u) {
    if (M::kElectsLane ? is_elected() : stages()) {
      // Where all matrices have one format the compiler knows how much a slot takes.
      const u32 slot_bytes = M::kWeightSlotBytes ? M::kWeightSlotBytes : part.slot_bytes;
      const u32 bytes = part.halves * part.steps * (M::kHalfTileBytes ? M::kHalfTileBytes : part.half_bytes);
      end = min(end, (bytes + slot_bytes - 1) / slot_bytes);
#pragma unroll 1
      for (u32 n = begin; n < end; ++n) copy<false>(part.source + n * slot_bytes, min(slot_bytes, bytes - n * slot_bytes));
    }
    __syncwarp();
  }

  // A row of tiles that fits a slot, without padding.
  template <class Op>
  __device__ __forceinline__ void row_without_padding(const u8* source) {
    if (stages()) copy<false, Op>(source, 0);
    __syncwarp();
  }

  // The pages of all queries that this block attends to; page ids are read 32 at a time. Where few blocks have any the
  // others wait for them, and where they are many they take longer than all else: so as many copies are in flight as the
  // ring has room for. In between all blocks would ask for theirs while q, k and v are exchanged, and that would wait.
  __device__ __forceinline__ void pages(const Control& control, u32 layer) {
    const u32 head = head_of_block<M>(lane_block<M>());
    if (head >= M::kKvHeads) return;
    const QueryGroups<M> groups(control, layer, place_of_block<M>(lane_block<M>()), control.queries, lane);
#pragma unroll 1
    for (u32 own = groups.own; own; own &= own - 1) {
      const QueryGroup g = groups.at(control, __ffs(own) - 1);
      const i32* table = params.page_tables + g.sequence * params.page_table_stride;
      PageWalk<M> walk(g, layer);
      const u32 num_groups = kMostQueries > 1 ? __popc(groups.own) : 1;
      const u32 num_slots = num_groups * walk.count() * (M::kPageSlot ? 1 : 2);
      const u32 most = num_groups > 1 && num_slots <= 2 * M::kRingSlots ? kPageCopies : M::kRingSlots;
#pragma unroll 1
      while (walk.any()) {
        const i32 mine = walk.ahead(lane);
        const i32 id = mine <= walk.last ? table[mine] : 0;
#pragma unroll 1
        for (u32 i = 0; i < 32 && walk.any(); ++i, walk.next()) {
          const i32 page = __shfl_sync(~0u, id, i);
          if (!stages()) continue;
          // One copy for a page that fits a slot, else one for each half page.
          const u32 first = walk.first_half_page(), last = walk.last_half_page();
#pragma unroll 1
          for (u32 half_page = first; half_page <= (M::kPageSlot ? first : last); ++half_page) {
            const u8* source = reinterpret_cast<const u8*>(
                params.pool + half_page_offset<M>(params.page_values, page, layer, head, half_page));
            copy<true>(source, (M::kPageSlot ? last - first + 1 : 1) * 2 * M::kHalfPageBytes, most);
          }
        }
      }
    }
    __syncwarp();
  }

  // Copies that no one will consume must land before the block ends.
  __device__ __forceinline__ void drain(u32 count) {
    if (!stages() || kAblation >= kNoStream) return;
    for (u32 i = 0; i < count; ++i) {
      if (slot == 0) {
        slot = M::kRingSlots;
        parity ^= 1;
      }
      --slot;
      mbarrier_wait(slots.full + slot * 8, parity);
    }
  }
};
