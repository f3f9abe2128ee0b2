"""Bytes that the reference takes beside weights and KV cache, and the sizes behind them. Pure."""

from soloist.model.config import Lanes, Mixture, Mlp, ModelConfig, Router
from soloist.model.dtype import Dtype
from soloist.model.kv_format import KvFormat

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

# Rows of an expert that are multiplied at once: enough for products by several threads.
_LEAST_EXPERT_ROWS, _MOST_EXPERT_ROWS = 16, 64

_FP32 = Dtype.FP32.num_bytes


def expert_rows(router: Router) -> int:
    """Rows that an expert multiplies at once: a power of two that holds its share of a pass."""
    share = REFERENCE_PASS_TOKENS * router.num_chosen // router.num_experts
    power: int = 1 << max(0, share - 1).bit_length()
    return min(max(power, _LEAST_EXPERT_ROWS), _MOST_EXPERT_ROWS)


def least_rows(config: ModelConfig, num_tokens: int) -> int:
    """Rows of the smallest product in a pass of so many tokens."""
    return min([num_tokens, *(expert_rows(mixture.router) for mixture in config.mixtures)])


def scratch_bytes(
    config: ModelConfig,
    dtype: Dtype,
    context_tokens: int,
    chunk_tokens: int = REFERENCE_CHUNK_TOKENS,
    kv: KvFormat | None = None,
) -> int:
    """Everything, with `chunk_tokens` positions of a prompt in memory at once."""
    masks = _mask_values(config, context_tokens, chunk_tokens)
    values = masks + _token_values(config) * chunk_tokens + config.vocab_size
    values += MOST_READERS * _expert_row_values(config)
    return (
        values * _FP32
        + rope_table_bytes(config, context_tokens)
        + _score_bytes(config, dtype, context_tokens)
        + _widened_bytes(config, dtype, context_tokens)
        + (0 if kv is None or kv.is_plain else _decoded_bytes(config, dtype, context_tokens))
    )


def rope_table_bytes(config: ModelConfig, positions: int) -> int:
    """Cosine and sine of every angle, as `Rotary` has them."""
    head_dim = config.layers[0].attention.head_dim
    return sum(rope.rotated_dims(head_dim) for rope in config.ropes) * positions * _FP32


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


def _decoded_bytes(config: ModelConfig, dtype: Dtype, context_tokens: int) -> int:
    """Keys and values of one layer as the numbers that codes stand for, for each reader.

    In fp32, of 16 bits once more, and codes of 4 bits apart.
    """
    most = max(layer.attention.num_kv_heads * layer.attention.head_dim for layer in config.layers)
    rounded = 0 if dtype is Dtype.FP32 else dtype.num_bytes
    apart = 2
    return MOST_READERS * 2 * most * context_tokens * (_FP32 + rounded + apart)


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
        most = max(most, attention + _mlp_values(layer.mlp, config.hidden_size))
    normed_outputs = any(layer.norms_outputs for layer in config.layers)
    return most + (_streams(config.lanes) + normed_outputs) * config.hidden_size


def _mlp_values(mlp: Mlp | Mixture, hidden_size: int) -> int:
    """Of a mixture all but rows of experts: input and sum, and what the router makes."""
    if isinstance(mlp, Mlp):
        return 3 * mlp.intermediate_size
    shared = 0 if mlp.shared is None else 3 * mlp.shared.intermediate_size + hidden_size
    # Logits, scores, ranks and a sort's values, and its places in 64 bits; the same for a few more.
    routing = 8 * mlp.router.num_experts + 16 * mlp.router.num_chosen
    return shared + routing + 2 * hidden_size


def _expert_row_values(config: ModelConfig) -> int:
    """Rows of one expert at a time: in, between, out, in fp32 and times their shares."""
    return max(
        (
            expert_rows(m.router) * (3 * m.expert.intermediate_size + 5 * config.hidden_size)
            for m in config.mixtures
        ),
        default=0,
    )


def _streams(lanes: Lanes | None) -> int:
    """Tensors as large as a residual stream: of lanes each has its own, and partial results."""
    return 8 if lanes is None else (8 + 2 * lanes.delay_layers) * lanes.num_lanes
