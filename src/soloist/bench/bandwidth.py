"""Measured read bandwidth: what 'bytes over bandwidth' is held against."""

import time
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

# Far larger than any cache, small enough for a small machine.
_HOST_BYTES = 512 * 2**20
_GPU_BYTES = 4 * 2**30
_REPEATS = 9


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """How fast a device reads, and how that was found out."""

    gb_per_s: float
    method: str


def read_bandwidth(device: torch.device) -> Bandwidth:
    """Median rate at which `device` reads a large buffer of random numbers."""
    if device.type == "cuda":
        return _read_by_gpu(device)
    buffer = torch.rand(_HOST_BYTES // 4, device=device)
    rates = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        buffer.sum()
        rates.append(_HOST_BYTES / (time.perf_counter() - start) / 1e9)
    return Bandwidth(median(rates), _method(buffer))


def _read_by_gpu(device: torch.device) -> Bandwidth:
    """By the GPU's own clock; random bits, since memory may read equal ones faster."""
    low, high = -(2**31), 2**31 - 1
    with torch.cuda.device(device):
        buffer = torch.empty(_GPU_BYTES // 4, dtype=torch.int32, device=device).random_(low, high)
        rates = []
        for _ in range(_REPEATS + 1):
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            stop = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            start.record()
            buffer.sum()
            stop.record()
            stop.synchronize()
            rates.append(_GPU_BYTES / start.elapsed_time(stop) / 1e6)
        method = _method(buffer)
        del buffer
        torch.cuda.empty_cache()
    return Bandwidth(median(rates[1:]), method)


def _method(buffer: Tensor) -> str:
    dtype = str(buffer.dtype).removeprefix("torch.")
    return f"torch sum over {buffer.numel() * buffer.element_size() / 1e9:.1f} GB of random {dtype}"
