"""The kernels of a Laneformer's prefill, by g++ with one thread a block, against TorchLanes."""

import ctypes
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import soloist
from interpreter.lane_models import fields_of, random_weights
from soloist.kv.pool import PagePool
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.families import read_config
from soloist.parallel.lanes import LaneShare, lanes_of_ranks
from soloist.prefill.elementwise import Reach, TorchElementwise
from soloist.prefill.fused import peers_type
from soloist.prefill.fused_lanes import KernelDue, KernelHearing, hearing_of
from soloist.prefill.header import header
from soloist.prefill.lane_elementwise import News, TorchLanes
from soloist.weights.sharding import shard_all
from unit.model.configurations import written

CUDA = Path(soloist.__file__).parent / "cuda"
TOKENS, WORDS = 5, 16

STUBS = r"""
#include <cmath>
#include <cstdlib>
#include <cstring>
#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__
#include "ptx/types.cuh"
#include "spec.cuh"
struct float4 { float x, y, z, w; };
struct float2 { float x, y; };
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
struct Index { u32 x; };
static Index threadIdx, blockIdx, gridDim;
inline float4 __ldg(const float4* p) { return *p; }
inline float __frsqrt_rn(float x) { return 1.0f / std::sqrt(x); }
inline u32 __float_as_uint(float x) { u32 b; std::memcpy(&b, &x, 4); return b; }
inline float from_half(u16 x) {
  const u32 b = u32{x} << 16;
  float f;
  std::memcpy(&f, &b, 4);
  return f;
}
inline u32 pack_pair(float low, float high) {
  const auto half = [](float x) {
    const u32 b = __float_as_uint(x);
    return (b + 0x7FFF + (b >> 16 & 1)) >> 16;
  };
  return half(low) | half(high) << 16;
}
inline u64 clock_ns() { return 0; }
inline void __threadfence_system() {}
inline void __syncthreads() {}
inline void store_host(u32* p, u32 v) { *p = v; }
inline void store_host_release(u32* p, u32 v) { *p = v; }
inline void store_to_peer(u32* p, u32 v) { *p = v; }
inline void store_to_peer(void* p, uint4 v) { std::memcpy(p, &v, sizeof v); }
inline u32 acquire_from_peers(const u32* p) { return *p; }
template <class T> T load_from_peers(const T* p) { return *p; }
inline u32 atomicAdd(u32* p, u32 v) { const u32 old = *p; *p += v; return old; }
inline float block_total(float x, u32 = 0) { return x; }
"""

CALLS = r"""
template <class Kernel>
static void run(u32 blocks, Kernel kernel) {
  gridDim.x = blocks;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) kernel();
}
extern "C" void run_embed(u32 blocks, const uint4* table, const i32* ids, float4* streams) {
  run(blocks, [&] { embed_lanes(table, ids, streams); });
}
extern "C" void run_hear(u32 blocks, const Hearing* hearing) {
  run(blocks, [&] { hear(*hearing); });
}
extern "C" void run_sum(u32 blocks, const Peers<uint4>* peers, const Due* due) {
  run(blocks, [&] { sum_lanes(*peers, *due); });
}
extern "C" void run_both(u32 blocks, const Hearing* hearing, const Peers<uint4>* peers,
                         const Due* due, u32 sum_blocks) {
  run(blocks, [&] { hear_and_sum(*hearing, *peers, *due, sum_blocks); });
}
extern "C" void run_meet(const Peers<float4>* peers, const float4* weight, uint2* out) {
  run(1, [&] { meet_at_head(*peers, weight, out); });
}
extern "C" u32 sizes(u32 which) {
  const u32 all[] = {sizeof(Peers<uint4>), sizeof(Hearing), sizeof(Due)};
  return all[which];
}
"""


