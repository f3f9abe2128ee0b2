"""Rows of queries and keys in the order in which prefill and the decode kernel rotate. Torch.

There values i and i + D / 2 of a head turn together, and a table has cosine 1 and sine 0 for pairs
that do not. Models may turn neighbours, or a share of a head: their rows are brought into that
order. Products of queries and keys do not notice that both have their values in another one.
"""

import torch
from torch import Tensor

from soloist.model.config import Attention
from soloist.model.rope import Rope


def rope_in_halves(rope: Rope, attention: Attention, qkv: Tensor, dim: int = 0) -> Tensor:
    """Rows of queries, keys and values, (Q + 2 K) · D of them along `dim`, in this order.

    Args:
        rope: what rotates.
        attention: sizes.
        qkv: the matrix or its bias, or any tensor with a value or more for each row.
        dim: which dimension has the rows.
    """
    heads = qkv.unflatten(dim, (-1, attention.head_dim))
    counts = [attention.num_query_heads + attention.num_kv_heads, attention.num_kv_heads]
    rotating, values = torch.split(heads, counts, dim)
    turned = head_in_halves(rope, rotating, dim + 1)
    return torch.cat([turned, values], dim).flatten(dim, dim + 1)


def head_in_halves(rope: Rope, heads: Tensor, dim: int = 0) -> Tensor:
    """The D values of each head along `dim` in this order."""
    order = torch.tensor(rope.order_in_halves(heads.shape[dim]), device=heads.device)
    return heads.index_select(dim, order)
