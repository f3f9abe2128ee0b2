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
    # One sum finds every NaN and infinity in a single pass; the exact count is for the message.
    if math.isfinite(values.sum(dtype=torch.float32).item()):
        return
    bad = int((~torch.isfinite(values)).sum())
    if bad:
        raise NotFinite(name, bad, values.numel())
