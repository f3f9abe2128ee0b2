"""The producer of a mixture (`ops/produce.cuh`), compiled by g++: what comes through the ring.

One thread is the producer's first lane, the only one that copies on Hopper. Another is the
consumers, who take slots in the order of the phases. A slot holds where its bytes came from.
"""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from interpreter.mixtures import MIXTURES, SMS
from interpreter.models import gpu
from soloist.megakernel.header import Build, header
from soloist.megakernel.limits import MAX_QUERIES
from soloist.megakernel.plan import Plan, make_plan
from soloist.model.dtype import Dtype
from unit.megakernel.test_sample_cuda_on_host import CUDA, MEMORY

REAL = (
    "ops/produce.cuh", "ops/producer.cuh", "ops/attention/split.cuh",
    "tile/logits.cuh", "tile/slots.cuh", "tile/expert_choice.cuh",
    "tile/kv_page.cuh", "tile/padding.cuh", "ptx/types.cuh",
)  # fmt: skip

# What a warp of one lane makes of the functions of warps.
ONE_LANE = r"""
#pragma once
#define __constant__ static
#include "ptx/memory.cuh"
struct float2 { float x, y; };
struct Index { u32 x; };
inline thread_local Index threadIdx, blockIdx;
template <class T> T __shfl_sync(u32, T x, u32) { return x; }
template <class T> T __shfl_up_sync(u32, T x, u32) { return x; }
template <class T> T __shfl_xor_sync(u32, T x, u32) { return x; }
inline u32 __ballot_sync(u32, bool x) { return x; }
inline bool __any_sync(u32, bool x) { return x; }
inline bool __all_sync(u32, bool x) { return x; }
inline u32 __reduce_max_sync(u32, u32 x) { return x; }
inline u32 __reduce_add_sync(u32, u32 x) { return x; }
inline u32 __reduce_min_sync(u32, u32 x) { return x; }
inline void __syncwarp() {}
inline u32 __clz(u32 x) { return x ? __builtin_clz(x) : 32; }
inline u32 __popc(u32 x) { return __builtin_popcount(x); }
inline u32 __ffs(u32 x) { return __builtin_ffs(x); }
template <class T> T min(T a, T b) { return a < b ? a : b; }
template <class T> T max(T a, T b) { return a < b ? b : a; }
inline i32 max(i32 a, i32 b) { return a < b ? b : a; }
inline float exp2_fast(float x) { return std::exp2(x); }
"""

# Barriers count the phases that have passed; a slot knows what was copied to it.
CONTEXT = r"""
#pragma once
#include <atomic>
#include <thread>
#include "spec.cuh"
constexpr u32 kNoStream = 2, kStagingLanes = 1;
struct Barrier { std::atomic<u32> passed{0}; };
inline Barrier barriers[4096];
struct Copy { const u8* source; u32 bytes; };
inline Copy copied[1 << 16];  // by shared address / 128
inline bool mbarrier_test(u32 at, u32 parity) {
  return (barriers[at / 8].passed.load() & 1) != parity;
}
inline void mbarrier_wait(u32 at, u32 parity) {
  while (!mbarrier_test(at, parity)) std::this_thread::yield();
}
inline void pass(u32 at) { barriers[at / 8].passed.fetch_add(1); }
inline void stage(u32 shared, const u8* source, u32 bytes, u32 barrier, u64, u32) {
  if (bytes == 0 || bytes > Model::kSlotBytes) std::abort();
  copied[shared / 128] = Copy{source, bytes};
  pass(barrier);
}
inline void mbarrier_expect(u32, u32) { std::abort(); }
inline void copy_expected(u32, const u8*, u32, u32, u64) { std::abort(); }
inline u32 elected_lane() { return 0; }
inline bool is_elected() { return true; }
inline u64 read_once_policy() { return 0; }
inline u64 clock_cycles() { return 0; }
inline void fetch_to_l2(const u8*, u32) { std::abort(); }
inline void fence_async_proxy() {}

struct Control {
  u32 queries, rounds, stop, waits;
  i32 sequence[kMaxQueries], position[kMaxQueries];
};
template <class M> struct Context;
constexpr u32 kNoWaits = 1;
inline float load_exchanged(const float* p) { return *const_cast<const volatile float*>(p); }
inline float load_from_peers(const float*) { std::abort(); }
constexpr u32 kSentinel = 0xFFFFFFFF;
inline u32 present(float x) { return bits_to<u32>(x); }
inline bool is_present(float x) { return bits_to<u32>(x) != kSentinel; }
inline void mbarrier_arrive(u32 at) { pass(at); }
template <class M>
u8* exchange_copy(const Params& params, u32 offset, u32 bytes, u32 epoch) {
  return params.workspace + offset + epoch % kExchangeCopies * (bytes / kExchangeCopies);
}
template <class M> u32 lane_here() { return 0; }
template <class M> u32 lane_block() { return blockIdx.x; }
template <class M, class Op>
const u8* weights_of(const u8* image, u32 block, u64 layer) {
  return image + static_cast<u64>(block) * M::kBlockStride + layer + Op::kOffset;
}
"""

