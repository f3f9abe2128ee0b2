"""Attention of all blocks of a KV head, compiled by g++: from q, k and v to what is published.

The text of `ops/attention/` runs as it stands, with a block's warps as coroutines; blocks take
turns, and the ring holds what the producer would have brought. The outcome has to be attention as
it is defined, and a query's bits those that it has alone, in either build.
"""

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from plan.shapes import shaped
from soloist.kv.layout import PAGE_POSITIONS, page_constants
from soloist.kv.pool import PagePool
from soloist.megakernel.attention_plan import AttentionPlan
from soloist.megakernel.gpu import TYPICAL
from soloist.megakernel.header import Build, _constants, _of_model
from soloist.megakernel.limits import CONSUMER_WARPS, MAX_QUERIES
from soloist.megakernel.plan import Plan, make_plan
from soloist.model.dtype import Dtype
from unit.megakernel.lanes_on_host import LANES, place
from unit.megakernel.test_kv_codes_cuda_on_host import CONTEXT, MULTIPLY
from unit.megakernel.test_sample_cuda_on_host import CUDA, MEMORY

# (query heads, KV heads, D, SMs): narrow and wide queries; a warp has one tile or two, of all of a
# head's values or of a part.
SHAPES = {
    "four": (4, 1, 128, 8), "eight": (8, 1, 128, 8), "twelve": (12, 1, 128, 8),
    "sixteen": (16, 1, 128, 8),
    "nine of 64": (9, 1, 64, 4), "sixteen of 64": (16, 1, 64, 4), "twelve of 96": (12, 1, 96, 4),
    "sixteen of 32": (16, 1, 32, 4),
}  # fmt: skip
REAL = {
    "tile": ("kv_codes", "kv_page"), "ptx": ("types",),
    "ops/attention": (
        "append", "attend", "attend_alone", "exchange", "gather", "merge", "prepare",
        "prepare_one", "softmax", "split",
    ),
}  # fmt: skip
LAYER, HEAD = 1, 0
POSITIONS, SEQUENCES = 320, 2

MORE = r"""
#define __shared__ static
inline u32 __clz(u32 x) { return x ? __builtin_clz(x) : 32; }
inline u32 __ffs(u32 x) { return __builtin_ffs(x); }
inline u32 __popc(u32 x) { return __builtin_popcount(x); }
inline i32 max(i32 a, i32 b) { return a > b ? a : b; }
inline u32 __ballot_sync(u32, bool x) {
  const Left* all = meet({{x}});
  u32 bits = 0;
  for (u32 i = 0; i < 32; ++i) bits |= all[i].words[0] << i;
  return bits;
}
inline u32 __shfl_up_sync(u32, u32 x, u32 by) {
  const u32 lane = threadIdx.x % 32;
  return meet({{x}})[lane < by ? lane : lane - by].words[0];
}
inline i32 __shfl_up_sync(u32 all, i32 x, u32 by) {
  return static_cast<i32>(__shfl_up_sync(all, static_cast<u32>(x), by));
}
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float __fdividef(float a, float b) { return a / b; }
inline u32 shared_address(const void* p) { return static_cast<const u8*>(p) - shared; }
inline void fence_async_proxy_shared() {}
inline void store_shared_half(u32 at, u16 x) { std::memcpy(shared + at, &x, 2); }

// What nobody published yet: whoever reads it is told on by `missed`.
constexpr u32 kSentinel = ~0u;
static u32 missed;
inline u32 present(u32 x) { return x; }
inline u32 present(float x) { return bits_to<u32>(x); }
inline bool is_present(float x) { missed += bits_to<u32>(x) == kSentinel; return true; }
inline bool is_present(float2 x) { return is_present(x.x) && is_present(x.y); }
inline bool is_present(float4 x) {
  return is_present(x.x) && is_present(x.y) && is_present(x.z) && is_present(x.w);
}
inline float2 load_exchanged2(const float* p) { return {p[0], p[1]}; }
inline float4 load_exchanged4(const float* p) { return {p[0], p[1], p[2], p[3]}; }
// Each word is published once.
static u32 twice;
inline void store_words(void* to, const u32* words, u32 count) {
  u32 before[4];
  std::memcpy(before, to, 4 * count);
  for (u32 i = 0; i < count; ++i) twice += before[i] != kSentinel;
  std::memcpy(to, words, 4 * count);
}
inline void store_exchanged(void* to, u32 x) { store_words(to, &x, 1); }
inline void store_exchanged(void* to, u32 x, u32 y) {
  const u32 words[] = {x, y};
  store_words(to, words, 2);
}
inline void store_exchanged(void* to, uint4 x) { store_words(to, &x.x, 4); }
inline u16 to_half(float x);
"""

