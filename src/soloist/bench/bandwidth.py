"""Measured read bandwidth: what 'bytes over bandwidth' is held against."""

import time
from statistics import median

import torch

# Far larger than any cache, small enough for a small machine.
_BUFFER_BYTES = 512 * 2**20
_REPEATS = 9


def read_gb_per_s(device: torch.device) -> float:
    """Median rate at which `device` reads a large buffer of random numbers, in GB/s."""
    buffer = torch.rand(_BUFFER_BYTES // 4, device=device)
    rates = []
    for _ in range(_REPEATS):
        start = _now(device)
        buffer.sum()
        rates.append(_BUFFER_BYTES / (_now(device) - start) / 1e9)
    return median(rates)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
