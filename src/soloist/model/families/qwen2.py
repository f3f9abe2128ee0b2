"""`qwen2`: Qwen 2, 2.5 and 2.5-Coder: biases on q, k and v that no field announces."""

from soloist.model.config import ModelConfig
from soloist.model.families.dense import Special, decoder_tensors, layer_windows, read_dense
from soloist.model.reading import Fields

tensors = decoder_tensors


def read(fields: Fields) -> ModelConfig:
    """Layers from `max_window_layers` on slide where `use_sliding_window` is on."""
    fields.only("use_mrope", wanted=False)
    # Known to no Qwen 2: its q, k and v have biases whatever this says, and o has none.
    fields.ignore("attention_bias")
    return read_dense(
        fields,
        Special(default_theta=10_000.0, qkv_bias=True, windows=upper_layer_windows(fields)),
    )


def upper_layer_windows(fields: Fields) -> tuple[int | None, ...]:
    """Windows of Qwen's kind: the lower `max_window_layers` layers see everything."""
    num_layers = fields.num_layers()
    full = num_layers
    if fields.flag("use_sliding_window", default=False) and "layer_types" not in fields:
        full = fields.integer("max_window_layers", minimum=0)
    kinds = ["full_attention" if i < full else "sliding_attention" for i in range(num_layers)]
    return layer_windows(fields, kinds)
