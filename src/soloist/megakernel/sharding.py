"""Cut a rank's share out of a model's tensors. Torch, any device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from soloist.megakernel.share import Share, padded, share_of


def shard(share: Share, name: str, values: Tensor) -> Tensor:
    """The rank's part of a tensor, contiguous; the tensor itself where every rank has all of it.

    Args:
        share: whose.
        name: of the `TensorSpec`.
        values: the whole tensor in the checkpoint's order.
    """
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


def _taken(values: Tensor, places: Sequence[int | None]) -> Tensor:
    """`values` at these places of the first dimension, zeros where there is none."""
    index = torch.tensor([0 if p is None else p for p in places], device=values.device)
    taken = values.index_select(0, index)
    absent = torch.tensor([p is None for p in places], device=values.device)
    taken[absent] = 0
    return taken