BLOCK = r"""
inline u16 to_half(float x) { return to_bf16(x); }
struct Control {
  u32 queries;
  i32 sequence[kMaxQueries], position[kMaxQueries];
  float factor[kMaxQueries];
};
struct Params {
  u16* pool;
  const i32* page_tables;
  u32 page_table_stride;
  u64 page_values;
  u8* workspace;
};
struct Queries {
  u32 given;
  operator u32() const { return kMostQueries == 1 ? 1 : given; }
};
constexpr u32 kBuffersAt = 6 << 20;
template <class M>
struct Shared {
  u8* base;
  Shared<M> anew() const { return *this; }
  u8* reduce() const { return base + M::kShReduce; }
  u8* q_rows() const { return base + M::kShQRows; }
  u8* new_kv() const { return base + M::kShNewKv; }
  float2* stats() const { return reinterpret_cast<float2*>(base + M::kShStats); }
  float2* rope() const { return reinterpret_cast<float2*>(base + M::kShRope); }
  Control& control() const { return *reinterpret_cast<Control*>(base + M::kShControl); }
};
// As if it had room for all slots of a layer.
template <class M>
struct Ring {
  u32 slot;
  u32 place(u32 ahead) const { return (slot + ahead) * M::kSlotBytes; }
  u32 wait(u32 ahead) const { return place(ahead); }
  void release(u32, u32, u32) const {}
  void advance(u32 count) { slot += count; }
};
template <class M>
struct Context {
  const Params& params;
  Shared<M> shared;
  Ring<M> ring;
  u32 round, block, warp, lane, thread;
  Queries queries;
  u32 layers_done, reductions;
  float scale;
  void sync() const { meet_block(); }
  void mark() const {}
  void forget_addresses() const {}
  const float* vectors(u64) const { return nullptr; }
};
float warp_sum(float x);  // of norms, which these models have none of
float rsqrtf(float x);
template <class M>
u32 lane_here() { return 0; }
template <class M>
u8* exchange_copy(const Params& params, u32 offset, u32, u32) { return params.workspace + offset; }
inline u16* operand_value(u8* buffer, u32 query, u32 k) {
  return reinterpret_cast<u16*>(buffer) + query * kAttendedColumns + k;
}
"""

