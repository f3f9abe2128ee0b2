"""The header that prefill's elementwise kernels are compiled with. Pure: no torch, no device."""

import struct

from soloist.megakernel.plan import GRANULE_POSITIONS, PAGE_POSITIONS
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype

THREADS = 256


def header(config: ModelConfig, dtype: Dtype) -> str:
    """The text of spec.cuh for a model whose layers are of one size."""
    attention, mlp = config.layers[0].attention, config.layers[0].mlp
    counts = {
        "kThreads": THREADS,
        "kLayers": config.num_layers,
        "kHidden": config.hidden_size,
        "kQueryHeads": attention.num_query_heads,
        "kKvHeads": attention.num_kv_heads,
        "kHeadDim": attention.head_dim,
        "kIntermediate": mlp.intermediate_size,
        "kPagePositions": PAGE_POSITIONS,
        "kGranulePositions": GRANULE_POSITIONS,
    }
    (epsilon,) = struct.unpack("f", struct.pack("f", config.norm_epsilon))
    return "\n".join(
        [
            "// Generated from the model's configuration; see prefill/header.py.",
            "#pragma once",
            f"constexpr bool kBf16 = {str(dtype is Dtype.BF16).lower()};",
            *(f"constexpr unsigned {name} = {value}u;" for name, value in counts.items()),
            f"constexpr float kEpsilon = {epsilon.hex()}f;",
            "",
        ]
    )
