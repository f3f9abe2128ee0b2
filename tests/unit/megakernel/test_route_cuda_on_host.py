"""Logits of experts beside attention_output (`ops/route.cuh`), compiled by g++.

Blocks take turns, each with its 256 threads; what they read of other blocks is there.
"""

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from soloist.megakernel.header import _constants
from soloist.megakernel.limits import CONSUMER_WARPS, MAX_QUERIES
from unit.megakernel.lanes_on_host import LANES, place
from unit.megakernel.test_sample_cuda_on_host import CUDA, MEMORY

CONTEXT = r"""
#pragma once
#include "ptx/memory.cuh"
struct Control { float factor[kMaxQueries]; };
struct Params { u8* workspace; const float* vectors; };
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
inline void store_exchanged(float* to, float x) { *to = x; }
inline float __fdividef(float a, float b) { return a / b; }
inline float warp_sum(float x) {
  for (u32 o = 16; o; o >>= 1) x += __shfl_xor_sync(~0u, x, o);
  return x;
}
template <class M>
u8* exchange_copy(const Params& params, u32 offset, u32, u32) { return params.workspace + offset; }
inline u16* operand_value(u8* buffer, u32 query, u32 k) {
  return reinterpret_cast<u16*>(buffer) + ((k / 32) * kMostQueries + query) * 32 + k % 32;
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
  static constexpr u64 kVecRouter = 0, kVecRouterOutput = kRows * Model::kHidden;
  static u32 first_router_row(u32 block) { return block * kRows / kBlocks; }
  static u64 vectors(u32) { return 64; }
};
extern "C" void route(u8* workspace, const float* vectors, const float* factors,
                      const float* scales, u32 queries) {
  const Params params{workspace, vectors};
  for (u32 block = 0; block < kBlocks; ++block) {
    std::memset(shared, 0xFF, 1 << 16);
    std::memcpy(shared, factors, kMaxQueries * 4);
    run_lanes(0, kConsumerThreads, [&](u32 thread) {
      Context<Model> cx{params, {shared}, 3, block, thread / 32, thread % 32, thread, {queries}, 7,
                        scales[thread / 32]};
      route_early<L>(cx, 0);
    });
  }
}
"""
HIDDEN_SIZE, ROWS, BLOCKS = 160, 20, 7


@pytest.mark.parametrize("queries", [1, 3, MAX_QUERIES])
@pytest.mark.parametrize("heads", [2, 33])  # the last with three turns of all threads
def test_logits_follow_from_the_stream_and_from_attention(
    heads: int, queries: int, tmp_path: Path
) -> None:
    """Each is a row of the router times the stream, over the scale that was assumed, and more."""
    compiler = shutil.which("g++")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs g++ on Linux to compile the kernel's code for the host")
    room, attended = 1 if queries == 1 else MAX_QUERIES, heads * 128
    operand_bytes = [room * 2 * columns for columns in (HIDDEN_SIZE, attended)]
    sizes = {
        "kHidden": HIDDEN_SIZE, "kQueryHeads": heads, "kHeadDim": 128, "kMostLogits": ROWS,
        "kWsExpertLogits": 0, "kWsExpertLogitsBytes": 1, "kShExpertLogits": 4096,
        "kStreamAt": 4096, "kAttendedAt": 4096 + operand_bytes[0],
    }  # fmt: skip
    counts = {
        "kMaxQueries": MAX_QUERIES, "kMostQueries": room, "kConsumerWarps": CONSUMER_WARPS,
        "kConsumerThreads": CONSUMER_WARPS * 32, "kRows": ROWS, "kBlocks": BLOCKS,
    }  # fmt: skip
    spec = ['#pragma once\n#include "ptx/types.cuh"', *_constants(counts)]
    spec += ["struct Model {", *_constants(sizes, "static "), "};"]
    files = {
        "spec.cuh": "\n".join(spec),
        "ptx/types.cuh": (CUDA / "ptx/types.cuh").read_text(encoding="utf-8"),
        "ptx/memory.cuh": MEMORY + '#include "spec.cuh"\n' + LANES,
        "tile/context.cuh": CONTEXT,
        "ops/hidden.cuh": HIDDEN,
        "ops/attention/exchange.cuh": "#pragma once\n",
        "ops/route.cuh": (CUDA / "ops/route.cuh").read_text(encoding="utf-8"),
        "main.cpp": MAIN,
    }
    for at, text in files.items():
        (tmp_path / at).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / at).write_text(text, encoding="utf-8")
    options = ["-std=c++20", "-O1", "-w", "-shared", "-fPIC", f"-I{tmp_path}"]
    made = subprocess.run(
        [compiler, *options, tmp_path / "main.cpp", "-o", tmp_path / "route.so"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr[:4000]
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    router, product = drawn(ROWS, HIDDEN_SIZE), drawn(ROWS, attended)
    stream, attention = (drawn(queries, n).bfloat16() for n in (HIDDEN_SIZE, attended))
    factors, scales = drawn(MAX_QUERIES).exp(), drawn(MAX_QUERIES).exp()

    def operand(x: torch.Tensor) -> torch.Tensor:
        padded = torch.zeros(room, x.shape[1], dtype=torch.bfloat16)
        padded[: len(x)] = x
        return padded.view(room, -1, 32).transpose(0, 1).contiguous().view(torch.uint8).flatten()

    workspace = torch.cat(
        [torch.zeros(4096, dtype=torch.uint8), *map(operand, (stream, attention))]
    )
    vectors = torch.cat([torch.full((64,), torch.nan), router.flatten(), product.flatten()])
    code = ctypes.CDLL(str(tmp_path / "route.so"))
    code.route(*map(place, (workspace, vectors, factors, scales)), queries)
    seen = workspace[: room * ROWS * 4].view(torch.float32).view(room, ROWS)[:queries]
    assumed = (scales / factors)[:queries, None]
    wanted = stream.float() @ router.T / assumed + attention.float() @ product.T
    torch.testing.assert_close(seen, wanted, rtol=1e-4, atol=1e-3)
