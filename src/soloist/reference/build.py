"""The reference for a configuration: with lanes or without."""

from soloist.model.config import ModelConfig
from soloist.model.torch_types import Weights
from soloist.reference.device import Reference
from soloist.reference.laneformer import LaneTransformer
from soloist.reference.transformer import Transformer

__all__ = ["Reference", "build_reference"]


def build_reference(config: ModelConfig, weights: Weights) -> Reference:
    """Put weights and configuration together."""
    return (
        Transformer(config, weights) if config.lanes is None else LaneTransformer(config, weights)
    )
