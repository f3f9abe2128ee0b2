"""Cut a rank's lanes out of a model's tensors. Torch, any device."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from soloist.model.config import Attention
from soloist.parallel.lanes import LaneShare, lane_of, rules_of


def shard_lanes(share: LaneShare, name: str, values: Tensor) -> Tensor:
    """[lanes of the rank, ...]: a slice, since lanes come first; of a head of all, their rows.

    Args:
        share: whose.
        name: of the tensor, without 'layers.N.'.
        values: the whole tensor in the checkpoint's order.
    """
    rules, sizes = rules_of(share.whole), lane_of(share.whole)
    own, rows = slice(share.lanes.start, share.lanes.stop), share.vocabulary
    if name == "qkv":
        return rope_in_halves(sizes.layers[0].attention, values[own])
    if name == "head" and rules.head == "replicate":
        missing = sizes.vocab_size * len(share.lanes) - len(rows)
        padded = pad(values[rows.start : rows.stop], (0, 0, 0, missing))
        return padded.view(len(share.lanes), sizes.vocab_size, -1)
    if name == "embedding" or (name.endswith("norm") and rules.shared_norm_scales):
        return values
    return values[own]


def rope_in_halves(attention: Attention, qkv: Tensor) -> Tensor:
    """Rows [..., (Q + 2 K) · D, H] in which rope turns i and i + D / 2, where it turned 2i, 2i + 1.

    Products of queries and keys do not notice that both have their values in another order.
    """
    heads = qkv.unflatten(-2, (-1, attention.head_dim))  # [..., Q + 2 K, D, H]
    rotating, values = heads.split(
        [attention.num_query_heads + attention.num_kv_heads, attention.num_kv_heads], dim=-3
    )
    halves = torch.cat([rotating[..., ::2, :], rotating[..., 1::2, :]], dim=-2)
    return torch.cat([halves, values], dim=-3).flatten(-3, -2)
