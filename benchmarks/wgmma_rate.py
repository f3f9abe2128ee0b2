"""Time wgmma alone, with its first operand in shared memory and in registers.

    python benchmarks/wgmma_rate.py

One Hopper GPU. Groups of four warps multiply 64 rows each by the same 256 tokens, 64 columns at a
time, and nothing else happens: so this is the most that `packed_product.cu` could reach, whose rows
are in registers, beside what a library's products have.

`--compile` builds the kernels into the cache and needs no GPU.
"""

import argparse
import ctypes
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from soloist.jit.cache import load_or_build
from soloist.jit.module import Module
from soloist.jit.source import CUDA_ROOT, Source
from soloist.model.dtype import Dtype
from soloist.prefill.packed_form import ARCH, multiply_rows
from soloist.settings import read_settings

WAYS = ("shared memory", "registers", "registers, loaded each time")
_TOKENS, _COLUMNS, _CHUNKS, _LAUNCHES = 256, 64, 4096, 8
_TOKEN_BYTES, _ROW_BYTES = _TOKENS * _COLUMNS * 2, 64 * _COLUMNS * 2
_KERNEL = r"""
#include "ptx/bulk.cuh"
#include "ptx/memory.cuh"
#include "ptx/wgmma.cuh"

// random: as many bytes as shared memory has. A chunk is 64 columns.
extern "C" __global__ void __launch_bounds__(kGroups * 128, 1)
    rate(const uint4* random, float* out, u32 chunks) {
  extern __shared__ __align__(1024) u8 shared[];
  const u32 at = shared_address(shared), group = threadIdx.x / 128;
  for (u32 i = threadIdx.x; i < kSharedBytes / 16; i += kGroups * 128)
    reinterpret_cast<uint4*>(shared)[i] = random[i];
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  float s[kWgmmaSums];
  uint4 a[2][4];
  for (u32 i = 0; i < 8; ++i) a[i / 4][i % 4] = random[threadIdx.x * 8 + i];
  const u32 of_group = at + kTokenBytes + group * kRowBytes;
  const u32 mine = of_group + threadIdx.x % 128 * 16;
  const u64 tokens = wgmma_operand(at), rows = wgmma_operand(of_group);
  const auto take = [&](u32 chunk, uint4 (&own)[4]) {
    if constexpr (kWay == 2) {
#pragma unroll
      for (u32 k = 0; k < 4; ++k) own[k] = load_shared(mine + k * 2048);
    }
#pragma unroll
    for (u32 k = 0; k < 4; ++k) finish_operand(own[k]);
    begin_products();
#pragma unroll
    for (u32 k = 0; k < 4; ++k) {
      const u64 b = along(tokens, k * kWgmmaDepth);
      if constexpr (kWay == 0) multiply_group(s, along(rows, k * kWgmmaDepth), b, chunk | k);
      else multiply_rows(s, own[k], b, chunk | k);
    }
    commit_products();
    wait_for_products<1>();
  };
#pragma unroll 1
  for (u32 chunk = 0; chunk < chunks; chunk += 2) {
    take(chunk, a[0]);
    take(chunk + 1, a[1]);
  }
  wait_for_products<0>();
  take_sums(s);
  float sum = 0.0f;
#pragma unroll
  for (u32 i = 0; i < kWgmmaSums; ++i) sum += s[i];
  out[blockIdx.x * kGroups * 128 + threadIdx.x] = sum;
}
"""


def main() -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--compile", action="store_true", help="kernels into the cache, no GPU")
    asked = parser.parse_args()
    if not asked.compile:
        torch.empty(1, device="cuda")  # `Module` wants a context
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "cuda"
        shutil.copytree(CUDA_ROOT, root)
        (root / "kernels" / "rate.cu").write_text(_KERNEL, encoding="utf-8")
        for groups in (1, 2):
            for way, name in enumerate(WAYS):
                cubin = load_or_build(_source(root, groups, way), ARCH, read_settings().cache)
                if not asked.compile:
                    speed = _speed(Module(cubin, "rate"), groups)
                    print(f"{groups} groups, rows in {name:28} {speed:6.0f} TFLOP/s")
    if not asked.compile:
        print(f"library, 8,192 x 8,192 x 8,192 {_library():20.0f} TFLOP/s")
    return 0


def _shared_bytes(groups: int) -> int:
    return _TOKEN_BYTES + groups * _ROW_BYTES


def _source(root: Path, groups: int, way: int) -> Source:
    numbers = {
        "kGroups": groups,
        "kWay": way,
        "kTokenBytes": _TOKEN_BYTES,
        "kRowBytes": _ROW_BYTES,
        "kSharedBytes": _shared_bytes(groups),
    }
    lines = [
        "#pragma once",
        '#include "ptx/types.cuh"',
        "constexpr bool kBf16 = true;",
        "constexpr unsigned long long kAwaitNs = 1000000000ull;",
        *(f"constexpr unsigned {name} = {n}u;" for name, n in numbers.items()),
        multiply_rows(_TOKENS, Dtype.BF16),
    ]
    return Source("kernels/rate.cu", "\n".join(lines) + "\n", root)


def _speed(module: Module, groups: int) -> float:
    """TFLOP/s of the whole GPU."""
    device, shared = torch.device("cuda", 0), _shared_bytes(groups)
    random = torch.randn(shared // 2, device=device).bfloat16()
    out = torch.empty(module.num_sms * groups * 128, device=device)
    module.make_ready(shared)
    args = (
        ctypes.c_void_p(random.data_ptr()), ctypes.c_void_p(out.data_ptr()),
        ctypes.c_uint32(_CHUNKS),
    )  # fmt: skip

    def launch() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        module.launch(module.num_sms, groups * 128, shared, args, stream, cooperative=False)

    flop = 2 * 64 * groups * _TOKENS * _COLUMNS * _CHUNKS * module.num_sms
    return flop / _seconds(launch) / 1e12


def _library() -> float:
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    return 2 * 8192**3 / _seconds(lambda: torch.mm(a, b, out=out)) / 1e12


def _seconds(launch: Callable[[], object]) -> float:
    launch()
    times = []
    for _ in range(_LAUNCHES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        launch()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return median(times)


if __name__ == "__main__":
    raise SystemExit(main())
