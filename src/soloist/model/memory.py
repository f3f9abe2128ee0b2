"""How much memory a model needs, before any of it is allocated. Pure arithmetic.

The sum has three parts: weights, KV cache for the chosen context, and scratch for activations. It
is another one for the reference than for the decode kernel with its prefill.
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from soloist.errors import OutOfMemory, gigabytes
from soloist.model.config import Lanes, ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.kv_format import plain
from soloist.model.tensors import TensorSpec, parameters

# What a process needs besides the model: interpreter, torch, tokenizer, allocator slack.
HEADROOM_BYTES = 300 * 10**6

# Prompt tokens a pass of the reference: enough for full matrix speed. Where prompts are kept, what
# lies behind the last whole pass is read again, so more would cost more.
REFERENCE_PASS_TOKENS = 128

# Threads of the reference that may have a pass each, beside other processes.
MOST_READERS = 4

# Prompt tokens whose intermediate results are in memory at once.
REFERENCE_CHUNK_TOKENS = MOST_READERS * REFERENCE_PASS_TOKENS

# Attention scores held at once, by all readers together: long prompts against long contexts go
# through in tiles of tokens.
SCORE_VALUES = 2**22

_FP32 = Dtype.FP32.num_bytes


@dataclass(frozen=True, slots=True)
class KernelMemory:
    """What the decode kernel allocates whatever the context is.

    Attributes:
        image_bytes: packed weights.
        workspace_bytes: exchange buffers, logits and the like.
        page_tokens: the KV cache grows by as many tokens.
        prefill_tokens: most prompt tokens a pass of prefill.
        prefill_bytes_per_token: of each of them, as prefill says.
    """

    image_bytes: int
    workspace_bytes: int
    page_tokens: int
    prefill_tokens: int
    prefill_bytes_per_token: int


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
    return plain(dtype).num_bytes(config.kv_values_per_token)


def kv_bytes_seen(config: ModelConfig, dtype: Dtype, position: int) -> int:
    """Keys and values that a step at `position` sees."""
    values = 0
    for layer in config.layers:
        a = layer.attention
        seen = position if a.window is None else min(position, a.window)
        values += 2 * a.num_kv_heads * a.head_dim * seen
    return plain(dtype).num_bytes(values)


def estimate(
    config: ModelConfig,
    specs: Iterable[TensorSpec],
    dtype: Dtype,
    context_tokens: int,
    chunk_tokens: int,
    kernel: KernelMemory | None = None,
) -> MemoryEstimate:
    """Memory to run `config` in `dtype`.

    Without a `kernel` the reference runs, prefilling `chunk_tokens` positions at a time.
    """
    if kernel is not None:
        return _kernel_estimate(config, tuple(specs), dtype, context_tokens, kernel)
    return MemoryEstimate(
        weights_bytes=parameters(specs) * dtype.num_bytes,
        kv_bytes=kv_bytes_per_token(config, dtype) * context_tokens,
        scratch_bytes=(
            _score_bytes(config, dtype, context_tokens)
            + _mask_values(config, context_tokens, chunk_tokens) * _FP32
            + _token_values(config) * chunk_tokens * _FP32
            + config.layers[0].attention.head_dim * context_tokens * _FP32  # the rope table
            + config.vocab_size * _FP32
            + _widened_bytes(config, dtype, context_tokens)
        ),
    )


def _kernel_estimate(
    config: ModelConfig,
    specs: tuple[TensorSpec, ...],
    dtype: Dtype,
    context_tokens: int,
    kernel: KernelMemory,
) -> MemoryEstimate:
    """With weights packed only: rows for prefill are kept as well where there is room for them."""
    sizes = {spec.name: spec.num_values * dtype.num_bytes for spec in specs}
    table_bytes = 0 if config.tied_head and config.lanes is None else sizes["embedding"]
    cached_tokens = -(-context_tokens // kernel.page_tokens) * kernel.page_tokens
    kv_bytes = kv_bytes_per_token(config, dtype) * cached_tokens
    tokens = min(kernel.prefill_tokens, cached_tokens)
    return MemoryEstimate(
        weights_bytes=kernel.image_bytes + table_bytes,
        kv_bytes=kv_bytes,
        scratch_bytes=(
            kernel.workspace_bytes
            + kernel.prefill_bytes_per_token * tokens
            # Earlier chunks of one layer, gathered: where graphs find them, and beyond their reach.
            + 3 * kv_bytes // config.num_layers
            + 3 * max(sizes.values())  # a matrix on its way from packed to rows
            + 2 * config.layers[0].attention.head_dim * cached_tokens * _FP32  # rope tables
        ),
    )


def _score_bytes(config: ModelConfig, dtype: Dtype, context_tokens: int) -> int:
    """Attention scores and shares of as many tokens as are held at once, one for each reader."""
    heads = max(layer.attention.num_query_heads for layer in config.layers)
    # Scores in the model's type, shares in fp32 and, of 16-bit scores, an fp32 copy on the way.
    each = 2 * _FP32 if dtype is Dtype.FP32 else dtype.num_bytes + 2 * _FP32
    return max(MOST_READERS * heads * context_tokens, SCORE_VALUES) * each


def _widened_bytes(config: ModelConfig, dtype: Dtype, context_tokens: int) -> int:
    """Keys and values of one layer in fp32, on a CPU without products in 16 bits."""
    if dtype is Dtype.FP32:
        return 0
    most = max(layer.attention.num_kv_heads * layer.attention.head_dim for layer in config.layers)
    return 2 * most * context_tokens * _FP32


def _mask_values(config: ModelConfig, context_tokens: int, chunk_tokens: int) -> int:
    """Who is hidden from whom within a chunk and, of sliding layers, the window before it."""
    windows = {layer.attention.window or 0 for layer in config.layers}
    return sum((min(window, context_tokens) + chunk_tokens) * chunk_tokens for window in windows)


def _token_values(config: ModelConfig) -> int:
    """Numbers of scratch for each prefilled token: every named buffer of a step, at most fp32."""
    most = 0
    for layer in config.layers:
        a = layer.attention
        queries, keys = a.num_query_heads * a.head_dim, a.num_kv_heads * a.head_dim
        attention = a.qkv_rows + 4 * (queries + keys) + 2 * keys + 3 * queries
        most = max(most, attention + 3 * layer.mlp.intermediate_size)
    return most + _streams(config.lanes) * config.hidden_size


def _streams(lanes: Lanes | None) -> int:
    """Tensors as large as a residual stream: of lanes each has its own, and partial results."""
    return 8 if lanes is None else (8 + 2 * lanes.delay_layers) * lanes.num_lanes


def fitting_context(
    config: ModelConfig,
    specs: tuple[TensorSpec, ...],
    dtype: Dtype,
    available_bytes: int,
    chunk_tokens: int,
    kernel: KernelMemory | None = None,
) -> int:
    """The longest context that fits, at most the model's own; 0 where the weights alone do not."""

    def total(tokens: int) -> int:
        needs = estimate(config, specs, dtype, tokens, chunk_tokens, kernel)
        return needs.total_bytes + HEADROOM_BYTES

    return bisect_right(range(1, config.context_tokens + 1), available_bytes, key=total)


