"""Cut a rank's or a lane's share out of a model's tensors. Torch, any device."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from soloist.model.config import Mlp, ModelConfig
from soloist.model.quantized import COLUMNS
from soloist.parallel.lanes import LaneShare
from soloist.parallel.share import Share, padded, share_of
from soloist.weights.lanes import shard_lanes
from soloist.weights.rope_order import head_in_halves, rope_in_halves


def shard(share: Share | LaneShare, name: str, values: Tensor) -> Tensor:
    """The part of a tensor, contiguous; the tensor itself where every rank or lane has all of it.

    Rows that rope rotates are brought into the order of prefill and the kernel (`rope_order.py`).

    Args:
        share: whose.
        name: of the `TensorSpec`.
        values: the whole tensor in the checkpoint's order. Of a quantised matrix a part, with
            groups that every rank's columns, and every head's, are whole numbers of.
    """
    layer, short = _place(name)
    if isinstance(share, LaneShare):
        return shard_lanes(share, short, values)
    if name.endswith(COLUMNS):
        return values
    values = _in_halves(share.whole, layer, short, values)
    return values if share.ranks == 1 else _cut(share, layer, short, values)


def _cut(share: Share, layer: int, short: str, values: Tensor) -> Tensor:
    """The part of a tensor that one of several ranks has."""
    sizes, attention = share.sizes(layer), share.whole.layers[layer].attention
    if short in ("qkv", "qkv_bias"):
        counts = (attention.num_query_heads, attention.num_kv_heads, attention.num_kv_heads)
        q, k, v = values.unflatten(0, (-1, attention.head_dim)).split(counts)
        own = ((q, share.query_heads), (k, share.kv_heads), (v, share.kv_heads))
        return torch.cat([_taken(x, heads) for x, heads in own]).flatten(0, 1)
    if short == "attention_output":
        columns = _columns_of(share.query_heads, attention.head_dim)
        return _own_columns(values, columns, attention.num_query_heads * attention.head_dim)
    if short in ("gate_up", "gate_up_bias", "down"):
        mlps = share.whole.layers[layer].each_mlp, sizes.each_mlp
        return _own_neurons(short, values, *mlps, share.neurons(layer))
    if short in ("shared.gate_up", "shared.down"):
        shared, share_of_it = share.whole.layers[layer].common_mlp, sizes.common_mlp
        assert shared is not None, "an MLP beside experts"
        assert share_of_it is not None, "and a share of it"
        return _own_neurons(short, values, shared, share_of_it, share.shared_neurons(layer))
    if short == "head":
        rows = share_of(share.whole, share.ranks).vocab_size
        return _taken(values, padded(share.vocabulary, rows))
    return values


def _own_neurons(short: str, values: Tensor, whole: Mlp, own: Mlp, neurons: range) -> Tensor:
    """Some neurons of an MLP's gate and up, or of its `down`, and zeros up to a share's size."""
    places = padded(neurons, own.intermediate_size)
    if short.endswith("down"):
        return _own_columns(values, places, whole.intermediate_size)
    return torch.cat([_taken(half, places) for half in values.chunk(2)])


def _in_halves(model: ModelConfig, layer: int, short: str, values: Tensor) -> Tensor:
    rope, attention = model.rope, model.layers[layer].attention
    if rope.is_in_halves(attention.head_dim):
        return values
    if short in ("qkv", "qkv_bias"):
        return rope_in_halves(rope, attention, values)
    return head_in_halves(rope, values) if short in ("q_norm", "k_norm") else values


def _place(name: str) -> tuple[int, str]:
    """(layer, name in it) of a tensor; of one outside the layers 0 and its whole name.

    Tensors of experts have the names that those of an MLP have, and parts of a matrix its name.
    """
    if not name.startswith("layers."):
        return 0, name.split(".", maxsplit=1)[0]
    _, layer, short, *more = name.split(".")
    if short == "shared":
        return int(layer), f"{short}.{more[0]}"
    return int(layer), more[1] if short == "experts" else short


def _columns_of(heads: Sequence[int | None], head_dim: int) -> list[int | None]:
    """All columns of some heads, one after the other."""
    return [
        None if head is None else head * head_dim + i for head in heads for i in range(head_dim)
    ]


def _own_columns(values: Tensor, columns: Sequence[int | None], count: int) -> Tensor:
    """Some of so many columns, or of what they share by groups; what all of them share as it is."""
    if values.shape[1] == 1:
        return values
    group = count // values.shape[1]
    groups = [None if first is None else first // group for first in columns[::group]]
    return _taken(values, groups, 1)


def shard_all(share: Share | LaneShare, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A rank's parts of all or some of a model's tensors.

    On several ranks, and of lanes, there are both the whole embedding and a head, also where the
    model ties them.
    """
    parts = {name: _shard_bytes(share, name, values) for name, values in weights.items()}
    is_parted = share.ranks > 1 or len(share.lanes) > 0
    if is_parted and share.whole.tied_head and "embedding" in weights:
        parts["head"] = shard(share, "head", weights["embedding"])
    return parts


def _shard_bytes(share: Share | LaneShare, name: str, values: Tensor) -> Tensor:
    """`shard`, of FP8 as bytes, which every torch can join and fill."""
    if values.dtype is not torch.float8_e4m3fn:
        return shard(share, name, values)
    return shard(share, name, values.view(torch.uint8)).view(values.dtype)


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
