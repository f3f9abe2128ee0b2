"""`olmoe`: OLMoE: experts of `intermediate_size` in every layer, norms over all heads."""

from soloist.model.config import Mixture, Mlp, ModelConfig
from soloist.model.families.dense import Special, decoder_tensors, read_dense
from soloist.model.families.mixture import read_softmax_router
from soloist.model.reading import Fields

tensors = decoder_tensors


def read(fields: Fields) -> ModelConfig:
    """Queries and keys that are clipped are refused."""
    fields.only("clip_qkv", None)
    fields.only("sliding_window", None)
    attention_bias = fields.flag("attention_bias", default=False)
    # Norms are as wide as the residual stream, so that heads are.
    heads = fields.integer("num_attention_heads")
    fields.only("head_dim", fields.integer("hidden_size") // heads)
    router = read_softmax_router(fields)
    mixture = Mixture(router, Mlp(fields.integer("intermediate_size")))
    return read_dense(
        fields,
        Special(
            default_theta=10_000.0,
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            qk_norm=True,
            qk_norm_joins_heads=True,
            mlps=(mixture,) * fields.num_layers(),
        ),
    )
