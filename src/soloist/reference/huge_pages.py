"""Memory in huge pages, for matrices that a CPU reads from one end to the other for every token.

With pages of 4 KB a core looks up a page for each 4 KB that it reads, which takes time
(docs/experiments/cpu.md). Source: Linux, Documentation/admin-guide/mm/transhuge.rst.
"""

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

# What fits no huge page of x86-64 is not worth a mapping of its own.
_LEAST_BYTES = 2 * 2**20


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor in the CPU's memory with any content, in huge pages where the system has them."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _LEAST_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(*shape, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)
