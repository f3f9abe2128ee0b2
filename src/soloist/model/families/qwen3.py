"""`qwen3`: dense Qwen 3 and étude: RMS norms on query and key heads, explicit head_dim."""

from soloist.model.config import ModelConfig
from soloist.model.families.dense import Special, decoder_tensors, read_dense
from soloist.model.families.qwen2 import upper_layer_windows
from soloist.model.reading import Fields

tensors = decoder_tensors


def read(fields: Fields) -> ModelConfig:
    """`head_dim` is given and need not be hidden_size / heads."""
    attention_bias = fields.flag("attention_bias", default=False)
    fields.integer("head_dim")
    return read_dense(
        fields,
        Special(
            default_theta=10_000.0,
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            qk_norm=True,
            windows=upper_layer_windows(fields),
        ),
    )
