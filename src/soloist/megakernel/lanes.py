"""What Laneformer's lanes mean to the kernel: whose they are, when they hear each other. Pure.

A lane has its own residual stream and whole heads and neurons, so for the kernel it is a small
model of its own, on blocks of its own. A rank runs some lanes side by side.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from soloist.errors import ShapeUnsupported
from soloist.model.config import Lanes, Layer, ModelConfig

# Neurons of a lane come in units of so many.
_UNIT = 8


@dataclass(frozen=True, slots=True)
class LaneShare:
    """One lane's part of a model.

    Attributes:
        whole: the model.
        lane: whose part this is.
    """

    whole: ModelConfig
    lane: int

    @property
    def vocabulary(self) -> range:
        """Which rows of the LM head are the lane's; its matrix may have room for more."""
        rows = lane_of(self.whole).vocab_size
        last = self.whole.vocab_size
        return range(min(last, rows * self.lane), min(last, rows * (self.lane + 1)))


@dataclass(frozen=True, slots=True)
class Module:
    """Attention or the MLP of all layers, as far as lanes hear of what it gives.

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

    def hears(self, layer: int) -> bool:
        """A lane adds the others' partial results of `delay_layers` before, and its own."""
        return self.communicates and layer >= self.lanes.delay_layers

    def tells(self, layer: int) -> bool:
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
    """The sizes of every lane, as a model with as large a residual stream.

    Its LM head has the lane's rows and is not tied: any lane may need any token's embedding.
    """
    num = rules_of(model).num_lanes

    def share(layer: Layer) -> Layer:
        attention, mlp = layer.attention, layer.mlp
        return Layer(
            replace(
                attention,
                num_query_heads=attention.num_query_heads // num,
                num_kv_heads=attention.num_kv_heads // num,
            ),
            replace(mlp, intermediate_size=mlp.intermediate_size // num),
        )

    return replace(
        model,
        layers=tuple(share(layer) for layer in model.layers),
        vocab_size=-(-model.vocab_size // num),
        tied_head=False,
    )


def require_lanes(model: ModelConfig, ranks: int) -> None:
    """Refuse lanes that the kernel cannot run.

    Raises:
        ShapeUnsupported: they do not divide over the ranks, their neurons not into units, or they
            meet side by side.
    """
    lanes, ffn = rules_of(model), model.layers[0].mlp.intermediate_size
    if lanes.num_lanes % ranks:
        fine = [r for r in (1, 2, 4, 8) if lanes.num_lanes % r == 0]
        raise ShapeUnsupported(
            f"{lanes.num_lanes} lanes on {ranks} ranks", ", ".join(str(r) for r in fine)
        )
    if ffn % (lanes.num_lanes * _UNIT):
        allowed = f"a multiple of {_UNIT} for each of {lanes.num_lanes} lanes"
        raise ShapeUnsupported(f"intermediate_size {ffn}", allowed)
    if lanes.head == "lane":
        raise ShapeUnsupported(
            "an LM head over all lanes side by side", "'replicate' or 'vocab_parallel'"
        )


def lanes_of_rank(model: ModelConfig, ranks: int, rank: int) -> Sequence[int]:
    """Which lanes a rank runs: as many as every other."""
    here = rules_of(model).num_lanes // ranks
    return range(rank * here, (rank + 1) * here)
