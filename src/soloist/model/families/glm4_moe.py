"""`glm4_moe`: GLM-4.5, 4.5-Air, 4.6: corrected sigmoids choose experts, the first layers are dense.

Half of a head rotates. What drafts tokens behind the last layer is left out.
"""

from dataclasses import replace

from soloist.model.config import Mixture, Mlp, ModelConfig
from soloist.model.families.dense import Special, decoder_tensors, read_dense
from soloist.model.families.mixture import read_grouped_router
from soloist.model.reading import Fields

tensors = decoder_tensors


def read(fields: Fields) -> ModelConfig:
    """`attention_bias` puts biases on q, k and v, and none on what attention gives."""
    count, expert = fields.num_layers(), fields.integer("moe_intermediate_size")
    mixture = Mixture(read_grouped_router(fields), Mlp(expert))
    shared = fields.integer("n_shared_experts", 1, minimum=0)
    if shared:
        mixture = replace(mixture, shared=Mlp(shared * expert))
    first = fields.integer("first_k_dense_replace", 1, minimum=0)
    if first > count:
        raise fields.unsupported("first_k_dense_replace", first, f"0 … {count}")
    for name in ("num_nextn_predict_layers", "num_mtp_layers"):
        if (drafting := fields.integer(name, 0, minimum=0)) > 1:
            raise fields.unsupported(name, drafting, "0 or 1")
    mlp = Mlp(fields.integer("intermediate_size"))
    return read_dense(
        fields,
        Special(
            default_theta=10_000.0,
            qkv_bias=fields.flag("attention_bias", default=False),
            qk_norm=fields.flag("use_qk_norm", default=False),
            rotary_share=0.5,
            mlps=tuple(mlp if i < first else mixture for i in range(count)),
        ),
    )


def ignored(config: ModelConfig) -> tuple[str, ...]:
    """A layer behind the last one, which drafts; in GGUF some of it has no name of ours."""
    return tuple(rf"{at}\.{config.num_layers}\..*" for at in (r"model\.layers", "blk"))
