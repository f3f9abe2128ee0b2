"""Cut a rank's share out of a model's tensors. Torch, any device."""

from collections.abc import Mapping, Sequence

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
        heads = values.unflatten(1, (-1, attention.head_dim))
        return _taken(heads, share.query_heads, 1).flatten(1)
    if short in ("gate_up", "gate_up_bias"):
        places = padded(share.neurons, neurons)
        return torch.cat([_taken(half, places) for half in values.chunk(2)])
    if short == "down":
        return _taken(values, padded(share.neurons, neurons), 1)
    if short == "head":
        return _taken(values, padded(share.vocabulary, sizes.vocab_size))
    return values


def shard_all(share: Share, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A rank's parts of all or some of a model's tensors.

    On several ranks there are both the whole embedding and a head, also where the model ties them.
    """
    parts = {name: shard(share, name, values) for name, values in weights.items()}
    if share.ranks > 1 and share.whole.tied_head and "embedding" in weights:
        parts["head"] = shard(share, "head", weights["embedding"])
    return parts


def _taken(values: Tensor, places: Sequence[int | None], dim: int = 0) -> Tensor:
    """`values` at these places of a dimension, zeros where there is none; contiguous."""
    shape = list(values.shape)
    shape[dim] = len(places)
    taken = values.new_zeros(shape)
    at = 0
    while at < len(places):
        count = _run_length(places[at:])
        first = places[at]
        if first is not None:
            taken.narrow(dim, at, count).copy_(values.narrow(dim, first, count))
        at += count
    return taken


def _run_length(places: Sequence[int | None]) -> int:
    """How many places from the first one on follow each other, or are nowhere."""
    first = places[0]
    return next(
        (i for i, p in enumerate(places) if p != (None if first is None else first + i)),
        len(places),
    )
