"""`qwen3_moe`: Qwen3-30B-A3B, 235B-A22B and Qwen3-Coder: as `qwen3`, with experts."""

from soloist.model.config import Mixture, Mlp, ModelConfig
from soloist.model.families.dense import Special, decoder_tensors, layer_windows, read_dense
from soloist.model.families.mixture import qwen_layers, read_softmax_router
from soloist.model.reading import Fields

tensors = decoder_tensors


def read(fields: Fields) -> ModelConfig:
    """A window, where one is used, holds for every layer."""
    attention_bias = fields.flag("attention_bias", default=False)
    router = read_softmax_router(fields)
    mixture = Mixture(router, Mlp(fields.integer("moe_intermediate_size")))
    slides = fields.flag("use_sliding_window", default=False)
    kinds = ["sliding_attention" if slides else "full_attention"] * fields.num_layers()
    return read_dense(
        fields,
        Special(
            default_theta=10_000.0,
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            qk_norm=True,
            windows=layer_windows(fields, kinds),
            mlps=qwen_layers(fields, mixture),
        ),
    )
