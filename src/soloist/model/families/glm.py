"""`glm`: GLM-4-9B and GLM-Edge: rope turns neighbours in half of a head; gate and up are one."""

from soloist.model.config import ModelConfig
from soloist.model.families.dense import Names, Special, decoder_tensors, read_dense
from soloist.model.reading import Fields
from soloist.model.tensors import TensorSpec

_NAMES = Names(fused_gate_up=True)


def read(fields: Fields, *, norms_outputs: bool = False) -> ModelConfig:
    """`attention_bias` puts biases on q, k and v, and is true where a file does not say."""
    return read_dense(
        fields,
        Special(
            default_theta=10_000.0,
            qkv_bias=fields.flag("attention_bias", default=True),
            rotary_share=0.5,
            rope_interleaved=True,
            norms_outputs=norms_outputs,
        ),
    )


def tensors(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """As in the files."""
    return decoder_tensors(config, _NAMES)
