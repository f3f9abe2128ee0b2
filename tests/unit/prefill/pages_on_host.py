"""Attention straight from KV pages, compiled by g++ (see `block_on_host`)."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from soloist.jit.tensor_map import Boxes
from soloist.kv.pool import PagePool
from soloist.prefill.page_form import PageForm, launch_scale
from unit.prefill.block_on_host import PRODUCTS_IN_FLIGHT, compiled, without_shared

_SHIMS = (
    "ptx/cluster.cuh", "ptx/dependent.cuh", "ptx/memory.cuh", "ptx/mma.cuh",
    "ptx/setmaxnreg.cuh", "ptx/stage.cuh", "ptx/tensor.cuh", "ptx/turns.cuh",
    "ptx/wgmma_attention.cuh", "sync/slots.cuh",
)  # fmt: skip

_OWN = r"""
using std::min;
using std::max;
#define __int_as_float(x) __uint_as_float(x)
#undef kInfinity
#define kInfinity __builtin_inff()
inline float __frcp_rn(float x) { return 1.0f / x; }
template <class T> T __ldcs(const T* p) { return *p; }
static float float_left[kMost];
inline float __shfl_xor_sync(u32, float x, u32 with) {
  float_left[threadIdx.x] = x;
  __syncwarp();
  const float found = float_left[threadIdx.x ^ with];
  __syncwarp();
  return found;
}
inline bool mbarrier_try_wait(u32 at, u32 parity) {
  if (barrier_at(at).phase % 2 != parity) return true;
  pause();
  return false;
}
inline void compute_first(bool) {}
inline void keep_factor(u32&) {}
inline void fence_async_proxy_shared() {}
inline void store_shared_half(u32 at, u16 x) { std::memcpy(shared + at, &x, 2); }

// Address, sizes, strides and box of `Boxes`.
struct TensorMap { u64 words[16]; };
struct BoxPlace { u32 at[5]; };
template <u32 kRowBytes> u32 swizzled(u32 row, u32 chunk) {
  return row * 64 + ((chunk ^ row / 2 % 4) << 4);
}
inline u32 in_place(u32 at) { return at ^ (at >> 7 & 3) << 4; }
inline void load_box(u32 to, const TensorMap& map, const BoxPlace& place, u32 barrier) {
  if (to % 1024) std::abort();
  copies.push_back({[=] {
    const u64 *sizes = map.words + 1, *strides = map.words + 6, *box = map.words + 10;
    u32 n = 0, i[5];
    for (i[4] = 0; i[4] < box[4]; ++i[4])
      for (i[3] = 0; i[3] < box[3]; ++i[3])
        for (i[2] = 0; i[2] < box[2]; ++i[2])
          for (i[1] = 0; i[1] < box[1]; ++i[1])
            for (i[0] = 0; i[0] < box[0]; ++i[0], ++n) {
              u64 from = map.words[0];
              bool is_inside = true;
              for (u32 d = 0; d < 5; ++d) {
                const u64 x = place.at[d] + i[d];
                is_inside &= x < sizes[d], from += x * (d ? strides[d - 1] : 2);
              }
              const u16 value = is_inside ? *reinterpret_cast<const u16*>(from) : 0;
              std::memcpy(shared + in_place(to + n * 2), &value, 2);
            }
    barrier_at(barrier).bytes -= n * 2, settle(barrier_at(barrier));
  }});
}

// Products of a group of four warps, made when they are waited for, of operands as on the GPU.
constexpr u32 kWgmmaRows = 64, kWgmmaDepth = 16, kScoreColumns = 128, kScores = 64;
struct Issued {
  float* sums;
  bool in_registers;
  u32 words[4];
  u64 a, b;
  u32 columns, adds;
  bool commits;
};
static std::deque<Issued> issued[kMost];
template <u32 kRowBytes> u64 wgmma_operand(u32 at) {
  return at >> 4 | 1ull << 16 | 512ull / 16 << 32 | 2ull << 62;
}
inline float operand_value(u64 operand, u32 row, u32 k) {
  if (operand >> 62 != 2) std::abort();
  const u32 start = (operand & 0x3FFF) << 4, eights = (operand >> 32 & 0x3FFF) << 4;
  return from_half(load_from<u16>(in_place(start + row / 8 * eights + row % 8 * 64 + k * 2)));
}
inline void begin_products() {}
inline void multiply_scores(float (&s)[64], u64 a, u64 b, u32 adds) {
  issued[threadIdx.x].push_back({s, false, {}, a, b, 128, adds, false});
}
template <u32 kCount> void add_values_along(float (&s)[kCount], const u32 (&a)[4], u64 b) {
  issued[threadIdx.x].push_back({s, true, {a[0], a[1], a[2], a[3]}, 0, b, 2 * kCount, 1, false});
}
inline void commit_products() { issued[threadIdx.x].back().commits = true; }
static void multiply_oldest(u32 first) {
  static float rows[64][16], columns[128][16];
  const Issued& one = issued[first].front();
  for (u32 t = 0; t < 128; ++t) {
    const Issued& own = issued[first + t].front();
    if (own.a != one.a || own.b != one.b || own.columns != one.columns) std::abort();
    if (!own.in_registers) continue;
    for (u32 i = 0; i < 4; ++i) {
      const u32 row = t / 32 * 16 + t % 32 / 4 + i % 2 * 8, k = i / 2 * 8 + t % 4 * 2;
      rows[row][k] = low_half(own.words[i]), rows[row][k + 1] = high_half(own.words[i]);
    }
  }
  for (u32 k = 0; k < 16; ++k) {
    for (u32 r = 0; r < 64 && !one.in_registers; ++r) rows[r][k] = operand_value(one.a, r, k);
    for (u32 n = 0; n < one.columns; ++n) columns[n][k] = operand_value(one.b, n, k);
  }
  for (u32 t = 0; t < 128; ++t) {
    const Issued own = issued[first + t].front();
    issued[first + t].pop_front();
    for (u32 i = 0; i < own.columns / 2; ++i) {
      const u32 row = t / 32 * 16 + i / 2 % 2 * 8 + t % 32 / 4, n = i / 4 * 8 + t % 4 * 2 + i % 2;
      float sum = 0.0f;
      for (u32 k = 0; k < 16; ++k) sum += rows[row][k] * columns[n][k];
      own.sums[i] = own.adds ? own.sums[i] + sum : sum;
    }
  }
}
"""

_MAIN = r"""
#include "kernel.cu"

