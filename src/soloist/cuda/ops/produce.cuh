// The producer warp: keeps the ring full of what the consumers will read next, in their order.
//
// Weights do not depend on anything, so it runs ahead of every exchange, up to the ring's size.
#pragma once
#include "ops/attention.cuh"

struct Slots {
  u32 base, full, empty;
};

struct Producer {
  const Params& params;
  Slots slots;
  volatile Where* where;
  u64 policy;
  u32 lane, slot, parity, issued;

  // `cap`: copies in flight, this one included. Many fill the queues in front of the L2, and what blocks
  // exchange waits in the same queues; few leave bandwidth unused. Called by the staging lanes.
  __device__ __forceinline__ void copy(const u8* source, u32 bytes, u32 cap) {
    if (kAblation >= kNoStream) return;
    // Pairs with Ring::release in all consumer warps.
    mbarrier_wait(slots.empty + slot * 8, parity ^ 1);
    if (cap < kRingSlots && issued >= cap) {
      const bool wraps = slot < cap;
      const u32 earlier = wraps ? slot + kRingSlots - cap : slot - cap;
      mbarrier_wait(slots.full + earlier * 8, wraps ? parity ^ 1 : parity);
    }
    stage(slots.base + slot * kSlotBytes, source, bytes, slots.full + slot * 8, policy, lane);
    if (++slot == kRingSlots) {
      slot = 0;
      parity ^= 1;
    }
    where->copies = ++issued;
  }

  // The ring takes the first slots of a matrix while its activations are still on their way; later ones are
  // only asked for once the multiply is under way.
  __device__ __forceinline__ u32 in_flight(u32 i) const { return i < kRingSlots ? kWaitingCopies : kStreamingCopies; }

  // This block's part of a matrix, or so many of its slots from `begin` on: for every step of K a slot for
  // each tile of 16 rows, and half a slot for 8 rows left over.
  template <class Op>
  __device__ __forceinline__ void weights(u32 layer, u32 begin = 0, u32 count = ~0u) {
    if (lane < kStagingLanes) {
      const u32 units = num_units<Op>(blockIdx.x), bytes = units * Op::kUnitBytes;
      const u8* source = weights_of<Op>(params.image, blockIdx.x, layer);
      if (Op::kGrouped || (Op::kEven && Op::kMaxUnits * Op::kUnitHalves % 2 == 0)) {
        const u32 end = min(bytes / kSlotBytes - begin, count) + begin;
#pragma unroll 1
        for (u32 i = begin; i < end; ++i) copy(source + i * kSlotBytes, kSlotBytes, in_flight(i));
      } else {
        const u32 halves = units * Op::kUnitHalves, slots = (halves + 1) / 2;
        const u32 end = min(Op::kSteps * slots - begin, count) + begin;
#pragma unroll 1
        for (u32 i = begin; i < end; ++i) {
          const u32 in_step = i % slots, size = in_step + 1 == slots && halves % 2 ? kSlotBytes / 2 : kSlotBytes;
          copy(source + i / slots * halves * (kSlotBytes / 2) + in_step * kSlotBytes, size, in_flight(i));
        }
      }
    }
    __syncwarp();
  }

  // The pages of all columns that this block attends to; page ids are read 32 at a time.
  __device__ __forceinline__ void pages(const Control& control, u32 layer) {
    const u32 head = blockIdx.x / kSplits, split = blockIdx.x % kSplits;
    if (head >= kKvHeads) return;
    u32 count = 0;
    for (u32 c = 0; c < control.columns;) {
      const ColumnGroup g = column_group(control, c, control.columns);
      const i32* table = params.page_tables + g.sequence * params.page_table_stride;
      PageWalk walk(g, layer, split);
      while (walk.any()) {
        const i32 mine = walk.page + static_cast<i32>(lane * kSplits);
        const i32 id = mine <= walk.last ? table[mine] : 0;
        for (u32 i = 0; i < 32 && walk.any(); ++i, walk.next()) {
          const i32 page = __shfl_sync(~0u, id, i);
          if (lane < kStagingLanes) {
            const auto granule = [&](u32 i) {
              return reinterpret_cast<const u8*>(
                  params.pool + granule_offset(params.page_values, page, layer, head, i));
            };
            if (kPageSlot) {
              copy(granule(walk.first_granule()), (walk.has(0) + walk.has(1)) * 2 * kGranuleBytes, in_flight(count++));
            } else {
              if (walk.has(0)) copy(granule(0), 2 * kGranuleBytes, in_flight(count++));
              if (walk.has(1)) copy(granule(1), 2 * kGranuleBytes, in_flight(count++));
            }
          }
        }
      }
      c = g.end;
    }
    __syncwarp();
  }

  // Copies that no one will consume must land before the block ends.
  __device__ __forceinline__ void drain(u32 count) {
    if (lane >= kStagingLanes || kAblation >= kNoStream) return;
    for (u32 i = 0; i < count; ++i) {
      if (slot == 0) {
        slot = kRingSlots;
        parity ^= 1;
      }
      --slot;
      mbarrier_wait(slots.full + slot * 8, parity);
    }
  }
};

__device__ __forceinline__ void produce(const Params& params, Control* control, volatile Where* where, const Slots& slots,
                                        u32 round_barrier, u32 lane) {
  Producer p{params, slots, where, read_once_policy(), lane, 0, 0, 0};
  for (u32 round = 0; round < params.launch->rounds; ++round) {
    where->producer_round = round;
#pragma unroll 1
    for (u32 layer = 0; layer < kLayers; ++layer) {
      where->producer_layer = layer;
      if (layer == 0 && round > 0) {
        // Not more than the ring holds: nobody consumes them if the launch ends here.
        const u32 before = p.issued;
        p.weights<Qkv>(layer, 0, kRingSlots);
        // Pairs with conclude(): the new positions are known, the last keys and values written.
        mbarrier_wait(round_barrier, (round - 1) & 1);
        if (*const_cast<volatile u32*>(&control->stop)) return p.drain(p.issued - before);
        fence_async_proxy();
        p.weights<Qkv>(layer, kRingSlots);
      } else {
        p.weights<Qkv>(layer);
      }
      p.pages(*control, layer);
      p.weights<AttentionOutput>(layer);
      p.weights<GateUp>(layer);
      p.weights<Down>(layer);
    }
    p.weights<Head>(0);
  }
}
