"""Laneformer's lanes: which of them a rank has, and who receives what when. Pure.

A lane has its own residual stream and whole heads and neurons: it is a small model of its own. A
rank has some lanes.
"""

from dataclasses import dataclass, replace

from soloist.model.config import Lanes, Layer, ModelConfig


@dataclass(frozen=True, slots=True)
class LaneShare:
    """One rank's part of a model: some lanes, and their rows of the vocabulary.

    Attributes:
        whole: the model.
        ranks: over how many it is spread.
        rank: whose part this is.
    """

    whole: ModelConfig
    ranks: int
    rank: int

    @property
    def lanes(self) -> range:
        """Which lanes are the rank's."""
        here = rules_of(self.whole).num_lanes // self.ranks
        return range(self.rank * here, (self.rank + 1) * here)

    @property
    def vocabulary(self) -> range:
        """Which rows of the LM head are the rank's; its matrices may have room for more."""
        rows, last = lane_of(self.whole).vocab_size, self.whole.vocab_size
        return range(min(last, rows * self.lanes.start), min(last, rows * self.lanes.stop))


@dataclass(frozen=True, slots=True)
class Module:
    """Attention or the MLP of all layers, as far as its results concern other lanes.

    Attributes:
        lanes: the rules.
        communicates: partial results reach other lanes `delay_layers` later.
        num_layers: of the model.
    """

    lanes: Lanes
    communicates: bool
    num_layers: int

    def sums(self, layer: int) -> bool:
        """A lane adds the sum of all lanes' partial results of this very layer."""
        return layer < self.lanes.delay_layers and self.lanes.early_sum

    def receives(self, layer: int) -> bool:
        """A lane adds the others' partial results of `delay_layers` before, and its own."""
        return self.communicates and layer >= self.lanes.delay_layers

    def publishes(self, layer: int) -> bool:
        """Somebody needs a lane's partial result of this layer, now or later."""
        later = layer + self.lanes.delay_layers
        return self.sums(layer) or (self.communicates and later < self.num_layers)


def modules_of(model: ModelConfig) -> tuple[Module, Module]:
    """Attention and the MLP."""
    lanes = rules_of(model)
    return (
        Module(lanes, lanes.attention_comm, model.num_layers),
        Module(lanes, lanes.mlp_comm, model.num_layers),
    )


def rules_of(model: ModelConfig) -> Lanes:
    """The lanes of a model that has them."""
    assert model.lanes is not None, "the caller asks for models with lanes only"
    return model.lanes


def lane_of(model: ModelConfig) -> ModelConfig:
    """The sizes of every lane: those of a rank that has only one."""
    return lanes_of_ranks(model, rules_of(model).num_lanes)


def lanes_of_ranks(model: ModelConfig, ranks: int) -> ModelConfig:
    """The sizes of every rank's lanes together, as a model with as many lanes.

    Its LM head has the lanes' rows and is not tied: any lane may need any token's embedding.
    """
    lanes = rules_of(model)
    here = lanes.num_lanes // ranks

    def share(layer: Layer) -> Layer:
        attention, mlp = layer.attention, layer.dense_mlp
        query_heads, kv_heads = attention.num_query_heads // ranks, attention.num_kv_heads // ranks
        return Layer(
            replace(attention, num_query_heads=query_heads, num_kv_heads=kv_heads),
            replace(mlp, intermediate_size=mlp.intermediate_size // ranks),
        )

    return replace(
        model,
        layers=tuple(share(layer) for layer in model.layers),
        vocab_size=-(-model.vocab_size // lanes.num_lanes) * here,
        lanes=replace(lanes, num_lanes=here),
        tied_head=False,
    )