struct Launch {
  PageMaps maps;
  u16* out;
  float4* partials;
  u64 slots;
  const i32* page_table;
  const u32 *query_bounds, *key_bounds;
  u64 layer, window, arranged;
  float scale;
};
static Launch launch;
static u32 num_blocks;
static void end() {
  threads[threadIdx.x].ended = true;
  pause();
}
static void attend_thread() {
  attend_pages(launch.maps, launch.out, launch.partials, launch.slots, launch.page_table,
               launch.query_bounds, launch.key_bounds, launch.layer, launch.window, launch.scale,
               launch.arranged);
  end();
}
static void merge_thread() {
  merge_splits(launch.out, launch.partials, launch.slots, launch.query_bounds, launch.key_bounds,
               launch.window, launch.scale, num_blocks, launch.arranged);
  end();
}
// Whether all blocks ended.
extern "C" int run(const Launch* given, u32 blocks, u32 merging, u32 seed) {
  launch = *given, random_state = seed, num_blocks = gridDim.x = blocks;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
    if (!run_block(attend_thread, kAttendThreads)) return 0;
    for (const auto& own : issued) if (!own.empty()) return 0;
    for (const Meeting& one : named) if (one.count) return 0;
  }
  for (blockIdx.x = 0; blockIdx.x < merging; ++blockIdx.x)
    if (!run_block(merge_thread, kComputing)) return 0;
  return 1;
}
// Whether sums of splits go through memory.
extern "C" int is_split(u32 tokens, u32 stop, u32 window, u32 blocks, u32 slots) {
  return pass_shape(tokens, stop, window, blocks, slots).is_split;
}
"""


def _map_words(address: int, boxes: Boxes) -> list[int]:
    return [address + boxes.offset, *boxes.sizes, *boxes.strides, *boxes.box, 0]


@dataclass(frozen=True)
class HostPages:
    """The kernel of a form, over a pool on the CPU.

    Args:
        form: of `pool`'s layout.
        pool: with keys and values of a sequence.
        page_table: its pages.
        folder: for files.
    """

    form: PageForm
    pool: PagePool
    page_table: Sequence[int]
    library: ctypes.CDLL

    def attend(
        self,
        queries: Tensor,
        stop: int,
        *,
        tokens: int | None = None,
        layer: int = 0,
        window: int | None = None,
        blocks: int = 3,
        slots: int = 0,
        seed: int = 1,
        arranged: bool = False,
    ) -> Tensor:
        """[rows, Q, D] of the last `tokens` before `stop`; a NaN where nothing was written."""
        tokens = len(queries) if tokens is None else tokens
        out = torch.full_like(queries, float("nan"))
        partials = torch.full((max(slots, 1) * self.form.partial_bytes // 4,), float("nan"))
        table = torch.tensor(list(self.page_table), dtype=torch.int32)
        query_bounds = torch.tensor([0, tokens], dtype=torch.int32)
        key_bounds = torch.tensor([0, stop], dtype=torch.int32)
        pool, pages = self.pool.tensor.data_ptr(), self.pool.num_pages
        maps = [
            _map_words(queries.data_ptr(), self.form.queries(len(queries))),
            *(_map_words(pool, boxes) for boxes in self.form.keys(pages)),
            _map_words(pool, self.form.values(pages)),
        ]
        words = [word for one in maps for word in one]
        words += [out.data_ptr(), partials.data_ptr(), slots, table.data_ptr()]
        words += [query_bounds.data_ptr(), key_bounds.data_ptr(), layer, window or 0]
        words.append(int(arranged))
        scale = ctypes.c_float(launch_scale(self.form.head_dim))
        given = (ctypes.c_uint64 * (len(words) + 1))(*words)
        ctypes.memmove(ctypes.byref(given, 8 * len(words)), ctypes.byref(scale), 4)
        merging = self.form.merging_blocks(len(queries))
        assert self.library.run(given, blocks, merging, seed), "somebody waits forever"
        return out


def built(form: PageForm, folder: Path) -> ctypes.CDLL:
    """The kernel of a form."""
    return compiled(
        form.source.header, without_shared(form.source.text), _MAIN, folder,
        own=_OWN + PRODUCTS_IN_FLIGHT, shims=_SHIMS, tiles=("pass_items",),
    )  # fmt: skip
