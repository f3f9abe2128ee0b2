"""Attention of a chunk's queries over all keys so far, by the library kernel the device has.

Of first chunks on Hopper there is a faster one: `first_attention.py`.
"""

import torch
import torch.nn.functional as F  # noqa: N812 - everybody calls it that
from torch import Tensor

_FLASH_DTYPES = (torch.bfloat16, torch.float16)


def attend_whole(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The same for a chunk that begins its sequence, by cuDNN; no windows.

    Half the time of `attend` at 2,048 tokens, but for each new number of tokens cuDNN thinks for
    tens of milliseconds, and longer the first time: for captured graphs.

    Args:
        queries: [T, Q, D], 16-bit on CUDA.
        keys: [T, K, D].
        values: [T, K, D].

    Returns:
        [T, Q · D].

    Raises:
        RuntimeError: cuDNN is not there, or not able to.
    """
    heads_first = [x.transpose(0, 1)[None] for x in (queries, keys, values)]
    tokens = queries.shape[0]
    mixed: Tensor = torch.ops.aten._cudnn_attention_forward(  # noqa: SLF001
        *heads_first, None, None, None, tokens, tokens, False, 0.0, True, False
    )[0]
    return mixed[0].transpose(0, 1).flatten(1)


def attend(queries: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
    """softmax(q kᵀ / √D) v where the last query sees the last key, and each one before a key less.

    Args:
        queries: [T, Q, D].
        keys: [S, K, D], S at least T; query head q reads KV head q // (Q / K).
        values: [S, K, D].
        window: how many of the latest keys a query sees, itself included; None means all.

    Returns:
        [T, Q · D].
    """
    if window is not None and window >= keys.shape[0]:
        window = None
    if queries.is_cuda and queries.dtype in _FLASH_DTYPES:
        return _flash(queries, keys, values, window)
    q, k, v = (x.transpose(0, 1)[None] for x in (queries, keys, values))
    mask = visible(queries.shape[0], keys.shape[0], window, queries.device)
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return mixed[0].transpose(0, 1).flatten(1)


def attend_packed(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    query_bounds: Tensor,
    key_bounds: Tensor,
    most_keys: int,
    window: int | None,
) -> Tensor:
    """The same for buffers that are longer than what they hold, which the device knows alone.

    With more rows than one a query's sum over its keys is not split, so that its bits do not depend
    on how many queries there are; with one they depend on its position. The operator's public face
    is `torch.nn.attention.varlen`.

    Args:
        queries: [rows, Q, D]; what comes out for those behind the last one is undefined.
        keys: [S, K, D]; nothing is read behind the last one, nor before the block of
            `LEAST_CHUNK_TOKENS` that has the first one which a query sees.
        values: [S, K, D].
        query_bounds: [2] int32, 0 and the number of queries.
        key_bounds: [2] int32, 0 and the number of keys.
        most_keys: of any call that should give the same bits; it decides which windows count.
        window: as of `attend`.

    Returns:
        [rows, Q · D].
    """
    if window is not None and window >= most_keys:
        window = None
    if not (queries.is_cuda and queries.dtype in _FLASH_DTYPES):
        num_queries, num_keys = int(query_bounds[1]), int(key_bounds[1])
        # What no query sees may be anything, and a mask would not stop what is no number.
        first = 0 if window is None else max(0, num_keys - num_queries + 1 - window)
        padded = queries.new_zeros(queries.shape[0], queries.shape[1] * queries.shape[2])
        if num_queries:
            seen = slice(first, num_keys)
            padded[:num_queries] = attend(queries[:num_queries], keys[seen], values[seen], window)
        return padded
    mixed: Tensor = torch.ops.aten._flash_attention_forward(  # noqa: SLF001
        queries, keys, values, query_bounds, key_bounds, queries.shape[0], most_keys,
        0.0, window is None and queries.shape[0] > 1, False,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
    )[0]  # fmt: skip
    return mixed.flatten(1)


def attend_one(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    num_keys: int,
    ends: Tensor,
    window: int | None,
) -> Tensor:
    """The same for one query [1, Q, D] that sees the first `num_keys` keys.

    Args:
        query: of the last of them.
        keys: [S, K, D]; what follows `num_keys` is padding.
        values: [S, K, D].
        num_keys: at least 1.
        ends: int32 (0, 1, 0, `num_keys`), where a captured graph reads it.
        window: as of `attend`.

    Returns:
        [1, Q · D].
    """
    if not (query.is_cuda and query.dtype in _FLASH_DTYPES):
        return attend(query, keys[:num_keys], values[:num_keys], window)
    left = -1 if window is None else window - 1
    mixed: Tensor = torch.ops.aten._flash_attention_forward(  # noqa: SLF001
        query, keys, values, ends[:2], ends[2:], 1, keys.shape[0], 0.0, False, False,
        window_size_left=left, window_size_right=-1 if window is None else 0,
    )[0]  # fmt: skip
    return mixed.flatten(1)


def visible(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """Which key [T, S] each query sees."""
    last = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    keys = torch.arange(num_keys, device=device)[None]
    seen = keys <= last
    return seen if window is None else seen & (keys > last - window)


def _flash(queries: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
    """One launch. The operator behind `scaled_dot_product_attention`, which offers no windows.

    Its causal mask is aligned as ours is; a window counts the keys to the left of a query's own.
    """
    mixed: Tensor = torch.ops.aten._flash_attention_forward(  # noqa: SLF001
        queries[None], keys[None], values[None], None, None, queries.shape[0], keys.shape[0],
        0.0, window is None, False,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
    )[0]  # fmt: skip
    return mixed[0].flatten(1)
