"""How much memory a model needs, before any of it is allocated. Pure arithmetic.

The sum has three parts: weights, KV cache for the chosen context, and scratch for activations.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from soloist.errors import OutOfMemory, gigabytes
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.tensors import TensorSpec, parameters

# What a process needs besides the model: interpreter, torch, tokenizer, allocator slack.
HEADROOM_BYTES = 300 * 10**6


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes by purpose."""

    weights_bytes: int
    kv_bytes: int
    scratch_bytes: int

    @property
    def total_bytes(self) -> int:
        """Everything together."""
        return self.weights_bytes + self.kv_bytes + self.scratch_bytes


def kv_bytes_per_token(config: ModelConfig, dtype: Dtype) -> int:
    """What one more token of context costs."""
    return config.kv_values_per_token * dtype.num_bytes


def estimate(
    config: ModelConfig,
    specs: Iterable[TensorSpec],
    dtype: Dtype,
    context_tokens: int,
    chunk_tokens: int,
) -> MemoryEstimate:
    """Memory to run `config` in `dtype`, prefilling `chunk_tokens` positions at a time."""
    attention = max((layer.attention for layer in config.layers), key=lambda a: a.num_query_heads)
    widest = max(
        attention.qkv_rows,
        2 * max(layer.mlp.intermediate_size for layer in config.layers),
        config.hidden_size,
    )
    lanes = config.lanes.num_lanes if config.lanes else 1
    scores = 2 * attention.num_query_heads * chunk_tokens * context_tokens
    activations = (6 * widest + 8 * config.hidden_size) * chunk_tokens * lanes
    return MemoryEstimate(
        weights_bytes=parameters(specs) * dtype.num_bytes,
        kv_bytes=kv_bytes_per_token(config, dtype) * context_tokens,
        scratch_bytes=(scores + activations + config.vocab_size) * Dtype.FP32.num_bytes,
    )


def fitting_context(
    config: ModelConfig,
    specs: tuple[TensorSpec, ...],
    dtype: Dtype,
    available_bytes: int,
    chunk_tokens: int,
) -> int:
    """The longest context that fits, at most the model's own; 0 where the weights alone do not."""

    def total(tokens: int) -> int:
        return estimate(config, specs, dtype, tokens, chunk_tokens).total_bytes + HEADROOM_BYTES

    fixed, one = total(0), total(1) - total(0)
    return max(0, min(config.context_tokens, (available_bytes - fixed) // one))


def require_memory(
    config: ModelConfig,
    specs: tuple[TensorSpec, ...],
    dtype: Dtype,
    context_tokens: int,
    available_bytes: int,
    chunk_tokens: int,
) -> MemoryEstimate:
    """The estimate, or a refusal that names what would fit.

    Raises:
        OutOfMemory: weights, cache and scratch exceed `available_bytes`.
    """
    needs = estimate(config, specs, dtype, context_tokens, chunk_tokens)
    if needs.total_bytes + HEADROOM_BYTES <= available_bytes:
        return needs
    longest = fitting_context(config, specs, dtype, available_bytes, chunk_tokens)
    what = (
        f"this model in {dtype.value} with a context of {context_tokens:,} tokens "
        f"(weights {gigabytes(needs.weights_bytes)}, KV cache {gigabytes(needs.kv_bytes)}, "
        f"scratch {gigabytes(needs.scratch_bytes)}, reserve {gigabytes(HEADROOM_BYTES)})"
    )
    if longest > 0:
        hint = f"a context of {longest:,} tokens fits: --context {longest}"
    elif dtype is Dtype.FP32 and fitting_context(
        config, specs, Dtype.BF16, available_bytes, chunk_tokens
    ):
        shorter = fitting_context(config, specs, Dtype.BF16, available_bytes, chunk_tokens)
        hint = f"in bf16 a context of {shorter:,} tokens fits: --precision bf16 --context {shorter}"
    else:
        room = max(0, available_bytes - HEADROOM_BYTES) // dtype.num_bytes
        hint = (
            f"models of up to about {room / 1e9:.2g} billion parameters fit in {dtype.value}; "
            "take a smaller one or free memory"
        )
    raise OutOfMemory(what, needs.total_bytes + HEADROOM_BYTES, available_bytes, hint)
