"""Kernels loaded and launched."""

import ctypes
import threading
from pathlib import Path

import pytest
import torch

from soloist.errors import LaunchError
from soloist.jit.compiler import Cubin, compile_source
from soloist.jit.module import Module
from unit.jit.small import one_file

pytestmark = pytest.mark.gpu

COUNT = 1000
# scale: simple arguments of several types. meet: every block waits for every other one.
# paired: blocks of a cluster read their rank.
KERNELS = """\
extern "C" __global__ void scale(float* values, int count, float factor, long long offset) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) values[i] = values[i] * factor + (float)offset;
}
extern "C" __global__ void meet(unsigned* arrived, unsigned* seen) {
  extern __shared__ unsigned room[];
  room[threadIdx.x] = threadIdx.x;
  if (threadIdx.x == 0) {
    atomicAdd(arrived, 1u);
    while (*(volatile unsigned*)arrived < gridDim.x) {}
    seen[blockIdx.x] = 1 + room[0];
  }
}
extern "C" __global__ void paired(unsigned* ranks) {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (threadIdx.x == 0) ranks[blockIdx.x] = rank;
}
"""


@pytest.fixture
def cubin(tmp_path: Path) -> Cubin:
    major, minor = torch.cuda.get_device_capability()
    if major < 9:
        pytest.skip("clusters need sm_90")
    return compile_source(one_file(tmp_path, KERNELS), f"sm_{major}{minor}")


def pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def num_sms() -> int:
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def test_arguments_of_each_type_arrive(cubin: Cubin) -> None:
    values = torch.arange(COUNT, dtype=torch.float32, device="cuda")
    expected = values * 0.5 + 7
    args = [pointer(values), ctypes.c_int32(COUNT), ctypes.c_float(0.5), ctypes.c_int64(7)]
    Module(cubin, "scale").launch(8, 128, 0, args, stream())
    assert torch.equal(values, expected)


def test_a_launch_from_another_thread_finds_its_context(cubin: Cubin) -> None:
    values = torch.ones(COUNT, device="cuda")
    module, where = Module(cubin, "scale"), stream()
    args = [pointer(values), ctypes.c_int32(COUNT), ctypes.c_float(2), ctypes.c_int64(0)]
    thread = threading.Thread(target=module.launch, args=(8, 128, 0, args, where))
    thread.start()
    thread.join()
    assert torch.equal(values, torch.full_like(values, 2))


def test_arguments_that_do_not_fit_are_our_mistake(cubin: Cubin) -> None:
    torch.ones(1, device="cuda")
    module = Module(cubin, "scale")
    with pytest.raises(AssertionError, match="takes parameters"):
        module.launch(1, 32, 0, [ctypes.c_void_p(0), ctypes.c_int32(0)], stream())


def test_all_blocks_meet_with_most_of_the_shared_memory(cubin: Cubin) -> None:
    blocks, dynamic = num_sms(), 96 * 1024
    arrived = torch.zeros(1, dtype=torch.int32, device="cuda")
    seen = torch.zeros(blocks, dtype=torch.int32, device="cuda")
    module = Module(cubin, "meet")
    assert module.num_sms == blocks
    assert module.max_active_blocks(128, dynamic) >= 1
    module.launch(blocks, 128, dynamic, [pointer(arrived), pointer(seen)], stream())
    assert int(seen.sum()) == blocks


def test_more_blocks_than_fit_are_refused(cubin: Cubin) -> None:
    arrived = torch.zeros(1, dtype=torch.int32, device="cuda")
    module = Module(cubin, "meet")
    most = module.max_active_blocks(128, 96 * 1024) * module.num_sms
    args = [pointer(arrived), pointer(arrived)]
    with pytest.raises(LaunchError, match=rf"{most + 1} blocks .* {most} fit"):
        module.launch(most + 1, 128, 96 * 1024, args, stream())


@pytest.mark.parametrize("cooperative", [True, False])
def test_blocks_form_clusters(cubin: Cubin, cooperative: bool) -> None:
    ranks = torch.full((8,), -1, dtype=torch.int32, device="cuda")
    module = Module(cubin, "paired")
    module.launch(8, 32, 0, [pointer(ranks)], stream(), cooperative=cooperative, cluster=4)
    assert ranks.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


def test_errors_of_the_driver_have_its_name_and_words(cubin: Cubin) -> None:
    torch.ones(1, device="cuda")
    with pytest.raises(LaunchError, match="CUDA_ERROR_NOT_FOUND: "):
        Module(cubin, "absent")
    with pytest.raises(LaunchError, match="CUDA_ERROR_INVALID_VALUE: "):
        Module(cubin, "meet").max_active_blocks(128, 10**9)
