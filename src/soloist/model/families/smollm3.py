"""`smollm3`: SmolLM3: layers without rope, in which a window may apply."""

from soloist.errors import WrongType
from soloist.model.config import ModelConfig
from soloist.model.families.dense import Special, decoder_tensors, layer_windows, read_dense
from soloist.model.reading import Fields

tensors = decoder_tensors


def read(fields: Fields) -> ModelConfig:
    """`no_rope_layers` has a 1 where a layer rotates, a 0 where it does not, despite its name."""
    attention_bias = fields.flag("attention_bias", default=False)
    num_layers = fields.num_layers()
    rotates = fields.integers("no_rope_layers", None)
    interval = fields.integer("no_rope_layer_interval", None if rotates else 4)
    if rotates is None:
        rotates = [int((i + 1) % interval != 0) for i in range(num_layers)]
    if len(rotates) != num_layers or any(r > 1 for r in rotates):
        raise WrongType(
            fields.file, "no_rope_layers", rotates, f"{num_layers} entries of 0 or 1, one a layer"
        )
    slides = fields.flag("use_sliding_window", default=False) and "sliding_window" in fields
    kinds = ["sliding_attention" if slides and not r else "full_attention" for r in rotates]
    return read_dense(
        fields,
        Special(
            default_theta=2_000_000.0,
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            mlp_bias=fields.flag("mlp_bias", default=False),
            tied_head=True,
            windows=layer_windows(fields, kinds),
            rope_layers=tuple(bool(r) for r in rotates),
        ),
    )
