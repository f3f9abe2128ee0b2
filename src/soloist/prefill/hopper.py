"""What prefill's kernels for Hopper alone have in common."""

from pathlib import Path

import torch
from torch import Tensor

from soloist.jit.cache import load_or_build
from soloist.jit.compiler import require_clean
from soloist.jit.module import Module
from soloist.jit.source import Source
from soloist.megakernel.gpu import TYPICAL

ARCH = "sm_90a"


def load(source: Source, entry: str, shared_bytes: int, cache_root: Path | None) -> Module:
    """The entry function, compiled and loaded into the current context.

    Args:
        source: what to compile.
        entry: its name.
        shared_bytes: dynamic shared memory of a block.
        cache_root: where compiled kernels are kept; None keeps none on disk.

    Raises:
        DeviceError: it cannot be compiled or loaded.
    """
    cubin = load_or_build(source, ARCH, cache_root)
    require_clean(cubin, entry, shared_bytes, TYPICAL[ARCH].shared_bytes)
    module = Module(cubin, entry)
    module.make_ready(shared_bytes)
    return module


def address(values: Tensor) -> int:
    """Of 16-bit values without gaps, as the copy engine takes them."""
    assert values.is_contiguous(), "rows lie one after the other"
    assert values.element_size() == torch.bfloat16.itemsize, "16-bit values"
    return values.data_ptr()
