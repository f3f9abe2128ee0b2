"""A rank's or a lane's part of a model in numbers, and which layers are of one kind. Pure."""

from dataclasses import dataclass, replace
from functools import cached_property

from soloist.model.config import Layer, ModelConfig
from soloist.parallel.lanes import LaneShare, lane_of
from soloist.parallel.share import Share, part_of, share_of


@dataclass(frozen=True)
class ModelShape:
    """Sizes of what each rank has, or each lane of a model with lanes.

    A lane is to the kernel what a rank of an ordinary model is. Attention has the same sizes in all
    layers; what may differ from layer to layer are biases, norms of queries and keys, the size of
    the MLP, windows and rope.

    Attributes:
        model: the whole.
        ranks: over how many it is spread.
    """

    model: ModelConfig
    ranks: int

    @cached_property
    def share(self) -> ModelConfig:
        """What one rank (or lane) has, as a model: the whole where there is one rank."""
        return lane_of(self.model) if self.model.lanes else share_of(self.model, self.ranks)

    def part_of(self, rank: int) -> Share | LaneShare:
        """What a rank has of the model."""
        return part_of(self.model, self.ranks, rank)

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.model.hidden_size

    @property
    def num_layers(self) -> int:
        """Layers of every rank."""
        return self.model.num_layers

    @property
    def lanes(self) -> int:
        """L; an ordinary model has one."""
        return self.model.lanes.num_lanes if self.model.lanes else 1

    @property
    def lanes_here(self) -> int:
        """Lanes of each rank."""
        return self.lanes // self.ranks if self.model.lanes else 1

    @property
    def is_shared(self) -> bool:
        """Other ranks or lanes have rows of the same layers."""
        return self.lanes_here * self.ranks > 1

    @property
    def meets(self) -> bool:
        """Lanes become one stream before the head."""
        return self.model.lanes is not None and self.model.lanes.head == "replicate"

    @property
    def lane_copies(self) -> int:
        """Copies of lanes' partial results: a lane receives them d layers later, then publishes.

        A lane at layer l has received all results of layer l - d. Their senders had by then
        received all results of layer l - 2 d, so that nobody needs those any more.
        """
        assert self.model.lanes is not None, "lanes"
        return 2 * min(self.model.lanes.delay_layers, self.num_layers)

    @property
    def query_heads(self) -> int:
        """Q."""
        return self.share.layers[0].attention.num_query_heads

    @property
    def kv_heads(self) -> int:
        """K."""
        return self.share.layers[0].attention.num_kv_heads

    @property
    def pool_kv_heads(self) -> int:
        """K in a rank's KV pool: of all its lanes, one after the other."""
        return self.kv_heads * self.lanes_here

    @property
    def head_dim(self) -> int:
        """D."""
        return self.model.layers[0].attention.head_dim

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.query_heads // self.kv_heads

    @property
    def vector_lanes(self) -> int:
        """Lanes of a rank that have norm weights of their own."""
        own = self.model.lanes is not None and not self.model.lanes.shared_norm_scales
        return self.lanes_here if own else 1

    def kind_of(self, layer: int) -> Layer:
        """What decides the code that a layer runs: equal for layers of one kind.

        Windows and rope are left out: they are looked up for each layer.
        """
        sizes = self.share.layers[layer]
        return replace(sizes, attention=replace(sizes.attention, window=None, rope=True))
