"""`granite`: dense Granite 3: Llama's form with four multipliers."""

from dataclasses import replace

from soloist.model.config import ModelConfig
from soloist.model.families.dense import Special, decoder_tensors, read_dense
from soloist.model.reading import Fields

tensors = decoder_tensors


def read(fields: Fields) -> ModelConfig:
    """Multipliers of embeddings, attention scores, what joins the residual stream, and logits.

    A stream x to which r · f(norm(x)) is added is r times a stream y = x / r to which f(norm(y)) is
    added, if the norm's epsilon is divided by r². So the multiplier r of what joins the stream is
    part of the other numbers, and no fact of its own.
    """
    attention_bias = fields.flag("attention_bias", default=False)
    config = read_dense(
        fields,
        Special(
            default_theta=10_000.0,
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            mlp_bias=fields.flag("mlp_bias", default=False),
            own_scale=fields.number("attention_multiplier", 1.0),
        ),
    )
    joins = fields.number("residual_multiplier", 1.0)
    return replace(
        config,
        norm_epsilon=config.norm_epsilon / joins**2,
        embedding_scale=fields.number("embedding_multiplier", 1.0) / joins,
        logit_scale=1 / fields.number("logits_scaling", 1.0),
    )
