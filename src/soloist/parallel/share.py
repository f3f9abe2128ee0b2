"""What each of several ranks has of a model: its share of heads, neurons and vocabulary. Pure.

Tensor parallelism after Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053): a rank has whole heads
and neurons, so that its attention and MLP need nobody, and what they give are partial sums of all
hidden values. Shares have the same sizes on all ranks, which run one kernel. Where a count does
not divide, the last ranks have less and their share is filled up with zeros, which add nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from soloist.errors import ShapeUnsupported
from soloist.model.config import Layer, Mixture, Mlp, ModelConfig
from soloist.parallel.lanes import LaneShare, lanes_of_ranks

RANKS = (1, 2, 4, 8)
# Neurons and rows of the vocabulary come in units of so many rows.
_UNIT = 8
# Of an expert, on each rank.
_LEAST_NEURONS = 16


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of a model whose layers are of one shape.

    Attributes:
        whole: the model.
        ranks: over how many it is spread.
        rank: whose part this is.
    """

    whole: ModelConfig
    ranks: int
    rank: int

    def sizes(self, layer: int = 0) -> Layer:
        """What every rank has of a layer. Heads are the same in all layers."""
        return share_of(self.whole, self.ranks).layers[layer]

    @property
    def lanes(self) -> range:
        """Which lanes are the rank's: none, of an ordinary model."""
        return range(0)

    @property
    def kv_heads(self) -> list[int | None]:
        """Which KV heads the rank's are; None for one of zeros.

        Several ranks have the same one where there are more ranks than heads.
        """
        attention = self.whole.layers[0].attention
        sharing = _ranks_to_a_head(attention.num_kv_heads, self.ranks)
        count = self.sizes().attention.num_kv_heads
        first = self.rank // sharing * count
        return [h if h < attention.num_kv_heads else None for h in range(first, first + count)]

    @property
    def query_heads(self) -> list[int | None]:
        """Which query heads the rank's are, by KV head; None for one of zeros."""
        attention = self.whole.layers[0].attention
        group, own = attention.queries_per_kv_head, self.sizes().attention.queries_per_kv_head
        sharing = _ranks_to_a_head(attention.num_kv_heads, self.ranks)
        members = range(self.rank % sharing * own, (self.rank % sharing + 1) * own)
        return [
            None if head is None or i >= group else head * group + i
            for head in self.kv_heads
            for i in members
        ]

    def neurons(self, layer: int) -> range:
        """Which neurons of a layer's MLP, or of each expert, are the rank's.

        The share may have room for more.
        """
        whole, own = self.whole.layers[layer].each_mlp, self.sizes(layer).each_mlp
        return _part(whole.intermediate_size, own.intermediate_size, self.rank)

    def shared_neurons(self, layer: int) -> range:
        """The same of the MLP beside a layer's experts: none where there is no such MLP."""
        whole, own = self.whole.layers[layer].common_mlp, self.sizes(layer).common_mlp
        if whole is None or own is None:
            return range(0)
        return _part(whole.intermediate_size, own.intermediate_size, self.rank)

    @property
    def vocabulary(self) -> range:
        """Which rows of the LM head are the rank's; the share may have room for more."""
        rows = share_of(self.whole, self.ranks).vocab_size
        return _part(self.whole.vocab_size, rows, self.rank)


def share_of(model: ModelConfig, ranks: int) -> ModelConfig:
    """The sizes of every rank's share, as a model with as large a residual stream.

    Its LM head has the share's rows and is not tied: any rank may need any token's embedding.

    Raises:
        ShapeUnsupported: not a number of ranks that a model is spread over, or experts of too few
            neurons, or that not all of them are alike.
    """
    if ranks not in RANKS:
        raise ShapeUnsupported(f"{ranks} ranks", ", ".join(str(r) for r in RANKS))
    if ranks == 1:
        return model
    if model.lanes is not None:
        return lanes_of_ranks(model, ranks)

    def share(layer: Layer) -> Layer:
        attention = layer.attention
        sharing = _ranks_to_a_head(attention.num_kv_heads, ranks)
        kv_heads = -(-attention.num_kv_heads * sharing // ranks)
        group = -(-attention.queries_per_kv_head // sharing)
        return replace(
            layer,
            attention=replace(attention, num_query_heads=kv_heads * group, num_kv_heads=kv_heads),
            mlp=_share_of_mlp(layer.mlp, ranks),
        )

    return replace(
        model,
        layers=tuple(share(layer) for layer in model.layers),
        vocab_size=_share_rows(model.vocab_size, ranks),
        tied_head=False,
    )


def _share_of_mlp(mlp: Mlp | Mixture, ranks: int) -> Mlp | Mixture:
    """A part of the neurons, of a mixture those of every expert and of the MLP beside them."""
    if isinstance(mlp, Mlp):
        return replace(mlp, intermediate_size=_share_rows(mlp.intermediate_size, ranks))
    neurons = mlp.expert.intermediate_size
    if neurons < ranks * _LEAST_NEURONS:
        given = f"experts of {neurons} neurons on {ranks} ranks"
        raise ShapeUnsupported(given, f"at least {_LEAST_NEURONS} on each")
    shared = mlp.shared
    if shared is not None:
        shared = replace(shared, intermediate_size=_share_rows(shared.intermediate_size, ranks))
    expert = replace(mlp.expert, intermediate_size=_share_rows(neurons, ranks))
    return replace(mlp, expert=expert, shared=shared)


def part_of(model: ModelConfig, ranks: int, rank: int) -> Share | LaneShare:
    """What a rank has of a model: a share of everything, or some lanes."""
    return LaneShare(model, ranks, rank) if model.lanes else Share(model, ranks, rank)


def _ranks_to_a_head(kv_heads: int, ranks: int) -> int:
    """Ranks that have the same KV head, and part its query heads."""
    return ranks // kv_heads if ranks > kv_heads and ranks % kv_heads == 0 else 1


def _share_rows(rows: int, ranks: int) -> int:
    return -(-rows // (ranks * _UNIT)) * _UNIT


def _part(rows: int, share: int, rank: int) -> range:
    return range(min(rows, share * rank), min(rows, share * (rank + 1)))


def padded(places: Sequence[int | None] | range, count: int) -> list[int | None]:
    """`places`, and None up to `count`."""
    return [*places, *[None] * (count - len(places))]
