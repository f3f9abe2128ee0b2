"""`mistral`: Mistral 7B, Nemo, Small, Devstral: Llama's form, some with a window on every layer."""

from soloist.errors import MissingField
from soloist.model.config import ModelConfig
from soloist.model.families.dense import Special, decoder_tensors, read_dense
from soloist.model.reading import Fields

tensors = decoder_tensors


def read(fields: Fields) -> ModelConfig:
    """`sliding_window` (null for none) holds for every layer."""
    fields.only("attention_bias", wanted=False)
    if not fields.names("sliding_window"):
        raise MissingField(fields.file, "sliding_window", "a whole number, or null for none")
    window = fields.integer("sliding_window", None)
    num_layers = fields.num_layers()
    return read_dense(
        fields,
        Special(default_theta=10_000.0, windows=(window,) * num_layers),
    )
