"""Attention of a prompt's first chunk over itself, by a kernel of ours on Hopper."""

import ctypes
import math
from pathlib import Path

from torch import Tensor

from soloist.jit.source import Source
from soloist.jit.tensor_map import TensorMap, heads_map
from soloist.model.dtype import Dtype
from soloist.prefill import hopper
from soloist.prefill.header import AWAIT_NS

KERNEL, ENTRY = "kernels/attend_first.cu", "attend_first"
# Queries of a block and keys at once; rows of results that a warp writes.
_TILE, _RESULT_ROWS = 128, 16
_THREADS = 384
# By head dimension: as many tiles of keys or values ahead as shared memory has room for.
_SLOTS = {64: 8, 96: 7, 128: 5}
_VALUE_BYTES = 2


def has_first_attention(arch: str, head_dim: int) -> bool:
    """Whether there is a kernel for this architecture and head dimension."""
    return arch == hopper.ARCH and head_dim in _SLOTS


def shared_bytes(head_dim: int) -> int:
    """Of a block: a tile of queries, the slots, and a tile of results."""
    return (2 + _SLOTS[head_dim]) * _TILE * head_dim * _VALUE_BYTES


def first_attention_source(head_dim: int, dtype: Dtype) -> Source:
    """What is compiled, which knows nothing else of a model."""
    counts = {
        "kHeadDim": head_dim,
        "kAttendTile": _TILE,
        "kAttendThreads": _THREADS,
        "kAttendSlots": _SLOTS[head_dim],
        "kAttendShared": shared_bytes(head_dim),
    }
    spec = "\n".join(
        [
            "// Generated; see prefill/first_attention.py.",
            "#pragma once",
            f"constexpr bool kBf16 = {str(dtype is Dtype.BF16).lower()};",
            *(f"constexpr unsigned {name} = {n}u;" for name, n in counts.items()),
            f"constexpr unsigned long long kAwaitNs = {AWAIT_NS}ull;",
            "",
        ]
    )
    return Source(KERNEL, spec)


class FirstAttention:
    """The kernel, compiled and loaded.

    Args:
        head_dim: as `has_first_attention` wants it.
        source: of `first_attention_source`.
        cache_root: where compiled kernels are kept; None keeps none on disk.

    Raises:
        DeviceError: it cannot be compiled or loaded.
    """

    def __init__(self, head_dim: int, source: Source, cache_root: Path | None) -> None:
        self._shared_bytes = shared_bytes(head_dim)
        self._module = hopper.load(source, ENTRY, self._shared_bytes, cache_root)

    def launch(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        out: Tensor,
        window: int | None,
        stream: int,
    ) -> None:
        """`out` = softmax(q kᵀ / √D) v, each query over the keys up to its own.

        A row's bits depend neither on T nor on what lies in the rows behind it, unless that is no
        number.

        Args:
            queries: [T, Q, D].
            keys: [T, K, D]; query head q reads KV head q // (Q / K).
            values: [T, K, D].
            out: [T, Q, D].
            window: how many of the latest keys a query sees, itself included; None means all.
            stream: handle.
        """
        tokens, query_heads, head_dim = queries.shape
        assert keys.shape == values.shape == (tokens, keys.shape[1], head_dim), "of one chunk"
        assert query_heads % keys.shape[1] == 0, "each KV head serves as many queries"
        items = -(-tokens // _TILE) * query_heads
        args = (
            _map(queries, _TILE), _map(keys, _TILE), _map(values, _TILE), _map(out, _RESULT_ROWS),
            ctypes.c_uint32(tokens), ctypes.c_uint32(window or 0), ctypes.c_uint32(query_heads),
            ctypes.c_uint32(query_heads // keys.shape[1]),
            ctypes.c_float(head_dim**-0.5 * math.log2(math.e)),
        )  # fmt: skip
        self._module.launch(
            min(items, self._module.num_sms), _THREADS, self._shared_bytes, args, stream,
            cooperative=False,
        )  # fmt: skip


def _map(heads: Tensor, box_rows: int) -> TensorMap:
    return heads_map(hopper.address(heads), *heads.shape, box_rows)