MAIN = r"""
#include "ops/attention/attend.cuh"
#include "ops/attention/attend_alone.cuh"
#include "ops/attention/merge.cuh"
#include "ops/attention/prepare.cuh"

using M = Kernel;
struct L {
  using M = Kernel;
  static constexpr bool kQkNorm = false, kQkvBias = false;
  struct Qkv { static constexpr u32 kUnits = kProjectedRows / 8; };
  static u64 vectors(u32) { return 0; }
};
constexpr u32 kAttentionMarks = 4;
namespace text {
OF_ATTENTION
}

static void require(bool fine, const char* what) {
  if (!fine) std::fprintf(stderr, "%s\n", what), std::abort();
}

// Pages of all groups of a block come to slots, as the producer brings them.
static void produce(const Params& params, const Control& control, u32 layer, u32 place, u32 head) {
  run_warp(0, [&](u32 lane) {
    const QueryGroups<M> groups(control, layer, place, control.queries, lane);
    u32 slot = 0;
    for (u32 own = groups.own; own; own &= own - 1) {
      const QueryGroup g = groups.at(control, __ffs(own) - 1);
      if (lane == 0 && g.end - g.begin > M::kQueriesTogether) twice = ~0u;
      for (PageWalk<M> walk(g, layer); walk.any(); walk.next()) {
        const i32 id = params.page_tables[g.sequence * params.page_table_stride + walk.page];
        const u32 first = walk.first_half_page(), last = walk.last_half_page();
        for (u32 half = first; half <= last; ++half) {
          const u32 in_slot = M::kPageSlot ? half - first : 0, bytes = 2 * M::kHalfPageBytes;
          const u64 at = half_page_offset<M>(params.page_values, id, layer, head, half);
          if ((slot + 1) * M::kSlotBytes > kBuffersAt) std::abort();
          if (lane == 0)
            std::memcpy(shared + slot * M::kSlotBytes + in_slot * bytes, params.pool + at, bytes);
          if (!M::kPageSlot || half == last) ++slot;
        }
      }
    }
  });
}

// `counts`: words that were missing, and that were published twice.
extern "C" void attend(const i32* sequences, const i32* positions, u32 queries, u32 layer,
                       u16* pool, u64 page_values, const i32* tables, u32 table_stride,
                       u8* workspace, u32* counts, bool last_first) {
  const Params params{pool, tables, table_stride, page_values, workspace};
  const Shared<M> of_block{shared + kBuffersAt};
  missed = twice = 0, backwards = last_first;
  const auto each_block = [&](const auto& does) {
    for (u32 i = 0; i < M::kSplits * M::kKvHeads + kAttentionBlocks; ++i) {
      const u32 sharing = M::kSplits * M::kKvHeads;
      const u32 block = i < sharing ? i : kNumBlocks + i - sharing;
      std::memset(shared, 0xFF, sizeof shared);  // no number, where nobody wrote
      Control& control = of_block.control();
      control.queries = queries;
      for (u32 i = 0; i < kMaxQueries; ++i) {
        control.sequence[i] = i < queries ? sequences[i] : 0;
        control.position[i] = i < queries ? positions[i] : 0;
        control.factor[i] = 1.0f;
      }
      does(block);
    }
  };
  const auto run = [&](u32 block, const auto& does) {
    run_lanes(0, kConsumerThreads, [&](u32 thread) {
      Context<M> cx{params, of_block, {0}, 0, block, thread / 32, thread % 32, thread, {queries}};
      u32 of_layer = layer;
      does(cx, of_layer);
    });
  };
  each_block([&](u32 block) {
    produce(params, of_block.control(), layer, place_of_block<M>(block), head_of_block<M>(block));
    run(block, [=](Context<M>& cx, u32& of_layer) {
      if (is_attention_block(block)) attend_alone(L{}, cx, of_layer);
      else text::attention(L{}, cx, of_layer);
    });
  });
  each_block([&](u32 block) {
    if (is_attention_block(block)) return;
    run(block, [](Context<M>& cx, u32& of_layer) {
      merge_far(cx, of_layer, own_head(cx), own_place(cx));
    });
  });
  counts[0] = missed, counts[1] = twice;
}
"""


@dataclass(frozen=True)
class Built:
    plan: Plan
    code: ctypes.CDLL


