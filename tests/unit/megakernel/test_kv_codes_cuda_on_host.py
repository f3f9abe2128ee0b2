"""Keys and values in 8 and 4 bits in the decode kernel's attention, compiled by g++.

What `prepare.cuh` rounds, `append.cuh` writes into a half page and into the pool; `softmax.cuh`
attends to half pages with `kv_codes.cuh`. A warp's lanes are coroutines, which meet where they
exchange registers or multiply together. The pool's codes have to be the same bytes, attention the
interpreter's. 16 bits run too, which shows that the stand-in for a multiply is one.
"""

import ctypes
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from plan.shapes import shaped
from soloist.kv.layout import page_constants
from soloist.kv.pool import PagePool
from soloist.megakernel.gpu import TYPICAL
from soloist.megakernel.header import Build, _constants, _of_model
from soloist.megakernel.interpreter.attention import _products
from soloist.megakernel.interpreter.cache import Cache
from soloist.megakernel.interpreter.memory import Memory
from soloist.megakernel.interpreter.softmax import Softmax
from soloist.megakernel.limits import CONSUMER_WARPS, MAX_QUERIES
from soloist.megakernel.plan import Plan, make_plan
from soloist.model.dtype import Dtype
from soloist.model.kv_format import KV_FORMATS, KvName, kv_format
from unit.megakernel.lanes_on_host import LANES, place
from unit.megakernel.test_sample_cuda_on_host import CUDA, MEMORY

NAMES: tuple[KvName | None, ...] = (None, *KV_FORMATS)
# (query heads, KV heads, D): what a warp has is one tile or two, of 8 rows or 16, all of a head's
# values or a half.
SHAPES = {
    "etude": (16, 4, 64), "llama-8b": (32, 8, 128), "qwen3-1.7b": (16, 8, 128),
    "wide group": (16, 2, 64), "narrow": (8, 2, 32), "96": (16, 4, 96), "one": (4, 4, 64),
    "sixteen": (32, 2, 128), "twelve": (24, 2, 64), "eight of 128": (16, 2, 128),
}  # fmt: skip
REAL = {
    "tile": ("kv_codes", "kv_page"), "ops/attention": ("append", "softmax"), "ptx": ("types",),
}  # fmt: skip

MULTIPLY = r"""
#pragma once
#include "ptx/memory.cuh"
inline u16 to_bf16(double exact) {
  // Round to odd in fp32, then once to nearest even.
  float x = static_cast<float>(exact);
  if (x != exact && !(bits_to<u32>(x) & 1)) {
    const bool away = std::fabs(static_cast<double>(x)) > std::fabs(exact);
    x = bits_to<float>(bits_to<u32>(x) + (away ? -1 : 1));
  }
  const u32 bits = bits_to<u32>(x);
  return static_cast<u16>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
inline float from_bf16(u32 x) { return bits_to<float>(x << 16); }
inline u32 pack_pair(float low, float high) {
  return to_bf16(low) | static_cast<u32>(to_bf16(high)) << 16;
}
inline u32 fma_bf16(u32 a, u32 b, u32 c) {
  u32 made = 0;
  for (u32 i = 0; i < 32; i += 16) {
    const double x = from_bf16(a >> i & 0xFFFF), y = from_bf16(b >> i & 0xFFFF);
    made |= static_cast<u32>(to_bf16(x * y + from_bf16(c >> i & 0xFFFF))) << i;
  }
  return made;
}
inline float exp2_fast(float x) { return std::exp2(x); }
inline float half_of(u32 pair, u32 upper) { return from_bf16(upper ? pair >> 16 : pair & 0xFFFF); }
inline float low_half(u32 pair) { return half_of(pair, 0); }
inline float high_half(u32 pair) { return half_of(pair, 1); }

// c += a b of m16n8k16 (PTX ISA, matrix fragments for mma.m16n8k16).
inline void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const u32 g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  const Left* all = meet({{a0, a1, a2, a3, b0, b1}});
  for (u32 i = 0; i < 4; ++i) {
    double sum = c[i];
    for (u32 k = 0; k < 16; ++k) {
      const u32 quad = k % 8 / 2, part = k / 8;
      sum += static_cast<double>(half_of(all[g * 4 + quad].words[2 * part + i / 2], k % 2)) *
             half_of(all[(2 * q + i % 2) * 4 + quad].words[4 + part], k % 2);
    }
    c[i] = static_cast<float>(sum);
  }
}
template <class... T> void mma_from_zero(float (&d)[4], T... operands) {
  for (float& sum : d) sum = 0.0f;
  mma(d, operands...);
}
inline u32 any_register() { return 0x7FC0FF80; }  // not a number beside an infinity
"""

