"""Measured read bandwidth: what 'bytes over bandwidth' is held against."""

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from soloist.jit.cache import load_or_build
from soloist.jit.module import Module
from soloist.jit.source import Source
from soloist.megakernel.gpu import LEAST_CAPABILITY, arch_from_capability
from soloist.settings import read_settings

# Far larger than any cache, small enough for a small machine.
_HOST_BYTES = 512 * 2**20
_GPU_BYTES = 4 * 2**30
_LEAST_GPU_BYTES = 2**30
_REPEATS = 9
# While loading, where a start should be quick.
_BRIEF_HOST_BYTES = 192 * 2**20
# A GPU that was idle, or is not yet warm, reads up to 6 % slower for milliseconds or seconds: see
# docs/experiments/. So it reads for so long, and its fastest readings count.
_GPU_S = 1.0
_BRIEF_GPU_S = 0.3
# In flight on each SM: 96 KB fit every chip from compute capability 8.0 on.
_SLOT_BYTES = 8 * 1024
_SLOTS = 12


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """How fast a device reads, and how that was found out.

    Attributes:
        rates_gb_per_s: of each reading that counts.
        method: what was read, and by what.
    """

    rates_gb_per_s: tuple[float, ...]
    method: str

    @property
    def gb_per_s(self) -> float:
        """The median."""
        return median(self.rates_gb_per_s)


def read_bandwidth(device: torch.device) -> Bandwidth:
    """Rate at which `device` reads a large buffer of random numbers; a GPU at its best."""
    if device.type == "cuda":
        return _read_by_gpu(device, _GPU_BYTES, _GPU_S)
    return _read_by_host(device, _HOST_BYTES)


def brief_bandwidth(device: torch.device, free_bytes: int) -> Bandwidth | None:
    """The same in half a second, with less memory; None where too little is free.

    Of a few readings by a host that has other things to do as well, the best one counts.
    """
    if device.type != "cuda":
        read = _read_by_host(device, _BRIEF_HOST_BYTES)
        return Bandwidth((max(read.rates_gb_per_s),), f"{read.method}, the best of several")
    most_bytes = min(_GPU_BYTES, free_bytes // 4)
    if most_bytes < _LEAST_GPU_BYTES:
        return None
    return _read_by_gpu(device, most_bytes, _BRIEF_GPU_S)


def _read_by_host(device: torch.device, num_bytes: int) -> Bandwidth:
    buffer = torch.rand(num_bytes // 4, device=device)
    rates = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        buffer.sum()
        rates.append(num_bytes / (time.perf_counter() - start) / 1e9)
    return Bandwidth(tuple(rates), _method(buffer))


def _read_by_gpu(device: torch.device, num_bytes: int, seconds: float) -> Bandwidth:
    """By the GPU's own clock, of random bits, since memory may read equal ones faster.

    The fastest of as many readings as `seconds` have room for: nothing makes memory faster than it
    is, and an MBU held against a slow moment would flatter.

    A kernel that copies into shared memory reads faster than any sum in torch; it needs compute
    capability 8.0.
    """
    with torch.cuda.device(device):
        buffer = torch.empty(num_bytes // 4, dtype=torch.int32, device=device).random_()
        num_bytes = buffer.nbytes
        capability = torch.cuda.get_device_capability(device)
        if capability >= LEAST_CAPABILITY:
            read, method = _staging_reader(buffer, capability)
        else:
            floats = buffer.view(torch.float16)
            read, method = floats.sum, _method(floats)
        rates: list[float] = []
        until = time.perf_counter() + seconds
        while len(rates) < _REPEATS or time.perf_counter() < until:
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            stop = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            start.record()
            read()
            stop.record()
            stop.synchronize()
            rates.append(num_bytes / start.elapsed_time(stop) / 1e6)
        del buffer, read
        torch.cuda.empty_cache()
    fastest = tuple(sorted(rates)[-_REPEATS:])
    return Bandwidth(fastest, f"{method}, the {_REPEATS} fastest in {seconds} s")


def _staging_reader(
    buffer: Tensor, capability: tuple[int, int]
) -> tuple[Callable[[], object], str]:
    """A launch of `cuda/kernels/read.cu` over the buffer, and its description."""
    arch = arch_from_capability(*capability)
    cubin = load_or_build(bandwidth_source(), arch, read_settings().cache)
    module = Module(cubin, "read")
    slots = buffer.nbytes // _SLOT_BYTES // module.num_sms
    arguments = (ctypes.c_void_p(buffer.data_ptr()), ctypes.c_uint32(slots))

    def read() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        module.launch(module.num_sms, 32, _SLOTS * _SLOT_BYTES, arguments, stream)

    copies = "bulk copies" if capability >= (9, 0) else "16-byte copies"
    return read, f"{copies} of {buffer.nbytes / 1e9:.1f} GB of random bits to shared memory"


def bandwidth_source() -> Source:
    """The kernel that reads memory, which is the same for all models."""
    counts = {"kSlotBytes": _SLOT_BYTES, "kSlots": _SLOTS}
    lines = (f"constexpr unsigned {name} = {n}u;\n" for name, n in counts.items())
    return Source("kernels/read.cu", "#pragma once\n" + "".join(lines))


def _method(buffer: Tensor) -> str:
    dtype = str(buffer.dtype).removeprefix("torch.")
    return f"torch sum over {buffer.numel() * buffer.element_size() / 1e9:.1f} GB of random {dtype}"
