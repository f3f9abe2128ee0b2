"""`mistral`: Mistral 7B, Nemo, Small, Devstral: Llama's form, some with a window on every layer."""

from soloist.model.config import ModelConfig
from soloist.model.families.dense import Special, decoder_tensors, read_dense
from soloist.model.reading import Fields

tensors = decoder_tensors


# What transformers takes where a file has no `sliding_window`.
_DEFAULT_WINDOW = 4096


def read(fields: Fields) -> ModelConfig:
    """`sliding_window` (null for none) holds for every layer."""
    fields.only("attention_bias", wanted=False)
    window = fields.integer("sliding_window", None)
    if not fields.names("sliding_window"):
        window = _DEFAULT_WINDOW
    if fields.flag("use_sliding_window", default=window is not None) != (window is not None):
        # Other readers of this family look at sliding_window only.
        used = fields.value("use_sliding_window")
        raise fields.unsupported("use_sliding_window", used, "what sliding_window says, or absent")
    num_layers = fields.num_layers()
    return read_dense(
        fields,
        Special(default_theta=10_000.0, windows=(window,) * num_layers),
    )