def require_memory(
    config: ModelConfig,
    specs: tuple[TensorSpec, ...],
    dtype: Dtype,
    context_tokens: int,
    available_bytes: int,
    chunk_tokens: int,
    kernel: KernelMemory | None = None,
) -> MemoryEstimate:
    """The estimate, or a refusal that names what would fit.

    Raises:
        OutOfMemory: weights, cache and scratch exceed `available_bytes`.
    """
    needs = estimate(config, specs, dtype, context_tokens, chunk_tokens, kernel)
    if needs.total_bytes + HEADROOM_BYTES <= available_bytes:
        return needs
    longest = fitting_context(config, specs, dtype, available_bytes, chunk_tokens, kernel)
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
            "use a smaller model or free memory"
        )
    raise OutOfMemory(what, needs.total_bytes + HEADROOM_BYTES, available_bytes, hint)


def require_host_memory(weights_bytes: int, available_bytes: int) -> None:
    """Weights that pass through the host's memory fit there.

    Raises:
        OutOfMemory: they do not.
    """
    needed_bytes = weights_bytes + HEADROOM_BYTES
    if needed_bytes > available_bytes:
        what = f"holding weights of {gigabytes(weights_bytes)} on the host while the GPU packs them"
        raise OutOfMemory(
            what, needed_bytes, available_bytes, "free memory, or use a smaller --context"
        )
