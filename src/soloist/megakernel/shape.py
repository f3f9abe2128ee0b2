"""A rank's part of a model in numbers, which layers are of one kind, what ranks exchange. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from soloist.megakernel.limits import EXCHANGE_COPIES, MAX_QUERIES
from soloist.model.config import Layer, ModelConfig
from soloist.parallel.share import share_of


def _no_delays() -> dict[str, bool | int | float]:
    return {
        "kDelayLayers": 1, "kLaneCopies": 1, "kEarlySum": False, "kSumBeforeNorm": False,
        "kAttentionCommunicates": False, "kMlpCommunicates": False, "kAloneScale": 1.0,
    }  # fmt: skip


@dataclass(frozen=True)
class ModelShape:
    """Sizes of what each rank has, or each lane of a model with lanes.

    A lane is to the kernel what a rank of an ordinary model is. Attention has the same sizes in all
    layers; what may differ from layer to layer are biases, norms of queries and keys, the size of
    the MLP, windows and rope.

    Attributes:
        model: the whole.
        ranks: over how many it is spread.
        share: what one rank (or lane) has, as a model: the whole where there is one rank.
        summing_ranks: ranks that wait twice a layer for the sum of what all of them give.
        partial_results: shapes, in bytes, of buffers for what all ranks (or lanes) give to the
            residual stream.
        has_lanes: each lane has a workspace, and what all lanes write lies behind them.
        lanes: L; an ordinary model has one.
        lanes_here: lanes of each rank.
        vector_lanes: lanes of a rank that have norm weights of their own.
        meets: lanes become one stream before the head.
        delays: constants of the header that say when lanes receive what.
        delays_in_words: what lanes exchange, for people.
    """

    model: ModelConfig
    ranks: int
    share: ModelConfig
    summing_ranks: int
    partial_results: Mapping[str, tuple[int, ...]]
    has_lanes: bool = False
    lanes: int = 1
    lanes_here: int = 1
    vector_lanes: int = 1
    meets: bool = False
    delays: Mapping[str, bool | int | float] = field(default_factory=_no_delays)
    delays_in_words: str = ""

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.model.hidden_size

    @property
    def num_layers(self) -> int:
        """Layers of every rank."""
        return self.model.num_layers

    @property
    def is_shared(self) -> bool:
        """Other ranks or lanes have rows of the same layers."""
        return self.lanes_here * self.ranks > 1

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

    def kind_of(self, layer: int) -> Layer:
        """What decides the code that a layer runs: equal for layers of one kind.

        Windows and rope are left out: they are looked up for each layer.
        """
        sizes = self.share.layers[layer]
        return replace(sizes, attention=replace(sizes.attention, window=None, rope=True))


def shape_of_ranks(model: ModelConfig, ranks: int) -> ModelShape:
    """Of an ordinary model, whose ranks add up what they give.

    Raises:
        ShapeUnsupported: the model is not spread over so many.
    """
    sums = (EXCHANGE_COPIES, ranks, MAX_QUERIES, model.hidden_size, 4)
    exchanged = {"sums_mid": sums, "sums_in": sums} if ranks > 1 else {}
    return ModelShape(model, ranks, share_of(model, ranks), ranks, exchanged)
