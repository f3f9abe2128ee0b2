"""What a pass has in memory: intermediate results of its rows, and the bytes that they take."""

from enum import Enum, auto
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from soloist.kv.layout import PAGE_POSITIONS
from soloist.kv.pool import PagePool
from soloist.megakernel.plan import Plan
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.prefill.elementwise import DTYPES
from soloist.prefill.header import wide_products
from soloist.prefill.widths import MOST_PASS_TOKENS
from soloist.reference.memory import rope_table_bytes

_FP32_BYTES = 4
# What has lanes first where the model has lanes.
_OF_LANES = ("residual", "normed", "qkv", "gate_up", "activated")


class Buffers(NamedTuple):
    """Intermediate results of T rows; with l lanes H and F are those of all of them."""

    residual: Tensor  # [T, H] fp32
    normed: Tensor  # [T, H]
    qkv: Tensor  # [T, (Q + 2 K) D] product
    queries: Tensor  # [T, Q, D]
    keys: Tensor  # [T, K, D]
    values: Tensor  # [T, K, D]
    delta: Tensor  # [T, H] product; none of lanes, which have rings
    mlp_delta: Tensor  # [T, H] product; the same
    gate_up: Tensor  # [T, 2 F]
    activated: Tensor  # [T, F]

    def rows(self, count: int, lanes: int) -> "Buffers":
        """The first rows; of `lanes`, unless these are 0, everything but heads as [l, T, …]."""
        first = Buffers(*(buffer[:count] for buffer in self))
        if not lanes:
            return first
        named = first._asdict()
        return first._replace(**{name: by_lane(named[name], lanes) for name in _OF_LANES})

    def of_layer(self, neurons: int) -> "Buffers":
        """With room for so many of an MLP's neurons, at most as many as the widest layer has."""
        if self.activated.shape[-1] == neurons:
            return self
        rows = len(self.activated)

        def narrow(buffer: Tensor, width: int) -> Tensor:
            return buffer.flatten()[: rows * width].view(rows, width)

        return self._replace(
            gate_up=narrow(self.gate_up, 2 * neurons), activated=narrow(self.activated, neurons)
        )


class _Kind(Enum):
    STREAM = auto()  # fp32
    PRODUCT = auto()  # fp32 where 16 bits are too few
    VALUE = auto()  # as in the pool


def allocate(config: ModelConfig, lanes: int, rows: int, pool: PagePool) -> Buffers:
    """Buffers of so many rows.

    Args:
        config: what the rank has, as a model without lanes.
        lanes: of the rank, 0 where the model has none; their products have 16 bits.
        rows: how many.
        pool: says device and dtype.
    """
    is_wide = not lanes and pool.dtype in DTYPES and wide_products(DTYPES[pool.dtype])
    dtypes = {
        _Kind.STREAM: torch.float32,
        _Kind.PRODUCT: widest(pool) if is_wide else pool.dtype,
        _Kind.VALUE: pool.dtype,
    }
    return Buffers(
        **{
            name: torch.empty((rows, *shape), dtype=dtypes[kind], device=pool.device)
            for name, (kind, shape) in _shapes(config, lanes).items()
        }
    )


def widest(pool: PagePool) -> torch.dtype:
    """Of products: only CUDA multiplies 16-bit matrices into fp32."""
    return torch.float32 if pool.device.type == "cuda" else pool.dtype


def prefill_bytes(config: ModelConfig, plan: Plan, num_pages: int) -> int:
    """Most that reading prompts takes on a rank, beside weights and a pool of so many pages.

    Args:
        config: what the rank has.
        plan: of the decode kernel that shares the pool.
        num_pages: of the pool.
    """
    positions, layout = num_pages * PAGE_POSITIONS, plan.kv_layout
    buffers = bytes_per_token(config, plan.dtype) * min(MOST_PASS_TOKENS, positions)
    # Earlier chunks of one layer, gathered: where graphs find them, and beyond their reach.
    gathered = 3 * layout.pool_bytes(num_pages) // layout.num_layers
    rope = 2 * rope_table_bytes(config, positions)  # and what the table is made of
    return buffers + gathered + rope + plan.exchanges.sampled_rows * _FP32_BYTES  # logits


def bytes_per_token(config: ModelConfig, dtype: Dtype) -> int:
    """Most that a token of a pass takes: buffers, what lanes give, and attention's result.

    Args:
        config: what the rank has (`share_of`).
        dtype: of the pool.
    """
    lanes = 0 if config.lanes is None else config.lanes.num_lanes
    value = dtype.num_bytes
    sizes = {
        _Kind.STREAM: _FP32_BYTES,
        _Kind.PRODUCT: value if lanes else _FP32_BYTES,
        _Kind.VALUE: value,
    }
    buffers = sum(prod(shape) * sizes[kind] for kind, shape in _shapes(config, lanes).values())
    attention = config.layers[0].attention
    attended = attention.num_query_heads * attention.head_dim * value
    each = lanes * value + _FP32_BYTES  # a module's partial results of all lanes, and their sum
    rings = modules_under_way(config) * each * config.hidden_size if lanes else 0
    return buffers + attended + rings


def modules_under_way(config: ModelConfig) -> int:
    """Attentions and MLPs whose partial results a pass needs at once, of a model with lanes."""
    lanes = config.lanes
    assert lanes is not None, "the caller asks for models with lanes only"
    if not (lanes.attention_comm or lanes.mlp_comm):
        return 1
    return min(2 * lanes.delay_layers + 1, 2 * config.num_layers)


def num_bytes(*tensors: Tensor) -> int:
    """What they take together."""
    return sum(x.numel() * x.element_size() for x in tensors)


def by_lane(x: Tensor, lanes: int) -> Tensor:
    """[T, l · width] that lies as [l, T, width], as such."""
    return x.view(lanes, x.shape[0], -1)


def _shapes(config: ModelConfig, lanes: int) -> dict[str, tuple[_Kind, tuple[int, ...]]]:
    """Of each buffer what it holds, and the shape of a row."""
    a, ffn = config.layers[0].attention, max(x.mlp.intermediate_size for x in config.layers)
    streams, given = config.hidden_size * max(1, lanes), 0 if lanes else config.hidden_size
    return {
        "residual": (_Kind.STREAM, (streams,)),
        "normed": (_Kind.VALUE, (streams,)),
        "qkv": (_Kind.PRODUCT, (a.qkv_rows,)),
        "queries": (_Kind.VALUE, (a.num_query_heads, a.head_dim)),
        "keys": (_Kind.VALUE, (a.num_kv_heads, a.head_dim)),
        "values": (_Kind.VALUE, (a.num_kv_heads, a.head_dim)),
        "delta": (_Kind.PRODUCT, (given,)),
        "mlp_delta": (_Kind.PRODUCT, (given,)),
        "gate_up": (_Kind.VALUE, (2 * ffn,)),
        "activated": (_Kind.VALUE, (ffn,)),
    }