CONTEXT = r"""
#pragma once
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float fmaxf(float a, float b) { return std::fmax(a, b); }
struct Control { i32 sequence[kMaxQueries], position[kMaxQueries]; };
struct Params {
  u16* pool;
  const i32* page_tables;
  u32 page_table_stride;
  u64 page_values;
};
template <class M>
struct Shared {
  u8* fresh;
  Control* held;
  u8* new_kv() const { return fresh; }
  Control& control() const { return *held; }
};
template <class M>
struct Context {
  const Params& params;
  Shared<M> shared;
  u32 warp, lane;
};
template <class M>
u32 lane_here() { return 0; }
"""

MAIN = r"""
#include "ops/attention/append.cuh"
#include "ops/attention/softmax.cuh"
OF_PREPARE

using M = Kernel;
constexpr u32 kQueriesAt = 4 << 20;

// Of all queries in place, as blocks have it before they append.
template <class M>
void round_all_of(u8* fresh, u32 queries) {
  const Params none{};
  if constexpr (kHasCodes<M>)
    for (u32 warp = 0; warp < kConsumerWarps; ++warp)
      run_warp(warp, [&](u32 lane) {
        round_fresh(Context<M>{none, {fresh, nullptr}, warp, lane}, (1u << queries) - 1);
      });
}
extern "C" void round_all(u8* fresh, u32 queries) { round_all_of<Kernel>(fresh, queries); }

extern "C" void append_fresh(u8* fresh, const i32* positions, u32 queries, i32 start,
                             u8* half_page) {
  static Params none;
  static Control control;
  for (u32 i = 0; i < queries; ++i) control.position[i] = positions[i];
  for (u32 i = 0; i < queries; ++i)
    run_warp(i, [&](u32 lane) {
      append(Context<M>{none, {fresh, &control}, i, lane}, i, start, half_page);
    });
}

extern "C" void store_in_pool(u8* fresh, const i32* positions, u32 queries, u16* pool,
                              u64 page_values, const i32* page_table, u32 layer, u32 head) {
  static Control control;
  const Params params{pool, page_table, 0, page_values};
  for (u32 i = 0; i < queries; ++i) control.position[i] = positions[i];
  for (u32 warp = 0; warp < queries; ++warp)
    run_warp(warp, [&](u32 lane) {
      const Context<M> cx{params, {fresh, &control}, warp, lane};
      store_fresh(cx, warp, place_in_pool(cx, layer, head, warp));
    });
}

// Where a row lies among those that are multiplied, and back; padding is no row.
inline u32 held(u32 row) { return row / M::kGroup * M::kQueryRows + row % M::kGroup; }
inline u32 row_at(u32 place) {
  const u32 query = place / M::kQueryRows, member = place % M::kQueryRows;
  return member < M::kGroup ? query * M::kGroup + member : ~0u;
}

// Half pages one after the other, from position 0 on; `out`: [rows][D], best and total: [rows].
template <class M>
void attend_of(const u16* queries, u32 rows, u32 first_row, const i32* last, const u8* pages,
               u32 half_pages, i32 window, float* out, float* best, float* total) {
  constexpr u32 kBytes = 2 * M::kHalfPageBytes;
  if (half_pages * kBytes > kQueriesAt) std::abort();
  std::memcpy(shared, pages, half_pages * kBytes);
  for (u32 row = 0; row < rows; ++row)
    for (u32 d = 0; d < M::kHeadDim; ++d) {
      u8* to = shared + kQueriesAt + q_offset<M>(held(first_row + row), d);
      std::memcpy(to, queries + row * M::kHeadDim + d, 2);
    }
  const bool few = kKnowsFewRows<M> && first_row / 8 == (first_row + rows - 1) / 8;
  const u32 begin = held(first_row), end = held(first_row + rows - 1) + 1;
  for (u32 set = 0; set < kLaneWarps<M>; ++set) {
    const u32 warp = set * M::kSoftmaxLanes;
    run_warp(warp, [&](u32 lane) {
      Params none;
      const Context<M> cx{none, {nullptr, nullptr}, warp, lane};
      const u32 from = M::kQueriesTogether < kMaxQueries ? begin : 0;
      const u32 own = from + row_set(cx) * M::kWarpTiles * 16;
      u32 tiles = 0;
      for (u32 m = 0; m < M::kWarpTiles; ++m)
        if (own + m * 16 < end && own + m * 16 + 16 > begin) tiles |= 1u << m;
      if (!tiles) return;
      const u32 first = few ? first_row / 8 * 8 : own;
      i32 of_row[M::kWarpTiles][kRowHalves<M>];
      i32 first_position = last[0];
      for (u32 row = 1; row < rows; ++row)
        if (last[row] < first_position) first_position = last[row];
      for (u32 m = 0; m < M::kWarpTiles; ++m)
        for (u32 i = 0; i < kRowHalves<M>; ++i) {
          const u32 row = row_at(first + m * 16 + lane / 4 + 8 * i) - first_row;
          of_row[m][i] = row < rows ? last[row] : last[rows - 1];
        }
      const u32 q_rows = kQueriesAt + first / 16 * (M::kHeadDim / 32) * 1024 + lane * 16;
      QueryRows<M> query;
      if constexpr (kKeepsQuery<M>) query.load(q_rows);
      Softmax<M> softmax;
      softmax.clear();
      for (u32 page = 0; page < half_pages; ++page) {
        const u32 keys = page * kBytes;
        const i32 start = page * kHalfPagePositions;
        const bool partly = window || start + static_cast<i32>(kHalfPagePositions) > first_position;
        const u32 values = keys + M::kCodeBytes + value_set(cx) * kSetDim<M> * M::kValueRowBytes;
        const Scales<M> scales(keys, value_set(cx));
        if constexpr (kKeepsQuery<M>)
          softmax.add(query, keys, values, scales, start, of_row, window, partly, lane);
        else if (few)
          softmax.template add<1, 1>(q_rows, 1, first & 8, keys, values, scales, start, of_row,
                                     window, partly, lane);
        else
          softmax.template add<M::kWarpTiles, kRowHalves<M>>(
              q_rows, tiles, kBeginsInHalf<M> && first & 8, keys, values, scales, start, of_row,
              window, partly, lane);
      }
      for (u32 m = 0; m < M::kWarpTiles; ++m)
        for (u32 i = 0; i < kRowHalves<M>; ++i) {
          float sum = softmax.total[m][i];
          sum += __shfl_xor_sync(~0u, sum, 1);
          sum += __shfl_xor_sync(~0u, sum, 2);
          const u32 row = row_at(first + m * 16 + lane / 4 + 8 * i) - first_row;
          if (row >= rows || (few && (m || i))) continue;
          float* to = out + row * M::kHeadDim;
          store_row<M>(to, 0, value_set(cx) * kSetDim<M>, softmax.out[m], i, lane % 4);
          best[row] = softmax.best[m][i], total[row] = sum;
        }
    });
  }
}
extern "C" void attend(const u16* queries, u32 rows, u32 first_row, const i32* last,
                       const u8* pages, u32 half_pages, i32 window, float* out, float* best,
                       float* total) {
  attend_of<Kernel>(queries, rows, first_row, last, pages, half_pages, window, out, best, total);
}
"""


