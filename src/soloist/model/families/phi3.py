"""`phi3`: Phi-3, 3.5 and 4, Phi-4-mini: Llama's form; q, k, v are one tensor, gate and up too."""

from soloist.model.config import ModelConfig
from soloist.model.families.dense import Names, Special, decoder_tensors, read_dense
from soloist.model.reading import Fields
from soloist.model.tensors import TensorSpec

_NAMES = Names(fused_qkv=True, fused_gate_up=True)


def read(fields: Fields) -> ModelConfig:
    """Rope may turn a share of each head, with LongRoPE's factors; `sliding_window` of all layers.

    A window as wide as the context hides nothing, and is none.
    """
    # Attention of other forms, which no published file asks for.
    for name, wanted in (
        ("attention_bias", False),
        ("full_attn_mod", 1),
        ("interpolate_factor", 1),
    ):
        fields.only(name, wanted)
    # Beside other rules than longrope it says nothing.
    fields.integer("original_max_position_embeddings", None)
    window = fields.integer("sliding_window", None)
    if window is not None and window >= fields.integer("max_position_embeddings"):
        window = None
    windows = (window,) * fields.num_layers()
    return read_dense(fields, Special(default_theta=10_000.0, rotary_share=1.0, windows=windows))


def tensors(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """As in the files."""
    return decoder_tensors(config, _NAMES)
