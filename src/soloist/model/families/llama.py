"""`llama`: Llama 2, 3 and 3.x, SmolLM2, TinyLlama, Yi and others of the same form."""

from soloist.model.config import ModelConfig
from soloist.model.families.dense import Special, decoder_tensors, read_dense
from soloist.model.reading import Fields

tensors = decoder_tensors

# Older conversions stored the rope table, which follows from the configuration.
IGNORED = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)


def read(fields: Fields) -> ModelConfig:
    """Plain GQA; `attention_bias` puts biases on q, k, v and o, `mlp_bias` on all MLP matrices."""
    fields.only("use_sliding_window", wanted=False)
    attention_bias = fields.flag("attention_bias", default=False)
    return read_dense(
        fields,
        Special(
            default_theta=10_000.0,  # Llama 1 and 2 files do not name it
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            mlp_bias=fields.flag("mlp_bias", default=False),
        ),
    )