@pytest.fixture
def splits_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page makes two splits of a cache, two pages four of them."""
    monkeypatch.setattr(AttentionPlan, "unsplit_positions", property(lambda _: PAGE_POSITIONS))


def plan_of(shape: str) -> Plan:
    heads, kv_heads, dim, num_sms = SHAPES[shape]
    config = shaped((8 * num_sms, 8 * num_sms, 3, heads, kv_heads, dim, 512))
    *others, last = config.layers
    windowed = replace(last, attention=replace(last.attention, window=50))
    config = replace(config, layers=(*others, windowed))
    gpu = replace(TYPICAL["sm_90a"], num_sms=num_sms)
    return make_plan(config, Dtype.BF16, gpu)


def built(
    plan: Plan, queries: int, folder: Path, attention_blocks: int = 0, **constants: int
) -> Built:
    """Attention of a model, in a build for so many queries, with `constants` for the plan's."""
    folder.mkdir(exist_ok=True)
    compiler = shutil.which("g++")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs g++ on Linux to compile the kernel's code for the host")
    room = plan.with_room_for(queries, samples=False)
    attention = (CUDA / "ops/attention.cuh").read_text(encoding="utf-8")
    begin = attention.index("// `layer` is a reference")
    of_attention = attention[begin : attention.index("template <class L, class M>", begin + 200)]
    merging = "  merge_far(cx, layer, own_head(cx), own_place(cx));\n"  # once all blocks are there
    assert merging in of_attention
    begins = "  cx.begin(Phase::kAttention);\n"
    rests = "    rest_while_others_attend<M>(cx.queries);\n"
    assert of_attention.count(rests) == 2, "wherever a block does not attend"
    of_attention = of_attention.replace(merging, "").replace(begins, "").replace(rests, "")
    shape = plan.shape
    counts = {
        "kMaxQueries": MAX_QUERIES, "kMostQueries": queries, "kConsumerWarps": CONSUMER_WARPS,
        "kConsumerThreads": CONSUMER_WARPS * 32, "kChunkPages": plan.attention.chunk_pages,
        "kAttentionBlocks": attention_blocks, "kNumBlocks": plan.blocks,
        "kAttendedColumns": shape.query_heads * shape.head_dim,
        "kProjectedRows": (shape.query_heads + 2 * shape.kv_heads) * shape.head_dim,
    }  # fmt: skip
    of_model = _of_model(room, Build(queries=queries)) | constants
    windows = ", ".join(str(x.attention.window or 0) for x in plan.model.layers)
    spec = "\n".join(
        [
            '#pragma once\n#include "ptx/types.cuh"',
            "constexpr bool kBf16 = true, kMovesRegisters = true;",
            "constexpr u32 kBatch = 2;",
            *_constants(counts),
            *page_constants(),
            "struct Kernel {",
            *_constants(of_model, "static "),
            f"static constexpr int kWindow[] = {{{windows}}};",
            f"static constexpr bool kRotated[{shape.num_layers}] = {{}};",
            *plan.kv_layout.members("static "),
            "};",
        ]
    )
    begin = CONTEXT.index("inline float2 make_float2")
    more = CONTEXT[begin : CONTEXT.index("struct Control")]
    files = {
        "spec.cuh": spec,
        "ptx/memory.cuh": MEMORY
        + '#include "spec.cuh"\n'
        + LANES
        + "template <class T> T* at_shared(u32 at) { return reinterpret_cast<T*>(shared + at); }\n"
        + MORE,
        "ptx/mma.cuh": MULTIPLY,
        "tile/context.cuh": '#pragma once\n#include "ptx/memory.cuh"\n#include "ptx/mma.cuh"\n'
        + more
        + BLOCK,
        "main.cpp": MAIN.replace("OF_ATTENTION", of_attention),
    }
    for directory, names in REAL.items():
        for own in names:
            at = f"{directory}/{own}.cuh"
            files[at] = (CUDA / at).read_text(encoding="utf-8")
    for at, text in files.items():
        (folder / at).parent.mkdir(parents=True, exist_ok=True)
        (folder / at).write_text(text, encoding="utf-8")
    made = folder / "attention.so"
    options = ["-std=c++20", "-O1", "-w", "-ffp-contract=off", "-shared", "-fPIC", f"-I{folder}"]
    done = subprocess.run(
        [compiler, *options, folder / "main.cpp", "-o", made],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return Built(room, ctypes.CDLL(str(made)))


class Round:
    """Queries of a layer: q, k and v in fp32, and caches with what came before."""

    def __init__(self, plan: Plan, sequences: Sequence[int], positions: Sequence[int]) -> None:
        shape, draw = plan.shape, torch.Generator().manual_seed(3)
        self.plan, self.sequences, self.positions = plan, list(sequences), list(positions)
        self.heads = torch.randn(
            SEQUENCES, POSITIONS, shape.group + 2, shape.head_dim, generator=draw
        )
        pages = SEQUENCES * POSITIONS // PAGE_POSITIONS
        self.pool = PagePool(
            shape.num_layers, 1, shape.head_dim, pages, torch.bfloat16, torch.device("cpu")
        )
        self.pool.tensor.fill_(3.0)  # what others left: any number
        order = torch.randperm(pages, generator=draw).int()
        self.tables = order.view(SEQUENCES, -1).contiguous()
        for sequence in range(SEQUENCES):
            fresh = [p for s, p in zip(sequences, positions, strict=True) if s == sequence]
            known = self.heads[sequence, : min(fresh, default=POSITIONS), -2:, None]
            for layer in range(shape.num_layers):
                self.pool.write(layer, self.tables[sequence], 0, *known.bfloat16().unbind(1))

    def attend(
        self, kernel: Built, layer: int, only: slice = slice(None), *, backwards: bool = False
    ) -> Tensor:
        """[queries, query heads · D] of some of the queries; warps in their order, or backwards."""
        sequences, positions = (
            torch.tensor(x[only], dtype=torch.int32) for x in (self.sequences, self.positions)
        )
        exchanges, pool = kernel.plan.exchanges, self.pool.tensor.clone()
        workspace = torch.full((exchanges.num_bytes,), 255, dtype=torch.uint8)
        own = self.heads[sequences, positions].flatten(1)
        start = exchanges.workspace["projected"].offset
        workspace[start : start + own.numel() * 4] = own.contiguous().view(torch.uint8).flatten()
        counts = torch.zeros(2, dtype=torch.int32)
        kernel.code.attend(
            place(sequences), place(positions), len(positions), layer, place(pool),
            ctypes.c_uint64(pool.stride(0) * pool.element_size() // 2), place(self.tables),
            self.tables.shape[1], place(workspace), place(counts), backwards,
        )  # fmt: skip
        assert counts.tolist() == [0, 0], "all is published, once"
        self.require_stored(pool, layer, only)
        start = exchanges.workspace["attended"].offset
        size = len(positions) * kernel.plan.shape.query_heads * kernel.plan.shape.head_dim
        seen = workspace[start : start + 2 * size].clone().view(torch.bfloat16)
        return seen.view(len(positions), -1)

    def require_stored(self, pool: Tensor, layer: int, only: slice) -> None:
        """New keys and values are in the pool, and all else is as it was."""
        for sequence, position in zip(self.sequences[only], self.positions[only], strict=True):
            fresh = self.heads[sequence, position : position + 1, -2:, None].bfloat16()
            self.pool.write(layer, self.tables[sequence], position, *fresh.unbind(1))
        assert torch.equal(pool.view(torch.uint8), self.pool.tensor.view(torch.uint8))

    def wanted(self, layer: int) -> Tensor:
        """As attention is defined, from rounded queries, keys and values."""
        dim, window = self.plan.shape.head_dim, self.plan.model.layers[layer].attention.window
        out = []
        for sequence, position in zip(self.sequences, self.positions, strict=True):
            first = max(0, position - window + 1) if window else 0
            heads = self.heads[sequence, : position + 1].bfloat16().float()
            q, keys, values = heads[-1, :-2], heads[first:, -2], heads[first:, -1]
            out.append(((q @ keys.T * dim**-0.5).softmax(1) @ values).flatten())
        return torch.stack(out)


# Sequences and positions of eight queries: one beside the other where all blocks share a cache; in
# several groups, some of which are unsplit; over the end of a page and of a split.
ROUNDS = {
    "one sequence": ([0] * 8, range(290, 298)),
    "a page's end": ([0] * 8, range(125, 133)),
    "two sequences": ([0] * 3 + [1] * 5, [*range(63, 66), *range(300, 305)]),
}


@pytest.mark.few(4)
@pytest.mark.usefixtures("splits_early")
@pytest.mark.parametrize("layer", [LAYER, 2], ids=["all", "window"])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_its_definition_and_a_querys_bits_its_own(
    shape: str, layer: int, tmp_path: Path
) -> None:
    plan = plan_of(shape)
    one, eight = built(plan, 1, tmp_path / "one"), built(plan, MAX_QUERIES, tmp_path / "eight")
    # Blocks of their own attend to what is one split.
    beside = built(plan, 1, tmp_path / "beside", plan.shape.kv_heads)
    # With a window the new key may come after pages that fill the ring.
    narrow = built(plan, 1, tmp_path / "narrow", plan.shape.kv_heads, kRingSlots=2)
    more = plan.with_room_for(MAX_QUERIES, samples=False).shared.ring_slots * 2 // 3
    longer = built(plan, MAX_QUERIES, tmp_path / "longer", kPageBatchSlots=more, kHasWayForFew=True)
    for sequences, positions in ROUNDS.values():
        seen = Round(plan, sequences, positions)
        together = seen.attend(eight, layer)
        error = (together.float() - seen.wanted(layer)).norm() / seen.wanted(layer).norm()
        assert float(error) < 0.01
        again = Round(plan, sequences, positions)
        assert torch.equal(again.attend(eight, layer, backwards=True), together)
        in_longer_batches = Round(plan, sequences, positions).attend(longer, layer)
        assert torch.equal(in_longer_batches, together)
        for query in (0, 4, 7):
            alone = slice(query, query + 1)
            apart = Round(plan, sequences, positions)
            # What came before it is in the cache by then.
            for i in range(query):
                fresh = apart.heads[sequences[i], positions[i] : positions[i] + 1, -2:, None]
                for each in range(plan.shape.num_layers):
                    table = apart.tables[sequences[i]]
                    apart.pool.write(each, table, positions[i], *fresh.bfloat16().unbind(1))
            assert torch.equal(apart.attend(eight, layer, alone), together[alone])
            assert torch.equal(apart.attend(one, layer, alone), together[alone])
            assert torch.equal(apart.attend(beside, layer, alone), together[alone])
            assert torch.equal(apart.attend(narrow, layer, alone), together[alone])
