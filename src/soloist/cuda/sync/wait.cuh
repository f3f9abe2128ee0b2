// Bounded waits. A wait that lasts too long writes what it waited for to host memory and traps.
#pragma once
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "spec.cuh"

// Host memory; the fields are those of `Fault` in launch.py.
struct Fault {
  u32 code;  // 0: none; otherwise 1 + what was waited for
  u32 block;
  u32 warp;
  u32 place;  // counter or ring slot
  u32 wanted;
  u32 seen;
  u32 round;
  u32 layer;
};

// What a wait is for; the order is that of `WAITS` in launch.py.
enum class Wait : u32 { kCounter, kFull, kEmpty, kRound };

// Where the block is, for the report only: [0] consumers, [1] producer.
struct Where {
  Fault* fault;
  u32 round[2], layer[2];
};
__shared__ Where where;

// Not inlined and with few arguments: the many waits of an unrolled loop would otherwise keep registers
// for their cold path.
__device__ __noinline__ void trap_stuck(Wait what, u32 place, u32 wanted, u32 seen) {
  Fault* f = where.fault;
  const u32 warp = threadIdx.x / 32, role = warp == kConsumerWarps;
  store_host(&f->block, blockIdx.x);
  store_host(&f->warp, warp);
  store_host(&f->place, place);
  store_host(&f->wanted, wanted);
  store_host(&f->seen, seen);
  store_host(&f->round, where.round[role]);
  store_host(&f->layer, where.layer[role]);
  store_host_release(&f->code, 1 + static_cast<u32>(what));
  __threadfence_system();
  asm volatile("trap;");
}

// A barrier in shared memory passes the phase of this parity.
__device__ __forceinline__ void wait_barrier(Wait what, u32 barrier, u32 parity) {
  u32 tries = 0;
  while (!mbarrier_try_wait(barrier, parity))
    if (++tries > kMaxTries) trap_stuck(what, barrier, parity, parity ^ 1);
}

// A counter in global memory reaches `wanted`; it may pass 2^32.
__device__ __forceinline__ void wait_counter(const u32* counter, u32 place, u32 wanted) {
  u32 tries = 0;
  for (;;) {
    const u32 seen = load_acquire(counter);
    if (static_cast<i32>(seen - wanted) >= 0) return;
    if (++tries > kMaxTries) trap_stuck(Wait::kCounter, place, wanted, seen);
  }
}
