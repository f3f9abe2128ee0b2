"""What is planned for: a model in figures, whoever can run it. Pure.

Of attention only three things matter here: how many numbers a position leaves behind, how many of
them a later step reads, and what it multiplies with them. Letters as in `model/config.py`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.families import tensors
from soloist.model.kv_format import KvFormat, plain
from soloist.model.tensors import Source, TensorSpec

# Of keys and values, whatever weights are in.
_SIXTEEN_BITS = plain(Dtype.BF16)

# Part of the names of tensors that hold all experts of a layer.
EXPERTS = ".experts."


@dataclass(frozen=True, slots=True)
class Cache:
    """What one layer keeps of each position.

    Attributes:
        values: numbers that a position adds.
        flops: multiplications and additions of a step's query, for each position in sight.
        prompt_flops: the same while a prompt is read.
        heads: parts that GPUs can share out without cutting up positions.
        window: positions that are read at most; None: all.
    """

    values: int
    flops: int
    prompt_flops: int
    heads: int
    window: int | None = None

    def seen(self, context_tokens: int) -> int:
        """Positions that a step reads."""
        return min(context_tokens, self.window or context_tokens)


@dataclass(frozen=True, slots=True)
class Mixture:
    """Experts of each layer that has them.

    Attributes:
        experts: there are.
        chosen: by each token.
    """

    experts: int
    chosen: int

    def share_read(self, spec: TensorSpec, queries: int) -> float:
        """Share of a tensor that a step of m query tokens reads: of experts 1 - (1 - k / E)^m.

        What the router sees is not modelled: each query is taken to choose at random, which is the
        most that a step can read on average.
        """
        if EXPERTS not in spec.name:
            return 1.0
        return 1 - (1 - self.chosen / self.experts) ** queries


@dataclass(frozen=True, slots=True)
class Model:
    """A model in figures.

    Attributes:
        family: the `model_type` it was read from.
        context_tokens: positions the model was made for.
        num_layers: transformer layers.
        tied_head: the head is the embedding.
        specs: all tensors; those of experts hold all experts of a layer.
        caches: of all layers; one that keeps two things of a position has two.
        state_values: fp32 numbers that layers keep whatever the context is, and rewrite each step.
        mixture: its experts; None for a dense model.
        is_part: of a model that also sees or hears, the part that makes text.
        config: the model as Soloist runs it; None where it does not.
        kv: how keys and values are stored.
    """

    family: str
    context_tokens: int
    num_layers: int
    tied_head: bool
    specs: tuple[TensorSpec, ...]
    caches: tuple[Cache, ...]
    state_values: int = 0
    mixture: Mixture | None = None
    is_part: bool = False
    config: ModelConfig | None = None
    kv: KvFormat = _SIXTEEN_BITS

    def share_read(self, spec: TensorSpec, queries: int) -> float:
        """Share of a tensor that a step of so many queries reads: less than all only of experts."""
        return 1.0 if self.mixture is None else self.mixture.share_read(spec, queries)


def active_parameters(model: Model) -> int:
    """Parameters that one token needs: all but the experts that it does not choose."""
    return round(sum(spec.num_values * model.share_read(spec, 1) for spec in model.specs))


def served(config: ModelConfig) -> Model:
    """A model that Soloist runs: keys and values of grouped heads, in every layer."""
    caches = (
        grouped_cache(a.num_query_heads, a.num_kv_heads, a.head_dim, a.window)
        for a in (layer.attention for layer in config.layers)
    )
    return Model(
        family=config.family,
        context_tokens=config.context_tokens,
        num_layers=config.num_layers,
        tied_head=config.tied_head,
        specs=tuple(stacked(tensors(config), config)),
        caches=tuple(caches),
        mixture=_mixture_of(config),
        config=config,
    )


def _mixture_of(config: ModelConfig) -> Mixture | None:
    """In figures; layers of a model differ in having one, but not in its counts."""
    routers = [mixture.router for mixture in config.mixtures]
    return Mixture(routers[0].num_experts, routers[0].num_chosen) if routers else None


def stacked(specs: Iterable[TensorSpec], config: ModelConfig) -> Iterator[TensorSpec]:
    """The same, with all experts of a layer in one tensor, as in models that are only planned for.

    There are ten thousands of them otherwise.
    """
    count = max((mixture.router.num_experts for mixture in config.mixtures), default=0)
    for spec in specs:
        if spec.expert is None:
            yield spec
        elif spec.expert == 0:
            name = spec.name.replace(f"{EXPERTS}0.", EXPERTS)
            yield TensorSpec(name, (Source(name, (count, *spec.shape)),))


def grouped_cache(query_heads: int, kv_heads: int, head_dim: int, window: int | None) -> Cache:
    """Keys and values of K heads; scores and mixing take 4 · Q · D for a position."""
    flops = 4 * query_heads * head_dim
    return Cache(2 * kv_heads * head_dim, flops, flops, kv_heads, window)
