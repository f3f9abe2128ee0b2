"""What a pass has in memory: intermediate results of its rows, and the bytes that they take."""

from enum import Enum, auto
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from soloist.kv.layout import PAGE_POSITIONS
from soloist.kv.pool import PagePool, coding_bytes
from soloist.megakernel.plan import Plan
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.prefill.batched_experts import batched_bytes
from soloist.prefill.elementwise import DTYPES, widest
from soloist.prefill.expert_form import packed_experts_bytes, reads_packed_experts
from soloist.prefill.experts import shared_bytes
from soloist.prefill.page_form import PageForm
from soloist.prefill.residual_streams import residual_streams_of
from soloist.prefill.widths import MOST_PADDED_TOKENS, MOST_PASS_TOKENS
from soloist.reference.memory import rope_table_bytes

_FP32_BYTES = 4


class Buffers(NamedTuple):
    """Intermediate results of T rows; H and F are those of all streams together."""

    residual: Tensor  # [T, H] fp32
    normed: Tensor  # [T, H]
    qkv: Tensor  # [T, (Q + 2 K) D] product
    queries: Tensor  # [T, Q, D]
    keys: Tensor  # [T, K, D]
    values: Tensor  # [T, K, D]
    delta: Tensor  # [T, H] product; none where results lie in a ring
    mlp_delta: Tensor  # [T, H] product; the same
    gate_up: Tensor  # [T, 2 F]; none where SwiGLU is part of the product
    activated: Tensor  # [T, F]

    def rows(self, count: int) -> "Buffers":
        """The first rows."""
        return Buffers(*(buffer[:count] for buffer in self))

    def of_layer(self, neurons: int) -> "Buffers":
        """With room for so many of an MLP's neurons, at most as many as the widest layer has."""
        rows = len(self.queries)
        if self.activated.numel() == rows * neurons:
            return self

        def narrow(buffer: Tensor, width: int) -> Tensor:
            return buffer.flatten()[: rows * width].view(rows, width) if buffer.numel() else buffer

        return self._replace(
            gate_up=narrow(self.gate_up, 2 * neurons), activated=narrow(self.activated, neurons)
        )


class _Kind(Enum):
    STREAM = auto()  # fp32
    PRODUCT = auto()  # fp32 where 16 bits are too few
    VALUE = auto()  # as in the pool


def allocate(config: ModelConfig, rows: int, pool: PagePool, *, gates: bool = False) -> Buffers:
    """Buffers of so many rows.

    Args:
        config: what the rank has.
        rows: how many.
        pool: says device and dtype.
        gates: as `Products.gates_all`.
    """
    is_wide = pool.dtype in DTYPES and residual_streams_of(config).wide_products(DTYPES[pool.dtype])
    dtypes = {
        _Kind.STREAM: torch.float32,
        _Kind.PRODUCT: widest(pool) if is_wide else pool.dtype,
        _Kind.VALUE: pool.dtype,
    }
    return Buffers(
        **{
            name: torch.empty((rows, *shape), dtype=dtypes[kind], device=pool.device)
            for name, (kind, shape) in _shapes(config, gates=gates).items()
        }
    )


def prefill_bytes(
    config: ModelConfig,
    plan: Plan,
    num_pages: int,
    *,
    attends_pages: bool = False,
    gates: bool = False,
) -> int:
    """Most that reading prompts takes on a rank, beside weights and a pool of so many pages.

    Args:
        config: what the rank has.
        plan: of the decode kernel that shares the pool.
        num_pages: of the pool.
        attends_pages: a kernel of ours reads keys and values where they lie.
        gates: as `Products.gates_all`.
    """
    positions, layout = num_pages * PAGE_POSITIONS, plan.kv_layout
    most_tokens = min(MOST_PASS_TOKENS, positions)
    buffers = bytes_per_token(config, plan.dtype, gates=gates) * most_tokens
    if reads_packed_experts(plan):
        experts = packed_experts_bytes(plan, most_tokens)
    else:
        experts = batched_bytes(config, plan.dtype, most_tokens)
    experts += shared_bytes(config, most_tokens)
    if attends_pages:
        keys = PageForm(layout, plan.shape.group, plan.dtype).partials_bytes(num_pages)
    else:
        # Earlier chunks of one layer, gathered: where graphs find them, and beyond their reach.
        keys = 3 * num_pages * layout.page_values // layout.num_layers * plan.dtype.num_bytes
    coding = coding_bytes(layout, most_tokens)
    rope = 2 * rope_table_bytes(config, positions)  # and what the table is made of
    padded = _attended_bytes(config, plan.dtype) * min(MOST_PADDED_TOKENS, positions)
    logits = plan.exchanges.sampled_rows * _FP32_BYTES
    return buffers + experts + keys + coding + rope + padded + logits


def bytes_per_token(config: ModelConfig, dtype: Dtype, *, gates: bool = False) -> int:
    """Most that a token of a pass takes: buffers, a ring, and attention's result.

    Args:
        config: what the rank has (`share_of`).
        dtype: of the pool.
        gates: as `Products.gates_all`.
    """
    streams, value = residual_streams_of(config), dtype.num_bytes
    sizes = {
        _Kind.STREAM: _FP32_BYTES,
        _Kind.PRODUCT: _FP32_BYTES if streams.widens_fp16 else value,
        _Kind.VALUE: value,
    }
    shapes = _shapes(config, gates=gates).values()
    buffers = sum(prod(shape) * sizes[kind] for kind, shape in shapes)
    attended = _attended_bytes(config, dtype)
    each = streams.count * value + _FP32_BYTES  # a module's results, and their sum
    return buffers + attended + streams.ring_modules * each * config.hidden_size


def _attended_bytes(config: ModelConfig, dtype: Dtype) -> int:
    """What attention gives a token."""
    attention = config.layers[0].attention
    return attention.num_query_heads * attention.head_dim * dtype.num_bytes


def num_bytes(*tensors: Tensor) -> int:
    """What they take together."""
    return sum(x.numel() * x.element_size() for x in tensors)


def _shapes(config: ModelConfig, *, gates: bool) -> dict[str, tuple[_Kind, tuple[int, ...]]]:
    """Of each buffer what it holds, and the shape of a row."""
    a = config.layers[0].attention
    mlps = (layer.common_mlp for layer in config.layers)
    ffn = max((mlp.intermediate_size for mlp in mlps if mlp is not None), default=0)
    streams, hidden = residual_streams_of(config), config.hidden_size
    given = 0 if streams.ring_modules else hidden
    return {
        "residual": (_Kind.STREAM, (streams.count * hidden,)),
        "normed": (_Kind.VALUE, (streams.count * hidden,)),
        "qkv": (_Kind.PRODUCT, (a.qkv_rows,)),
        "queries": (_Kind.VALUE, (a.num_query_heads, a.head_dim)),
        "keys": (_Kind.VALUE, (a.num_kv_heads, a.head_dim)),
        "values": (_Kind.VALUE, (a.num_kv_heads, a.head_dim)),
        "delta": (_Kind.PRODUCT, (given,)),
        "mlp_delta": (_Kind.PRODUCT, (given,)),
        "gate_up": (_Kind.VALUE, (0 if gates else 2 * ffn,)),
        "activated": (_Kind.VALUE, (ffn,)),
    }