MAIN = r"""
#include "ops/produce.cuh"

alignas(128) static u8 fixed[1 << 16];
static Control& control = *reinterpret_cast<Control*>(fixed + Model::kShControl);
static ExpertSlots<Model>& slots = *reinterpret_cast<ExpertSlots<Model>*>(fixed + Model::kShChoice);

struct Consumer {
  u32 base, full, empty, count, slot = 0, parity = 0, taken = 0;
  // The next slot holds what it should; it is given back.
  void take(const u8* source, u32 bytes) {
    mbarrier_wait(full + slot * 8, parity);
    const Copy& own = copied[(base + slot * Model::kSlotBytes) / 128];
    if (own.source != source || own.bytes != bytes) std::printf("another copy\n"), std::exit(1);
    give_back();
  }
  // A slot that nobody reads.
  void skip() {
    mbarrier_wait(full + slot * 8, parity);
    give_back();
  }
  void give_back() {
    ++taken;
    pass(empty + slot * 8);
    if (++slot == count) slot = 0, parity ^= 1;
  }
  void take(const Part& part) {
    const u32 bytes = part.halves * part.steps * part.half_bytes;
    for (u32 at = 0; at < bytes; at += part.slot_bytes)
      take(part.source + at, min(part.slot_bytes, bytes - at));
  }
};

// The half pages of one query, at position 0.
static void take_pages(Consumer& ring, const Params& params, u32 layer) {
  const u32 block = blockIdx.x, head = block / Model::kSplits;
  if (head >= Model::kKvHeads) return;
  const QueryGroups<Model> groups(control, layer, block % Model::kSplits, 1, 0);
  if (!groups.own) return;
  const i32 page = params.page_tables[0];
  const u64 place = half_page_offset<Model>(params.page_values, page, layer, head, 0);
  ring.take(reinterpret_cast<const u8*>(params.pool + place), 2 * Model::kHalfPageBytes);
}

// block, rounds, chosen experts
int main(int, char** given) {
  const u32 block = std::atoi(given[1]), rounds = std::atoi(given[2]);
  const u32 most_chosen = std::atoi(given[3]);
  static Launch launch{};
  static i32 pages[kMaxQueries] = {5, 4, 3, 2, 1, 0, 7, 6};
  launch.rounds = rounds;
  Params params{};
  // Nobody reads at these addresses.
  params.image = reinterpret_cast<const u8*>(u64{1} << 40);
  params.experts = reinterpret_cast<const u8*>(u64{2} << 40);
  params.pool = reinterpret_cast<u16*>(u64{3} << 40);
  params.launch = &launch, params.page_tables = pages, params.page_table_stride = 1;
  control.queries = 1, control.rounds = rounds;
  const u32 full = 0, empty = Model::kRingSlots * 8;
  const u32 round = empty + Model::kRingSlots * 8, chosen = round + 8;
  const Slots of_ring{0, full, empty};
  static volatile Where where{};
  std::thread producer([&] {
    blockIdx.x = block;
    produce<Model>(params, &control, &where, of_ring, round, chosen, 0);
  });
  blockIdx.x = block;
  Consumer ring{0, full, empty, Model::kRingSlots};
  u32 choices = 0;
  for (u32 n = 0; n < rounds; ++n) {
    for (u32 layer = 0; layer < Model::kLayers; ++layer)
      for (u32 phase = 0; phase < kLayerPhases; ++phase) {
        if (phase == kPagesPhase) {
          take_pages(ring, params, layer);
          continue;
        }
        if (!is_of_experts<Model>(layer, phase)) {
          ring.take(part_of_phase<Model>(params.image, layer, phase));
          continue;
        }
        if constexpr (Model::kHasSharedMlp)
          if (has_shared_part<Model>(layer))
            ring.take(shared_part_of_phase<Model>(params.image, layer, phase));
        if (phase == kGateUpPhase) {
          ++choices;
          // Which experts: others in each layer and round.
          slots.count = most_chosen - (n + layer) % 2;
          for (u32 s = 0; s < slots.count; ++s)
            slots.expert[s] = (s * 2 + n + layer) % Model::kMostExperts;
          pass(chosen);
        }
        for (u32 i = 0; i < num_expert_parts<Model>(slots, layer, phase); ++i)
          ring.take(expert_part<Model>(params, slots, layer, phase, i));
      }
    ring.take(part_of<Model, Model::Head>(params.image, 0));
    control.stop = n + 1 == rounds;
    pass(round);
  }
  producer.join();
  std::printf("%u\n", choices);
}
"""