def plan_of(shape: str, name: KvName | None) -> Plan:
    heads, kv_heads, dim = SHAPES[shape]
    config = shaped((512, 1024, 2, heads, kv_heads, dim, 1024))
    kv = None if name is None else kv_format(name, config, Dtype.BF16)
    return make_plan(config, Dtype.BF16, TYPICAL["sm_90a"], kv=kv)


@dataclass(frozen=True)
class Built:
    plan: Plan
    queries: int
    code: ctypes.CDLL

    @property
    def group(self) -> int:
        return self.plan.shape.group


KEPT = (
    "kQueryHeads", "kKvHeads", "kGroup", "kHeadDim", "kScoreScale", "kRowTiles", "kWarpTiles",
    "kSoftmaxLanes", "kWideQueries", "kHasWayForFew", "kQueryRows", "kQueriesTogether",
)  # fmt: skip


def built(
    shape: str, name: KvName | None, queries: int, folder: Path, *, keeps_query: bool = True
) -> Built:
    """Attention of a model, in a build for so many queries.

    keeps_query: one query's rows stay in registers, as beside weights that are not quantised.
    """
    compiler = shutil.which("g++")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs g++ on Linux to compile the kernel's code for the host")
    plan = plan_of(shape, name)
    of_model = _of_model(plan.with_room_for(queries, samples=False), Build(queries=queries))
    prepare = (CUDA / "ops/attention/prepare.cuh").read_text(encoding="utf-8")
    begin = prepare.index("template <class M>\n__device__ __forceinline__ u32 q_offset")
    q_offset = prepare[begin : prepare.index("// One head vector [D]")]
    begin = prepare.index("template <class M>\n__device__ __forceinline__ void round_fresh")
    rounding = prepare[begin : prepare.index("template <class L, class M>", begin)]
    counts = {
        "kMaxQueries": MAX_QUERIES, "kMostQueries": queries, "kConsumerWarps": CONSUMER_WARPS
    }  # fmt: skip
    spec = "\n".join(
        [
            '#pragma once\n#include "ptx/types.cuh"',
            "constexpr bool kBf16 = true, kMovesRegisters = true;",
            "constexpr u32 kBatch = 1;",  # as elsewhere than on Hopper
            *_constants(counts),
            *page_constants(),
            "struct Kernel {",
            f"static constexpr u32 kShConvertedBytes = {0 if keeps_query else 16};",
            *_constants({name: of_model[name] for name in KEPT}, "static "),
            *plan.kv_layout.members("static "),
            "};",
        ]
    )
    files = {
        "spec.cuh": spec,
        "ptx/memory.cuh": MEMORY
        + '#include "spec.cuh"\n'
        + LANES
        + "template <class T> T* at_shared(u32 at) { return reinterpret_cast<T*>(shared + at); }\n",
        "ptx/mma.cuh": MULTIPLY,
        "tile/context.cuh": CONTEXT,
        "main.cpp": MAIN.replace("OF_PREPARE", q_offset + rounding),
    }
    for directory, names in REAL.items():
        for own in names:
            at = f"{directory}/{own}.cuh"
            files[at] = (CUDA / at).read_text(encoding="utf-8")
    for at, text in files.items():
        (folder / at).parent.mkdir(parents=True, exist_ok=True)
        (folder / at).write_text(text, encoding="utf-8")
    made = folder / "attention.so"
    options = ["-std=c++17", "-O1", "-w", "-ffp-contract=off", "-shared", "-fPIC", f"-I{folder}"]
    done = subprocess.run(
        [compiler, *options, folder / "main.cpp", "-o", made],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return Built(plan, queries, ctypes.CDLL(str(made)))


def pool_of(plan: Plan, pages: int = 3) -> PagePool:
    shape = plan.shape
    return PagePool(
        shape.num_layers, shape.pool_kv_heads, shape.head_dim, pages, torch.bfloat16,
        torch.device("cpu"), plan.kv,
    )  # fmt: skip


def fresh_heads(count: int, dim: int, seed: int) -> Tensor:
    """[count, 2, D] bf16: of many sizes, with ties, zeros, and what is below all scales."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 2, dim, generator=draw)
    x[..., 3] *= 30
    x *= torch.logspace(-8, 8, count)[:, None, None]
    x = x.bfloat16()
    if count >= 6:
        x[0] = 0
        x[1, :, ::2], x[1, :, 1::2] = -1.5, 1.5  # as far from 0 on either side
        x[2] = torch.arange(dim) % 17 - 8  # many halves between codes
        x[3] = 1e-40
        x[4, 0] = torch.arange(dim) * 3.5 - 60
        x[5, :, : dim // 2] = 0
    return x


@pytest.mark.few(6)
@pytest.mark.parametrize("shape", ["etude", "llama-8b", "narrow", "96"])
@pytest.mark.parametrize("name", NAMES)
def test_appended_positions_have_the_bytes_of_the_definition(
    shape: str, name: KvName | None, tmp_path: Path
) -> None:
    """In a half page as in the pool; what lies beside them stays."""
    kernel = built(shape, name, MAX_QUERIES, tmp_path)
    plan, dim = kernel.plan, kernel.plan.shape.head_dim
    table, layer, head = torch.tensor([2, 0], dtype=torch.int32), 1, 1
    for seed, first in enumerate((0, 29, 60, 91)):
        positions = torch.arange(first, first + MAX_QUERIES, dtype=torch.int32)
        fresh = fresh_heads(MAX_QUERIES, dim, seed)
        given = fresh.clone()
        kernel.code.round_all(place(given), MAX_QUERIES)
        pool = pool_of(plan)
        before = torch.randint(
            0, 100, pool.tensor.view(torch.uint8).shape, dtype=torch.uint8,
            generator=torch.Generator().manual_seed(seed),
        )  # fmt: skip
        pool.tensor.view(torch.uint8).copy_(before)
        stored = pool.tensor.clone()
        heads = torch.zeros(MAX_QUERIES, 2, plan.shape.pool_kv_heads, dim, dtype=torch.bfloat16)
        heads[:, :, head] = fresh
        pool.write(layer, table, first, heads[:, 0], heads[:, 1])
        # The definition writes all heads; only this one was given.
        for other in range(plan.shape.pool_kv_heads):
            if other != head:
                pool.tensor[:, :, other] = stored[:, :, other]
        kernel.code.store_in_pool(
            place(given), place(positions), MAX_QUERIES, place(stored),
            ctypes.c_uint64(stored.stride(0) * stored.element_size() // 2), place(table), layer,
            head,
        )  # fmt: skip
        assert torch.equal(stored.view(torch.uint8), pool.tensor.view(torch.uint8))
        for start in {first // 32 * 32, (first + MAX_QUERIES - 1) // 32 * 32}:
            at = (int(table[start // 64]), layer, head, start % 64 // 32)
            slot = before.view(stored.dtype)[at].clone()
            kernel.code.append_fresh(
                place(given), place(positions), MAX_QUERIES, ctypes.c_int32(start), place(slot)
            )
            assert torch.equal(slot.view(torch.uint8), pool.tensor[at].view(torch.uint8))


def wanted_of(
    kernel: Built, pool: PagePool, queries: Tensor, last: Tensor, half_pages: int, window: int
) -> Softmax:
    """What the interpreter makes of the pool."""
    plan = kernel.plan
    nothing, table = torch.zeros(0), torch.tensor([[2, 0, 1]])
    cache = Cache(plan, Memory(nothing, nothing, None, nothing, pool.tensor, table))
    softmax = Softmax.empty(*queries.shape)
    for start in range(0, 32 * half_pages, 32):
        keys, values = cache.read(1, 1, 0, start)
        scores = _products(queries, keys) * (queries.shape[1] ** -0.5 * 1.4426950408889634)
        at = start + torch.arange(32)
        seen = at <= last[:, None]
        if window:
            seen &= at > last[:, None] - window
        scores = scores.masked_fill(~seen, float("-inf"))
        softmax.add(scores, values.numbers, torch.bfloat16, values.scales)
    return softmax


@pytest.mark.few(16)
@pytest.mark.parametrize("queries", [1, MAX_QUERIES])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_attention_is_the_interpreters(
    shape: str, name: KvName | None, queries: int, tmp_path: Path
) -> None:
    kernel = built(shape, name, queries, tmp_path)
    plan, dim, group = kernel.plan, kernel.plan.shape.head_dim, kernel.group
    draw = torch.Generator().manual_seed(dim + queries)
    pool, table = pool_of(plan), torch.tensor([2, 0, 1], dtype=torch.int32)
    heads = torch.randn(2, 160, plan.shape.pool_kv_heads, dim, generator=draw)
    heads *= 1 + 3 * torch.rand(heads.shape[:3], generator=draw)[..., None]
    pool.write(1, table, 0, *heads.bfloat16())
    half_pages = 5
    lying = [
        pool.tensor[int(table[i // 2]), 1, 1, i % 2].contiguous().view(torch.uint8).flatten()
        for i in range(half_pages)
    ]
    pages = torch.cat(lying)
    # Groups of queries of any size and place, as rounds of several sequences have them.
    most = range(plan.attention.queries_together)
    spans = [range(1)] if queries == 1 else [most, range(3, 5), range(1), range(6, 7)]
    for span in spans:
        for window in (0, 50):
            rows, first_row = len(span) * group, span.start * group
            x = torch.randn(rows, dim, generator=draw).bfloat16()
            last = (150 + torch.arange(len(span))).repeat_interleave(group).int()
            out, best, total = torch.full((rows, dim), torch.nan), *torch.zeros(2, rows)
            kernel.code.attend(
                place(x), rows, first_row, place(last), place(pages), half_pages,
                ctypes.c_int32(window), place(out), place(best), place(total),
            )  # fmt: skip
            wanted = wanted_of(kernel, pool, x.float(), last, half_pages, window)
            torch.testing.assert_close(best, wanted.top, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(total, wanted.total, rtol=1e-4, atol=1e-5)
            # A share that lies between two numbers of bf16 may go either way.
            error = (out - wanted.out).norm() / wanted.out.norm()
            assert float(error) < 1e-3


@pytest.mark.few(3)
@pytest.mark.parametrize("name", KV_FORMATS)
@pytest.mark.parametrize("shape", ["etude", "llama-8b"])
def test_a_querys_bits_do_not_depend_on_its_neighbours(
    shape: str, name: KvName, tmp_path: Path
) -> None:
    """Alone in builds for one query, alone in one for eight, and among eight."""
    for folder in ("one", "few"):
        (tmp_path / folder).mkdir()
    one = built(shape, name, 1, tmp_path / "one")
    few = built(shape, name, 1, tmp_path / "few", keeps_query=False)
    eight = built(shape, name, MAX_QUERIES, tmp_path)
    plan, dim, group = eight.plan, eight.plan.shape.head_dim, eight.group
    draw = torch.Generator().manual_seed(7)
    pool, table = pool_of(plan), torch.tensor([2, 0, 1], dtype=torch.int32)
    pool.write(1, table, 0, *torch.randn(2, 96, plan.shape.pool_kv_heads, dim, generator=draw))
    lying = [pool.tensor[int(table[i // 2]), 1, 1, i % 2].flatten() for i in range(3)]
    pages = torch.cat(lying)
    x = torch.randn(MAX_QUERIES * group, dim, generator=draw).bfloat16()
    last = (80 + torch.arange(MAX_QUERIES)).repeat_interleave(group).int()

    def attended(kernel: Built, rows: slice, first_row: int) -> Tensor:
        queries, ends = x[rows].contiguous(), last[rows].contiguous()
        out, best, total = torch.zeros(len(queries), dim), *torch.zeros(2, len(queries))
        kernel.code.attend(
            place(queries), len(queries), first_row, place(ends), place(pages), 3, 0, place(out),
            place(best), place(total),
        )  # fmt: skip
        return torch.cat([out, best[:, None], total[:, None]], 1)

    together = attended(eight, slice(None), 0)
    for query in (0, 3, 7):
        rows = slice(query * group, (query + 1) * group)
        assert torch.equal(attended(eight, rows, rows.start), together[rows])
        assert torch.equal(attended(one, rows, 0), together[rows])
        assert torch.equal(attended(few, rows, 0), together[rows])
