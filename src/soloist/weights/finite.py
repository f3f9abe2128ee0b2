"""Whether a tensor holds numbers only."""

import math

import torch
from torch import Tensor

from soloist.errors import NotFinite


def require_finite(name: str, values: Tensor) -> None:
    """Refuse a tensor with NaN or infinite values.

    Raises:
        NotFinite: saying how many it has.
    """
    # A single pass finds every NaN and infinity; the exact count is for the message. On a CPU a sum
    # would make a copy in fp32 first: of 16 bits it takes twenty times as long, and ten thousands
    # of copies leave holes in the heap.
    found = torch.aminmax(values) if values.is_cpu else (values.sum(dtype=torch.float32),)
    if all(math.isfinite(value.item()) for value in found):
        return
    bad = int((~torch.isfinite(values)).sum())
    if bad:
        raise NotFinite(name, bad, values.numel())
