"""Logits of experts beside attention_output (`ops/route.cuh`), compiled by g++.

Blocks take turns, each with its 256 threads; what they read of other blocks is there.
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

from soloist.megakernel.header import _constants
from soloist.megakernel.limits import CONSUMER_WARPS, MAX_QUERIES
from unit.megakernel.lanes_on_host import LANES, place
from unit.megakernel.test_sample_cuda_on_host import CUDA, MEMORY

CONTEXT = r"""
#pragma once
#include "ptx/memory.cuh"
struct Control { float factor[kMaxQueries]; };
struct Params { u8* workspace; const float* vectors; u32 rank; u8* peers[2]; };
inline u32 sender_rank(const Params& params, u32) { return params.rank; }
struct Queries {
  u32 given;
  operator u32() const { return kMostQueries == 1 ? 1 : given; }
};
struct Shared {
  u8* base;
  Control& control() const { return *reinterpret_cast<Control*>(base); }
};
template <class M>
struct Context {
  const Params& params;
  Shared shared;
  u32 round, block, warp, lane, thread;
  Queries queries;
  u32 layers_done;
  float scale;
  void sync() const { meet_block(); }
  const float* vectors(u64 at) const { return params.vectors + at; }
};
inline float low_half(u32 pair) { return bits_to<float>(pair << 16); }
inline float high_half(u32 pair) { return bits_to<float>(pair & 0xFFFF0000); }
inline float present(float x) { return x; }
inline bool is_present(uint4) { return true; }
inline bool is_present(float) { return true; }
inline void store_exchanged(float* to, float x) { *to = x; }
inline void store_to_peer(float* to, float x) { *to = x; }
inline float __fdividef(float a, float b) { return a / b; }
inline float warp_sum(float x) {
  for (u32 o = 16; o; o >>= 1) x += __shfl_xor_sync(~0u, x, o);
  return x;
}
template <class M>
u8* exchange_copy(const Params& params, u32 offset, u32, u32 epoch) {
  if (offset == M::kWsHiddenRouter && epoch != 7 + 3) std::abort();
  return params.workspace + offset;
}
inline u16* operand_value(u8* buffer, u32 query, u32 k) {
  return reinterpret_cast<u16*>(buffer) + ((k / 32) * kMostQueries + query) * 32 + k % 32;
}
"""
LOGITS = r"""
#pragma once
template <class L>
inline constexpr u32 kLogitParts = kRanks;
template <class M>
float* expert_logits(u8* workspace, u32 epoch, u32 rank, u32 query) {
  float* parts = reinterpret_cast<float*>(workspace);
  return epoch == 7 ? parts + (rank * kMaxQueries + query) * M::kMostLogits : nullptr;
}
"""
HIDDEN = r"""
#pragma once
#include "tile/context.cuh"
template <class Of>
struct RouterStream { using M = Of; };
// The epochs that qkv and attention of the layer had.
template <class Stream, class M>
u8* stream_operand(const Context<M>& cx, u32 epoch) {
  return epoch == 7 + 3 ? cx.params.workspace + M::kStreamAt : nullptr;
}
template <class M>
u8* attended_operand(const Context<M>& cx, u32 epoch) {
  return epoch == 7 ? cx.params.workspace + M::kAttendedAt : nullptr;
}
"""
MAIN = r"""
#include "ops/route.cuh"
struct L {
  using M = Model;
  static constexpr u64 kVecRouter = 0, kVecRouterOutput = kRows * Model::kHidden;
  static u32 first_router_row(u32 block) { return block * kRows / kBlocks; }
  static u64 vectors(u32) { return 64; }
};
extern "C" void route(u8* workspace, const float* vectors, const float* factors,
                      const float* scales, u32 queries, u32 rank, u8* other) {
  const Params params{workspace, vectors, rank,
                      {rank ? other : workspace, rank ? workspace : other}};
  for (u32 block = 0; block < kBlocks; ++block) {
    std::memset(shared, 0xFF, 1 << 16);
    std::memcpy(shared, factors, kMaxQueries * 4);
    run_lanes(0, kConsumerThreads, [&](u32 thread) {
      Context<Model> cx{params, {shared}, 3, block, thread / 32, thread % 32, thread, {queries}, 7,
                        scales[thread / 32]};
      u32 called = 0;
      route_early<L>(cx, 0, [&] { ++called; });
      if (called != 1) std::abort();
    });
  }
}
"""
ROWS, BLOCKS = 20, 7


@dataclass(frozen=True)
class Seen:
    """Logits [queries, rows] of the kernel's code, and what they are.

    `others`: what another rank has of them.
    """

    logits: Tensor
    others: Tensor
    wanted: Tensor


def run(
    folder: Path,
    hidden: int,
    heads: int,
    queries: int,
    *,
    rank: int | None = None,
) -> Seen:
    """`rank`: of two."""
    compiler = shutil.which("g++")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs g++ on Linux to compile the kernel's code for the host")
    room, attended = 1 if queries == 1 else MAX_QUERIES, heads * 128
    operand_bytes = [room * 2 * columns for columns in (hidden, attended)]
    sizes = {
        "kHidden": hidden, "kQueryHeads": heads, "kHeadDim": 128, "kMostLogits": ROWS,
        "kWsExpertLogits": 0, "kWsExpertLogitsBytes": 1, "kShExpertLogits": 4096,
        "kStreamAt": 4096, "kWsHiddenRouter": 4096, "kWsHiddenRouterBytes": 1,
        "kAttendedAt": 4096 + operand_bytes[0],
    }  # fmt: skip
    counts = {
        "kMaxQueries": MAX_QUERIES, "kMostQueries": room, "kConsumerWarps": CONSUMER_WARPS,
        "kConsumerThreads": CONSUMER_WARPS * 32, "kRows": ROWS, "kBlocks": BLOCKS,
        "kRanks": 1 if rank is None else 2,
    }  # fmt: skip
    spec = ['#pragma once\n#include "ptx/types.cuh"', *_constants(counts)]
    spec += ["struct Model {", *_constants(sizes, "static "), "};"]
    files = {
        "spec.cuh": "\n".join(spec),
        "ptx/types.cuh": (CUDA / "ptx/types.cuh").read_text(encoding="utf-8"),
        "ptx/memory.cuh": MEMORY + '#include "spec.cuh"\n' + LANES,
        "tile/context.cuh": CONTEXT,
        "tile/logits.cuh": LOGITS,
        "ops/hidden.cuh": HIDDEN,
        "ops/attention/exchange.cuh": "#pragma once\n",
        "ops/route.cuh": (CUDA / "ops/route.cuh").read_text(encoding="utf-8"),
        "main.cpp": MAIN,
    }
    for at, text in files.items():
        (folder / at).parent.mkdir(parents=True, exist_ok=True)
        (folder / at).write_text(text, encoding="utf-8")
    options = ["-std=c++20", "-O1", "-w", "-shared", "-fPIC", f"-I{folder}"]
    made = subprocess.run(
        [compiler, *options, folder / "main.cpp", "-o", folder / "route.so"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr[:4000]
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    router, product = drawn(ROWS, hidden), drawn(ROWS, attended)
    stream, attention = (drawn(queries, n).bfloat16() for n in (hidden, attended))
    factors, scales = drawn(MAX_QUERIES).exp(), drawn(MAX_QUERIES).exp()

    def operand(x: Tensor) -> Tensor:
        padded = torch.zeros(room, -(-x.shape[1] // 32) * 32, dtype=torch.bfloat16)
        padded[: len(x), : x.shape[1]] = x
        return padded.view(room, -1, 32).transpose(0, 1).contiguous().view(torch.uint8).flatten()

    workspace = torch.cat(
        [torch.zeros(4096, dtype=torch.uint8), *map(operand, (stream, attention))]
    )
    vectors = torch.cat([torch.full((64,), torch.nan), router.flatten(), product.flatten()])
    code = ctypes.CDLL(str(folder / "route.so"))
    other = torch.zeros(4096, dtype=torch.uint8)
    given = map(place, (workspace, vectors, factors, scales))
    code.route(*given, queries, rank or 0, place(other))
    parts = [
        x[:4096].view(torch.float32)[(rank or 0) * MAX_QUERIES * ROWS :] for x in (workspace, other)
    ]
    seen, others = (part[: queries * ROWS].view(queries, ROWS) for part in parts)
    assumed = (scales / factors)[:queries, None]
    of_stream = stream.float() @ router.T
    wanted = attention.float() @ product.T + (0 if rank else of_stream / assumed)
    return Seen(seen, others, wanted)


@pytest.mark.parametrize("queries", [1, 3, MAX_QUERIES])
@pytest.mark.parametrize("heads", [2, 33])  # the last with three turns of all threads
def test_logits_follow_from_the_stream_and_from_attention(
    heads: int, queries: int, tmp_path: Path
) -> None:
    """Each is a row of the router times the stream, over the scale that was assumed, and more."""
    seen = run(tmp_path, 160, heads, queries)
    torch.testing.assert_close(seen.logits, seen.wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_tell_each_other_their_parts(rank: int, queries: int, tmp_path: Path) -> None:
    """Each gives what its part of attention does, and the first one adds the stream's."""
    seen = run(tmp_path, 160, 2, queries, rank=rank)
    torch.testing.assert_close(seen.logits, seen.wanted, rtol=1e-4, atol=1e-3)
    assert torch.equal(seen.others, seen.logits)
