"""`olmo2`: OLMo 2: norms on what attention and MLP give instead of on what they take."""

from soloist.model.config import ModelConfig
from soloist.model.families.dense import Special, decoder_tensors, read_dense
from soloist.model.reading import Fields

tensors = decoder_tensors


def read(fields: Fields) -> ModelConfig:
    """One norm for all queries and one for all keys, before they are cut into heads."""
    attention_bias = fields.flag("attention_bias", default=False)
    return read_dense(
        fields,
        Special(
            default_theta=10_000.0,
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            qk_norm=True,
            qk_norm_joins_heads=True,
            norms_inputs=False,
            norms_outputs=True,
        ),
    )
