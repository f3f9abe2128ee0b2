"""The header that prefill's elementwise kernels are compiled with. Pure: no torch, no device."""

import struct

from soloist.kv.chunks import LEAST_CHUNK_TOKENS
from soloist.kv.layout import KvLayout
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.kv_format import PAGE_FORMATS
from soloist.prefill.residual_streams import residual_streams_of

THREADS = 256
# A rank that waits so long for others is stuck; the host may be busy between two kernels.
AWAIT_NS = 20_000_000_000


def header(config: ModelConfig, dtype: Dtype, ranks: int = 1, neurons: int | None = None) -> str:
    """The text of spec.cuh for a model whose layers have the same heads, or one rank's share of it.

    Args:
        config: what the rank has, with heads and neurons of all its streams.
        dtype: of weights and of what products read.
        ranks: over how many the model is spread.
        neurons: of the MLPs or experts that the kernels are for; None: of the first layer's.
    """
    attention = config.layers[0].attention
    neurons = config.layers[0].each_mlp.intermediate_size if neurons is None else neurons
    streams = residual_streams_of(config)
    pages = KvLayout(
        config.num_layers, attention.num_kv_heads, attention.head_dim, PAGE_FORMATS[dtype]
    )
    counts = {
        "kThreads": THREADS,
        "kLayers": config.num_layers,
        "kHidden": config.hidden_size,
        "kLanes": streams.count,
        "kQueryHeads": attention.num_query_heads // streams.count,
        "kKvHeads": attention.num_kv_heads // streams.count,
        "kHeadDim": attention.head_dim,
        "kIntermediate": neurons // streams.count,
        "kBlockPositions": LEAST_CHUNK_TOKENS,
        "kRanks": ranks,
    }
    (epsilon,) = struct.unpack("f", struct.pack("f", config.norm_epsilon))
    return "\n".join(
        [
            "// Generated from the model's configuration; see prefill/header.py.",
            "#pragma once",
            '#include "ptx/types.cuh"',
            f"constexpr bool kBf16 = {str(dtype is Dtype.BF16).lower()};",
            f"constexpr bool kWideProducts = {str(streams.wide_products(dtype)).lower()};",
            *(f"constexpr unsigned {name} = {value}u;" for name, value in counts.items()),
            f"constexpr unsigned long long kAwaitNs = {AWAIT_NS}ull;",
            f"constexpr float kEpsilon = {epsilon.hex()}f;",
            pages.cuda,
            "",
        ]
    )
