"""The reference for a configuration: with lanes or without."""

from soloist.model.config import ModelConfig
from soloist.model.kv_format import KvFormat
from soloist.model.torch_types import Weights
from soloist.reference.device import Reference
from soloist.reference.laneformer import LaneTransformer
from soloist.reference.transformer import Transformer


def build_reference(config: ModelConfig, weights: Weights, kv: KvFormat | None = None) -> Reference:
    """Put weights and configuration together; `kv` as of `Reference`."""
    kind = Transformer if config.lanes is None else LaneTransformer
    return kind(config, weights, kv)
