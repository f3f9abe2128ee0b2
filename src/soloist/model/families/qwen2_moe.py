"""`qwen2_moe`: Qwen1.5-MoE and Qwen2-57B-A14B: experts beside one that every token takes."""

from dataclasses import replace

from soloist.model.config import Mixture, Mlp, ModelConfig
from soloist.model.expert_files import NAMES
from soloist.model.families.dense import Names, Special, decoder_tensors, layer_windows, read_dense
from soloist.model.families.mixture import qwen_layers, read_softmax_router
from soloist.model.reading import Fields
from soloist.model.tensors import TensorSpec

_NAMES = Names(experts=NAMES["qwen2_moe"])


def read(fields: Fields) -> ModelConfig:
    """Which layers slide a file has to say by `layer_types`, where any does."""
    router = read_softmax_router(fields)
    expert = Mlp(fields.integer("moe_intermediate_size"))
    size = fields.integer("shared_expert_intermediate_size", minimum=0)
    mixture = Mixture(router, expert)
    if size:
        mixture = replace(mixture, shared=Mlp(size), gates_shared=True)
    if fields.flag("use_sliding_window", default=False) and "layer_types" not in fields:
        # Versions of transformers slide other layers, of which files say nothing.
        allowed = "false, or true beside layer_types"
        raise fields.unsupported("use_sliding_window", value=True, allowed=allowed)
    return read_dense(
        fields,
        Special(
            default_theta=10_000.0,
            qkv_bias=fields.flag("qkv_bias", default=True),
            windows=layer_windows(fields, ["full_attention"] * fields.num_layers()),
            mlps=qwen_layers(fields, mixture),
        ),
    )


def tensors(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """As in the files."""
    return decoder_tensors(config, _NAMES)
