"""Threads of CUDA blocks as coroutines of one thread of the host, for tests that g++ compiles.

They run from barrier to barrier in random order, so a barrier that is missing, or that only some
threads reach, shows. The memory order of a GPU does not.
"""

# What comes before it defines u32 and u64, kNumBlocks and kConsumerThreads.
THREADS = r"""
#include <ucontext.h>
#include <algorithm>
#include <numeric>

enum State { kReady, kAtWarp, kAtBlock, kAtGrid, kEnded };
constexpr u32 kAll = kNumBlocks * kConsumerThreads;
struct Thread {
  ucontext_t context;
  State state;
  char stack[64 * 1024];
};
static Thread threads[kAll];
static ucontext_t scheduler;
static u64 lane_values[2][kAll];
static u32 lane_turns[kAll];
static u32 running, random_state = 1;

static u32 next_random() { return random_state = random_state * 1664525u + 1013904223u; }
static void pause_thread(u32 id, State state) {
  threads[id].state = state;
  swapcontext(&threads[id].context, &scheduler);
}
// Now and then another thread runs before, as where a record has not come yet.
static void pause_now_and_then() {
  if ((next_random() >> 29) == 0) pause_thread(running, kReady);
}

struct HostGrid {
  u32 id;
  void pause(State state) const { pause_thread(id, state); }
  // Of all lanes of the warp.
  const u64* lanes(u64 value) const {
    u64* values = lane_values[lane_turns[id]++ & 1];
    values[id] = value;
    pause_thread(id, kAtWarp);
    return values + id / 32 * 32;
  }
  u64 from_lane(u64 value, u32 lane) const { return lanes(value)[lane]; }
  u32 warp_max(u32 value) const {
    const u64* values = lanes(value);
    return *std::max_element(values, values + 32);
  }
  u32 warp_add(u32 value) const {
    const u64* values = lanes(value);
    return std::accumulate(values, values + 32, 0u);
  }
  void warp_sync() const { lanes(0); }
  void block_sync() const { pause(kAtBlock); }
  void sync() const { pause(kAtGrid); }
  u32 block() const { return id / kConsumerThreads; }
  u32 num_blocks() const { return kNumBlocks; }
  u32 thread() const { return id % kConsumerThreads; }
};

static bool all_are(State state, u32 begin, u32 end) {
  for (u32 i = begin; i < end; ++i) if (threads[i].state != state) return false;
  return true;
}
static bool release_if(State state, u32 begin, u32 end) {
  if (!all_are(state, begin, end)) return false;
  for (u32 i = begin; i < end; ++i) threads[i].state = kReady;
  return true;
}

// All threads run `body`, which gets a thread's number. Returns the barriers over the grid that
// they met at, or -1 where they wait for each other forever.
static int run_threads(void (*body)(unsigned)) {
  static void (*each)(unsigned);
  each = body;
  const auto begin_thread = [](unsigned id) {
    each(id);
    threads[id].state = kEnded;
  };
  std::fill(lane_turns, lane_turns + kAll, 0u);
  for (u32 i = 0; i < kAll; ++i) {
    Thread& thread = threads[i];
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack;
    thread.context.uc_stack.ss_size = sizeof thread.stack;
    thread.context.uc_link = &scheduler;
    thread.state = kReady;
    makecontext(&thread.context, reinterpret_cast<void (*)()>(+begin_thread), 1, i);
  }
  int grid_syncs = 0;
  while (!all_are(kEnded, 0, kAll)) {
    const u32 drawn = next_random(), start = drawn >> 8, step = (drawn >> 4 & 1) ? 1 : kAll - 1;
    bool moved = false;
    for (u32 n = 0, i = start % kAll; n < kAll; ++n, i = (i + step) % kAll) {
      if (threads[i].state != kReady) continue;
      // Some wait for the next sweep, so that threads and blocks drift apart.
      if (moved && (next_random() >> 28) == 0) continue;
      moved = true;
      running = i;
      swapcontext(&scheduler, &threads[i].context);
    }
    for (u32 begin = 0; begin < kAll; begin += 32) moved |= release_if(kAtWarp, begin, begin + 32);
    for (u32 begin = 0; begin < kAll; begin += kConsumerThreads)
      moved |= release_if(kAtBlock, begin, begin + kConsumerThreads);
    if (release_if(kAtGrid, 0, kAll)) {
      ++grid_syncs;
      moved = true;
    }
    if (!moved) return -1;
  }
  return grid_syncs;
}
"""
