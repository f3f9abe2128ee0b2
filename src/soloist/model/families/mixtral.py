"""`mixtral`: Mixtral 8x7B and 8x22B: as `mistral`, with experts of `intermediate_size`."""

from soloist.model.config import Mixture, Mlp, ModelConfig, Router
from soloist.model.expert_files import NAMES
from soloist.model.families.dense import Names, Special, decoder_tensors, read_dense
from soloist.model.families.mixture import OF_TRAINING, read_counts
from soloist.model.reading import Fields
from soloist.model.tensors import TensorSpec

_NAMES = Names(experts=NAMES["mixtral"])


def read(fields: Fields) -> ModelConfig:
    """`sliding_window` (none where a file does not say) holds for every layer."""
    fields.only("attention_bias", wanted=False)
    fields.ignore(*OF_TRAINING, "router_jitter_noise")
    router = Router(*read_counts(fields, "num_local_experts"), normalises=True)
    mixture = Mixture(router, Mlp(fields.integer("intermediate_size")))
    num_layers = fields.num_layers()
    return read_dense(
        fields,
        Special(
            default_theta=1_000_000.0,
            windows=(fields.integer("sliding_window", None),) * num_layers,
            mlps=(mixture,) * num_layers,
        ),
    )


def tensors(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """As in the files."""
    return decoder_tensors(config, _NAMES)