def program(
    plan: Plan, queries: int, folder: Path, *, warp: str = ONE_LANE, main: str = MAIN
) -> Path:
    """Of a build for so many queries."""
    compiler = shutil.which("g++")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs g++ on Linux to compile the kernel's code for the host")
    real = {name: (CUDA / name).read_text(encoding="utf-8") for name in REAL}
    spec = header(plan, Build(queries=queries))
    files = real | {
        "spec.cuh": '#include "one_lane.cuh"\n' + spec,
        "one_lane.cuh": warp,
        "ptx/memory.cuh": MEMORY,
        "ptx/mma.cuh": '#pragma once\n#include "spec.cuh"\n',
        "tile/context.cuh": CONTEXT,
        "ptx/stage.cuh": '#pragma once\n#include "tile/context.cuh"\n',
        "main.cpp": main,
    }
    for name, text in files.items():
        place = folder / name
        place.parent.mkdir(exist_ok=True, parents=True)
        place.write_text(text, encoding="utf-8")
    made = subprocess.run(
        [compiler, "-std=c++20", "-O1", "-w", "-pthread", f"-I{folder}", folder / "main.cpp",
         "-o", folder / "produce"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr[:4000]
    return folder / "produce"


MODELS = ("softmax", "some layers dense", "shared, gated", "shared of several sizes")
LITTLE_SHARED_BYTES = 160 * 1024  # of a block: nine slots are left


@pytest.mark.parametrize("shared_bytes", [gpu(SMS).shared_bytes, LITTLE_SHARED_BYTES])
@pytest.mark.parametrize("queries", [1, MAX_QUERIES])
@pytest.mark.parametrize("name", MODELS)
def test_blocks_get_what_they_multiply(
    name: str, queries: int, shared_bytes: int, tmp_path: Path
) -> None:
    """The first block and the last, with other experts in each layer and round."""
    small = replace(gpu(SMS), shared_bytes=shared_bytes)
    plan = make_plan(MIXTURES[name], Dtype.BF16, small).with_room_for(queries, samples=False)
    made = program(plan, queries, tmp_path)
    for block in (0, plan.blocks - 1):
        given = [str(made), str(block), "3", str(plan.shared.most_slots)]
        done = subprocess.run(given, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout
        assert int(done.stdout) == 3 * sum(x.router is not None for x in plan.model.layers)
