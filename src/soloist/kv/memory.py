"""Bytes of keys and values, by the positions that have them. Pure arithmetic."""

from soloist.model.config import ModelConfig
from soloist.model.kv_format import KvFormat


def kv_bytes_per_token(config: ModelConfig, stored: KvFormat) -> int:
    """What one more token of context costs."""
    return stored.num_bytes(config.kv_values_per_token)


def kv_bytes_seen(config: ModelConfig, stored: KvFormat, position: int) -> int:
    """Keys and values that a step at `position` sees."""
    values = 0
    for layer in config.layers:
        a = layer.attention
        seen = position if a.window is None else min(position, a.window)
        values += 2 * a.num_kv_heads * a.head_dim * seen
    return stored.num_bytes(values)
