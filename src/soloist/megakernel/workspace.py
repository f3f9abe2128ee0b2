"""What the buffers that blocks exchange results through hold before a launch."""

import math

import torch
from torch import Tensor

from soloist.megakernel.limits import EXCHANGE_COPIES, MAX_QUERIES
from soloist.megakernel.plan import Plan


def fresh_workspace(plan: Plan, queries: int) -> Tensor:
    """Sentinels everywhere, but columns of padding are zeros for good.

    Args:
        plan: of the kernel.
        queries: that a build has room for.
    """
    exchanges = plan.exchanges
    fresh = torch.full((exchanges.num_bytes,), 0xFF, dtype=torch.uint8)
    for name, activations in exchanges.operands.items():
        buffer = exchanges.workspace[name]
        values = fresh[buffer.offset : buffer.offset + math.prod(buffer.shape)].view(torch.int16)
        copies = values.view(EXCHANGE_COPIES, -1, 32)
        chunks = copies.shape[1] // MAX_QUERIES  # [chunk][query][32], for fewer queries in front
        columns = torch.arange(chunks * 32).view(chunks, 32) % activations.slot_columns
        is_padding = (columns >= activations.columns).repeat_interleave(queries, 0)
        copies[:, : chunks * queries].masked_fill_(is_padding, 0)
    lanes = fresh[: exchanges.lane_bytes * plan.shape.lanes_here].view(plan.shape.lanes_here, -1)
    lanes[1:] = lanes[0]
    best = exchanges.best
    fresh[best.offset : best.offset + best.num_bytes] = 0
    return fresh
