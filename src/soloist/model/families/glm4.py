"""`glm4`: GLM-4-0414 and GLM-Z1: as `glm`, with norms also on what attention and MLP give."""

from soloist.model.config import ModelConfig
from soloist.model.families import glm
from soloist.model.families.dense import Names, decoder_tensors
from soloist.model.reading import Fields
from soloist.model.tensors import TensorSpec

_NAMES = Names(
    fused_gate_up=True,
    attention_output_norm="post_self_attn_layernorm",
    mlp_output_norm="post_mlp_layernorm",
)


def read(fields: Fields) -> ModelConfig:
    """As `glm`, with two norms more a layer."""
    return glm.read(fields, norms_outputs=True)


def tensors(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """As in the files."""
    return decoder_tensors(config, _NAMES)
