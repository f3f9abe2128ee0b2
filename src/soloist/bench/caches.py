"""Caches without anything of the run before: what a measurement should find."""

import gc

import torch

# Larger than the caches of any CPU core in sight of this process.
_HOST_BYTES = 256 * 2**20


class Flush:
    """Overwrites twice as much memory as the last cache of a device holds.

    Args:
        device: whose caches; of a GPU, its L2.

    Attributes:
        device: the same.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        num_bytes = _HOST_BYTES
        if device.type == "cuda":
            num_bytes = 2 * torch.cuda.get_device_properties(device).L2_cache_size
        self._buffer = torch.zeros(num_bytes // 4, dtype=torch.int32, device=device)

    def __call__(self) -> None:
        """Overwrite it now, and wait for that."""
        self._buffer.add_(1)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def free(device: torch.device) -> None:
    """Memory of a model that nothing refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def gpu_uuid(device: torch.device) -> str | None:
    """What NVML calls a GPU; None for a CPU."""
    if device.type != "cuda":
        return None
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