class Case:
    """Kernels of one rank's lanes, and the definition."""

    def __init__(self, ranks: int, folder: Path) -> None:
        compiler = shutil.which("g++")
        if compiler is None or not sys.platform.startswith("linux"):
            pytest.skip("needs g++ on Linux to compile CUDA sources for the host")
        self.config: ModelConfig = read_config(written(folder, fields_of("scales per lane")))
        self.ranks, self.lanes = ranks, 8 // ranks
        one = lanes_of_ranks(self.config, ranks)
        spec = header(one, Dtype.BF16, ranks)
        (folder / "spec.cuh").write_text(spec.replace("kThreads = 256u", "kThreads = 1u"))
        totals = (CUDA / "tile" / "totals.cuh").read_text()
        meeting = (CUDA / "sync" / "meeting.cuh").read_text()
        kernels = (CUDA / "kernels" / "lane_prefill.cu").read_text()
        mma = (CUDA / "ptx" / "mma.cuh").read_text()
        halves = mma[mma.index("__device__ __forceinline__ float low_half") :]
        halves = halves[: halves.index("__device__ __forceinline__ float exp2_fast")]
        text = halves + totals[totals.index("__device__ __forceinline__ float4 widened") :]
        text = text + meeting + kernels
        text = re.sub(r"^#(include|pragma).*$", "", text, flags=re.MULTILINE)
        text = text.replace('asm volatile("trap;");', "std::abort();")
        (folder / "harness.cc").write_text(STUBS + text + CALLS)
        built = folder / "lanes.so"
        command = [compiler, "-std=c++17", "-O1", "-ffp-contract=off", "-Wall", "-Werror"]
        command += ["-Wno-unknown-pragmas", "-Wno-unused", "-fPIC", "-shared"]
        includes = [f"-I{folder}", f"-I{CUDA}"]
        subprocess.run([*command, *includes, "-o", built, folder / "harness.cc"], check=True)
        self.library = ctypes.CDLL(str(built))
        weights = shard_all(LaneShare(self.config, ranks, 0), random_weights(self.config))
        self.vectors = {k: v for k, v in weights.items() if k.endswith("norm")}
        a = one.layers[0].attention
        pool = PagePool(
            one.num_layers, a.num_kv_heads, a.head_dim, 1, torch.bfloat16, torch.device("cpu")
        )
        self.torch = TorchLanes(TorchElementwise(one, self.vectors, pool))
        self.hidden = self.config.hidden_size

    def streams(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(self.lanes, TOKENS, self.hidden, generator=generator)


@pytest.fixture(scope="module", params=[1, 2, 8])
def case(request, tmp_path_factory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("lanes"))


def address(x: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if x is None else x.data_ptr())


def test_structures_are_as_python_writes_them(case: Case) -> None:
    for place, of_python in enumerate((peers_type(case.ranks), KernelHearing, KernelDue)):
        assert case.library.sizes(place) == ctypes.sizeof(of_python)


def test_every_lane_embeds_the_tokens(case: Case) -> None:
    table = torch.randn(9, case.hidden).bfloat16()
    ids = torch.tensor([3, 8, 0, 3, 1], dtype=torch.int32)
    streams = case.streams(0)
    case.library.run_embed(TOKENS, address(table), address(ids), address(streams))
    assert torch.equal(streams, table[ids.long()].float().expand_as(streams))


@pytest.mark.parametrize("shares_scales", [True, False])
@pytest.mark.parametrize("is_together", [True, False])
@pytest.mark.parametrize("kind", ["start", "scaled", "early", "late", "late, summed here"])
def test_streams_hear(case: Case, kind: str, shares_scales: bool, is_together: bool) -> None:
    own, past = (case.streams(seed).bfloat16() for seed in (1, 2))
    sums = case.streams(3)[0].clone()
    news = {
        "start": News(),
        "scaled": News(own=own, own_scale=8**0.5),
        "early": News(sums=sums),
        "late": News(own=own, sums=sums, past=past),
        "late, summed here": News(own=own, summed=past, past=past),
    }[kind]
    weight = case.vectors["final_norm"]
    weight = weight[0].contiguous() if shares_scales else weight
    streams, out = case.streams(4), torch.zeros_like(own)
    exact, blocks = torch.zeros_like(streams), TOKENS
    given = hearing_of(streams, news, weight, out, exact)
    if is_together:
        given.together = case.lanes
    else:
        assert given.together == 1, "so few tokens"
        blocks *= case.lanes
    case.library.run_hear(blocks, ctypes.byref(given))
    right, wanted = case.streams(4), torch.zeros_like(own)
    wanted_exactly = torch.zeros_like(right)
    case.torch.hear(right, news, weight, wanted, wanted_exactly)
    assert torch.equal(streams, right), "the same additions in the same order"
    torch.testing.assert_close(exact, wanted_exactly, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out, wanted, rtol=2**-7, atol=1e-6)


def peers_of(case: Case, reach: Reach, meetings: list[Tensor]) -> ctypes.Structure:
    pointers = ctypes.c_void_p * case.ranks
    return peers_type(case.ranks)(
        pointers(*(m.data_ptr() for m in meetings)), 0, 0,
        pointers(*(p.data_ptr() for p in reach.parts)),
        pointers(*(r.data_ptr() for r in reach.results)),
    )  # fmt: skip


@pytest.mark.parametrize("how", ["alone", "beside streams"])
@pytest.mark.parametrize("has_parts", [True, False])
def test_sums_go_to_all_ranks_which_are_told(case: Case, how: str, has_parts: bool) -> None:
    parts = [case.streams(10 + r).bfloat16() for r in range(case.ranks)]
    own = range(TOKENS // 3, TOKENS // 3 + 3)
    total, *others = torch.cat(parts).float()
    for lane in others:
        total = total + lane
    results = [torch.zeros(TOKENS, case.hidden) for _ in range(case.ranks)]
    meetings = [torch.zeros(WORDS, dtype=torch.int32) for _ in range(case.ranks)]
    peers = peers_of(case, Reach(parts, results), meetings)
    due = KernelDue(has_parts, own.start, len(own), TOKENS)
    if how == "alone":
        case.library.run_sum(len(own), ctypes.byref(peers), ctypes.byref(due))
    else:
        streams, norms = case.streams(4), torch.zeros_like(parts[0])
        news, weight = News(own=parts[0], own_scale=2.0), case.vectors["final_norm"]
        hearing = hearing_of(streams, news, weight, norms, None)
        blocks = 2 + TOKENS * case.lanes
        case.library.run_both(
            blocks, ctypes.byref(hearing), ctypes.byref(peers), ctypes.byref(due), 2
        )
        assert torch.equal(streams, case.streams(4) + parts[0].float() * 2.0)
    right = torch.zeros_like(total)
    if has_parts:
        right[own.start : own.stop] = total[own.start : own.stop]
    assert all(torch.equal(seen, right) for seen in results)
    told = [m[:4].tolist() for m in meetings]
    assert told == [[int(r == 0), 0, 0, 1] for r in range(case.ranks)]


@pytest.mark.parametrize("is_sum", [True, False])
def test_lanes_meet_at_the_head(case: Case, is_sum: bool) -> None:
    parts = [case.streams(20 + r)[:, :1].contiguous() for r in range(case.ranks)]
    weight = case.vectors["final_norm"][0].contiguous() if is_sum else None
    out, wanted = (torch.zeros(1, case.hidden, dtype=torch.bfloat16) for _ in range(2))
    reach = Reach(parts, [])
    peers = peers_of(case, reach, [torch.zeros(WORDS, dtype=torch.int32)] * case.ranks)
    case.library.run_meet(ctypes.byref(peers), address(weight), address(out))
    case.torch.meet_at_head(reach, weight, wanted)
    torch.testing.assert_close(out, wanted, rtol=2**-7, atol=1e-6)
