"""A kernel that holds two models and runs a launch of each in turn; for tests only."""

import shutil
from dataclasses import replace
from pathlib import Path

from soloist.jit.source import CUDA_ROOT, Source
from soloist.megakernel.header import Build, header_of
from soloist.megakernel.plan import Plan

ENTRY = "decode_two"

# Each model has barriers of its own: those of the first launch are in use until all warps are here.
KERNEL = """
#include "ops/round.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    decode_two(const __grid_constant__ Params first, const __grid_constant__ Params second) {
  __shared__ __align__(8) u64 barriers[kNumBarriers<ModelA>];
  __shared__ __align__(8) u64 other_barriers[kNumBarriers<ModelB>];
  __shared__ Where progress, other_progress;
  run_launch<ModelA>(AnyWarp{}, first, barriers, progress, [&](auto role) {
    __syncwarp();  // lanes without a role come first
    __syncthreads();
    run_launch<ModelB>(role, second, other_barriers, other_progress, [](auto) {});
  });
}
"""


def with_one_grid(first: Plan, second: Plan) -> tuple[Plan, Plan]:
    """Both plans with as many blocks as the smaller one has, on the first one's GPU."""
    blocks = min(first.blocks, second.blocks)
    return replace(first, blocks=blocks), replace(second, blocks=blocks, gpu=first.gpu)


def source(first: Plan, second: Plan, build: Build, folder: Path) -> Source:
    """The kernel among a copy of the CUDA sources, in `folder`."""
    root = folder / "cuda"
    shutil.copytree(CUDA_ROOT, root)
    (root / "kernels" / "two.cu").write_text(KERNEL, encoding="utf-8")
    return Source("kernels/two.cu", header_of({"ModelA": first, "ModelB": second}, build), root)


def shared_bytes(first: Plan, second: Plan, build: Build) -> int:
    """Dynamic shared memory of a block: what the model that takes more of it needs."""
    plans = (p.with_room_for(build.queries, samples=build.samples) for p in (first, second))
    return max(plan.shared.num_bytes for plan in plans)
