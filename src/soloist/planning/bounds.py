"""What one decode step must move and compute, and how fast that can be at best.

The speed of light of decoding one request: every weight that takes part and every key and value in
sight is read once a token, so no machine makes more than

    tokens/s = bandwidth × GPUs / bytes a token

even if computing, waiting and exchanging took no time. Nothing stays in a cache from one token to
the next; only of models of a few tens of megabytes could it.
"""

import math
from dataclasses import dataclass, replace
from enum import Enum

from soloist.model.dtype import Dtype
from soloist.model.kv_format import KvFormat
from soloist.model.tensors import TensorSpec
from soloist.planning.model import EXPERTS, Model
from soloist.planning.precision import Precision, weights_bytes


class Kind(Enum):
    """What blocks wait for in a layer.

    With lanes, sums arrive late and are not waited for in the same places. With experts, what a
    layer reads of them is known late. Of models that Soloist does not run, nothing was measured.
    """

    DENSE = "dense"
    LANES = "lanes"
    EXPERTS = "experts"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class StepCost:
    """One decode step of one sequence, over all GPUs.

    Attributes:
        weight_bytes: weights read; of a mixture of experts only those that take part.
        kv_bytes: keys and values read, and what layers keep instead of them.
        flops: multiplications and additions, of all queries.
        layers: in which blocks wait for each other.
        kind: of their exchanges.
        kv_name: how keys and values are stored, as `KvFormat.name` says it.
        certain_bytes: of the weights, those of layers that are read whatever experts are chosen.
    """

    weight_bytes: int
    kv_bytes: int
    flops: float
    layers: int
    kind: Kind = Kind.DENSE
    kv_name: str = ""
    certain_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """Everything read."""
        return self.weight_bytes + self.kv_bytes


def speed_limit(num_bytes: int, bandwidth: float, gpus: int) -> float:
    """Tokens a second at best.

    Args:
        num_bytes: read for a token, over all GPUs, each its equal share.
        bandwidth: of one GPU in bytes a second, peak or a share of it.
        gpus: how many read at the same time.
    """
    return bandwidth * gpus / num_bytes


def step_cost(
    model: Model, precision: Precision, context_tokens: int, *, queries: int = 1
) -> StepCost:
    """The step that sees `context_tokens` positions.

    Args:
        model: whose step it is.
        precision: of its weights.
        context_tokens: positions in sight.
        queries: positions of the sequence that the step makes: they share what is read, but each
            may choose experts of its own.
    """
    return StepCost(
        weight_bytes=weight_bytes(model, precision, queries),
        kv_bytes=kv_bytes_read(model, context_tokens),
        flops=queries * (2 * _values_used(model) + attention_flops(model, context_tokens)),
        layers=model.num_layers,
        kind=kind_of(model),
        kv_name="" if model.kv.is_plain else model.kv.name,
        certain_bytes=_certain_bytes(model, precision),
    )


def prompt_cost(model: Model, precision: Precision, tokens: int) -> StepCost:
    """Reading a prompt of so many tokens: one wide step over half of it, on average, and no head.

    The head is left out, since only the last token needs it.
    """
    rest = tuple(spec for spec in model.specs if spec.name != "head")
    unfolded = tuple(replace(cache, flops=cache.prompt_flops) for cache in model.caches)
    headless = replace(model, specs=rest, tied_head=False, caches=unfolded)
    return step_cost(headless, precision, max(1, tokens // 2), queries=tokens)


def weight_bytes(model: Model, precision: Precision, queries: int = 1) -> int:
    """Weights that a step reads; of experts only those that its queries choose."""
    return math.ceil(
        sum(
            weights_bytes([spec], precision) * model.share_read(spec, queries)
            for spec in _streamed(model)
        )
    )


def _certain_bytes(model: Model, precision: Precision) -> int:
    of_layers = [s for s in model.specs if s.name.startswith("layers.") and EXPERTS not in s.name]
    return weights_bytes(of_layers, precision)


def kv_bytes_read(model: Model, context_tokens: int, stored: KvFormat | None = None) -> int:
    """Keys and values in sight of a step, as the model or, if it is given, `stored` says.

    What layers keep instead of them is read and written.
    """
    values = sum(cache.values * cache.seen(context_tokens) for cache in model.caches)
    return (stored or model.kv).num_bytes(values) + 2 * _state_bytes(model)


def kv_bytes_held(model: Model, context_tokens: int) -> int:
    """KV cache of so many positions, which layers that slide hold in full as well."""
    return kv_bytes_per_token(model) * context_tokens + _state_bytes(model)


def kv_bytes_per_token(model: Model) -> int:
    """What one more position adds to the KV cache."""
    return model.kv.num_bytes(sum(cache.values for cache in model.caches))


def attention_flops(model: Model, context_tokens: int) -> int:
    """Scores and mixing of one query; a state decays, is read, corrected and read again."""
    seen = sum(cache.flops * cache.seen(context_tokens) for cache in model.caches)
    return seen + 7 * model.state_values


def _state_bytes(model: Model) -> int:
    return model.state_values * Dtype.FP32.num_bytes


def _values_used(model: Model) -> float:
    """Weights that one query multiplies with."""
    return sum(spec.num_values * model.share_read(spec, 1) for spec in _streamed(model))


def _streamed(model: Model) -> list[TensorSpec]:
    """All tensors but an untied embedding, of which one row is looked up."""
    return [spec for spec in model.specs if model.tied_head or spec.name != "embedding"]


def kind_of(model: Model) -> Kind:
    """What layers of a model wait for."""
    if model.config is None:
        return Kind.OTHER
    if model.mixture is not None:
        return Kind.EXPERTS
    return Kind.DENSE if model.config.lanes is None else Kind.LANES
