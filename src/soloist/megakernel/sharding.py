"""Cut a rank's or a lane's share out of a model's tensors. Torch, any device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from soloist.megakernel.lanes import LaneShare, lane_of, rules_of
from soloist.megakernel.share import Share, padded, share_of
from soloist.model.config import Attention


def shard(share: Share | LaneShare, name: str, values: Tensor) -> Tensor:
    """The part of a tensor, contiguous; the tensor itself where every rank or lane has all of it.

    Args:
        share: whose.
        name: of the `TensorSpec`.
        values: the whole tensor in the checkpoint's order.
    """
    if isinstance(share, LaneShare):
        return _of_lane(share, name, values)
    if share.ranks == 1:
        return values
    short = name.rpartition(".")[2]
    sizes = share_of(share.whole, share.ranks)
    attention, neurons = share.whole.layers[0].attention, sizes.layers[0].mlp.intermediate_size
    if short in ("qkv", "qkv_bias"):
        counts = (attention.num_query_heads, attention.num_kv_heads, attention.num_kv_heads)
        q, k, v = values.unflatten(0, (-1, attention.head_dim)).split(counts)
        own = ((q, share.query_heads), (k, share.kv_heads), (v, share.kv_heads))
        return torch.cat([_taken(x, heads) for x, heads in own]).flatten(0, 1)
    if short == "attention_output":
        heads = values.unflatten(1, (-1, attention.head_dim)).transpose(0, 1)
        return _taken(heads, share.query_heads).transpose(0, 1).flatten(1).contiguous()
    if short in ("gate_up", "gate_up_bias"):
        places = padded(share.neurons, neurons)
        return torch.cat([_taken(half, places) for half in values.chunk(2)])
    if short == "down":
        return _taken(values.T, padded(share.neurons, neurons)).T.contiguous()
    if short == "head":
        return _taken(values, padded(share.vocabulary, sizes.vocab_size))
    return values


def _of_lane(share: LaneShare, name: str, values: Tensor) -> Tensor:
    """The lane's part: a slice, since lanes come first; of a head that all share, its rows."""
    short, lanes, sizes = name.rpartition(".")[2], rules_of(share.whole), lane_of(share.whole)
    if short == "qkv":
        return rope_in_halves(sizes.layers[0].attention, values[share.lane])
    if short in ("attention_output", "gate_up", "down"):
        return values[share.lane]
    if short == "head" and lanes.head == "replicate":
        return _taken(values, padded(share.vocabulary, sizes.vocab_size))
    if short == "head" or (short.endswith("_norm") and not lanes.shared_norm_scales):
        return values[share.lane]
    return values


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


def _taken(values: Tensor, places: Sequence[int | None]) -> Tensor:
    """`values` at these places of the first dimension, zeros where there is none."""
    index = torch.tensor([0 if p is None else p for p in places], device=values.device)
    taken = values.index_select(0, index)
    absent = torch.tensor([p is None for p in places], device=values.device)
    taken[absent] = 0
    return taken
