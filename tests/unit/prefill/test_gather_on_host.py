"""The kernel that brings keys and values together, compiled by g++ and run over a real pool.

Threads are threads, and a block's barrier is one; blocks run one after the other.
"""

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import soloist
from soloist.kv.pool import PagePool
from soloist.model.config import Attention, ModelConfig
from soloist.model.dtype import Dtype
from soloist.prefill.elementwise import Chunk, TorchElementwise
from soloist.prefill.header import header
from unit.prefill.models import model, random_weights, vectors

CUDA = Path(soloist.__file__).parent / "cuda"
CPU = torch.device("cpu")
UNTOUCHED = -7.0
SHAPES = {"swizzled": (2, 64), "plain": (3, 24), "wide": (1, 128)}

STUBS = r"""
#include <algorithm>
#include <barrier>
#include <thread>
#include <vector>
#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(...)
#define __restrict__
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
#include "ptx/types.cuh"
#include "spec.cuh"
using std::max;
using std::min;
struct alignas(16) uint4 { u32 x, y, z, w; };
struct Index { u32 x; };
static thread_local Index threadIdx, blockIdx;
static Index gridDim;
static std::barrier<> block_barrier(kThreads);
static void __syncthreads() { block_barrier.arrive_and_wait(); }
"""

HARNESS = r"""
extern "C" void run(const u16* pool, const i32* table, const i32* place, u32 layer, i32 window,
                    void* keys, void* values, u32 blocks) {
  gridDim.x = blocks;
  std::vector<std::thread> threads;
  for (u32 t = 0; t < kThreads; ++t)
    threads.emplace_back([=] {
      threadIdx.x = t;
      for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        gather(pool, table, reinterpret_cast<const Place*>(place), layer, window,
               static_cast<uint4*>(keys), static_cast<uint4*>(values));
    });
  for (std::thread& thread : threads) thread.join();
}
"""


def config_of(name: str, window: int | None = None) -> ModelConfig:
    heads, dim = SHAPES[name]
    return model(*[Attention(heads, heads, dim), Attention(heads, heads, dim, window=window)])


@pytest.fixture(scope="module", params=SHAPES)
def built(request, tmp_path_factory):
    compiler = shutil.which("g++")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs g++ on Linux to compile CUDA sources for the host")
    folder = tmp_path_factory.mktemp("gather")
    text = (CUDA / "kernels" / "prefill.cu").read_text()
    part = ""
    for start, end in (
        ("inline constexpr u64 kPageValues", "\n"),
        ("struct Place {", "};"),
        ('extern "C" __global__ void __launch_bounds__(kThreads, 4)\n    gather(', "\n}\n"),
    ):
        begin = text.index(start)
        part += text[begin : text.index(end, begin) + len(end)] + "\n"
    spec = header(config_of(request.param), Dtype.BF16)
    assert "kThreads = 256u" in spec
    (folder / "spec.cuh").write_text(spec.replace("kThreads = 256u", "kThreads = 8u"))
    (folder / "harness.cc").write_text(STUBS + part + HARNESS)
    command = [compiler, "-std=c++20", "-O1", "-Wall", "-Werror", "-Wno-unknown-pragmas"]
    command += ["-Wno-unused", "-pthread", "-fPIC", "-shared", f"-I{folder}", f"-I{CUDA}"]
    subprocess.run([*command, "-o", folder / "gather.so", folder / "harness.cc"], check=True)
    return request.param, ctypes.CDLL(str(folder / "gather.so")).run


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize(
    ("position", "num_tokens", "window"),
    [(0, 40, None), (0, 64, None), (256, 70, None), (512, 1, None), (700, 100, None),
     (700, 100, 100), (800, 60, 300), (300, 9, 300), (0, 0, None)],
)  # fmt: skip
def test_what_is_gathered(
    built, position: int, num_tokens: int, window: int | None, blocks: int
) -> None:
    name, run = built
    config = config_of(name, window)
    heads, dim = SHAPES[name]
    torch.manual_seed(0)
    pool = PagePool(2, heads, dim, 16, torch.bfloat16, CPU)
    table = torch.randperm(16, dtype=torch.int32)
    stop = position + num_tokens
    keys, values = torch.randn(2, stop, heads, dim).bfloat16()
    pool.write(1, table, 0, keys, values)
    pool.write(0, table, 0, values, keys)
    place = torch.tensor([position, num_tokens], dtype=torch.int32)
    chunk = Chunk(position, num_tokens, place, place, place, table, place, place, place)
    room = stop + 9
    gathered = torch.full((2, room, heads, dim), UNTOUCHED).bfloat16()
    run(
        *(ctypes.c_void_p(x.data_ptr()) for x in (pool.tensor, table, place)),
        ctypes.c_uint32(1), ctypes.c_int32(window or 0),
        *(ctypes.c_void_p(x.data_ptr()) for x in gathered), ctypes.c_uint32(blocks),
    )  # fmt: skip
    first = 0 if window is None else max(0, position + 1 - window) // 256 * 256
    if num_tokens == 0:
        first = 0
    assert torch.equal(gathered[0, first:stop], keys[first:])
    assert torch.equal(gathered[1, first:stop], values[first:])
    assert (gathered[:, :first] == UNTOUCHED).all()
    assert (gathered[:, stop:] == UNTOUCHED).all()
    defined = torch.full((2, room, heads, dim), UNTOUCHED).bfloat16()
    weights = vectors(random_weights(config))
    TorchElementwise(config, weights, pool).gather(1, chunk, *defined)
    assert torch.equal(defined, gathered), "the kernel does what its definition does"
