"""What one decode step must move and compute, and how fast that can be at best.

The speed of light of decoding one request: every weight that takes part and every key and value in
sight is read once a token, so no machine makes more than

    tokens/s = bandwidth × GPUs / bytes a token

even if computing, waiting and exchanging took no time. Nothing stays in a cache from one token to
the next; only of models of a few tens of megabytes could it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.memory import kv_bytes_per_token, kv_bytes_seen
from soloist.model.tensors import TensorSpec, streamed_values
from soloist.planning.precision import Precision, streamed_bytes


@dataclass(frozen=True, slots=True)
class StepCost:
    """One decode step of one sequence, over all GPUs.

    Attributes:
        weight_bytes: weights read; of a mixture of experts only those that take part.
        kv_bytes: keys and values read.
        flops: multiplications and additions.
        exchanging_layers: layers whose blocks wait for each other; None: not like those measured.
    """

    weight_bytes: int
    kv_bytes: int
    flops: float
    exchanging_layers: int | None

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
    config: ModelConfig, specs: Iterable[TensorSpec], precision: Precision, context_tokens: int
) -> StepCost:
    """The step that sees `context_tokens` positions."""
    specs = tuple(specs)
    values = streamed_values(specs, tied_head=config.tied_head)
    return StepCost(
        weight_bytes=streamed_bytes(specs, precision, tied_head=config.tied_head),
        kv_bytes=kv_bytes_read(config, context_tokens),
        flops=2 * values + attention_flops(config, context_tokens),
        # With lanes, sums arrive late and are not waited for in the same places.
        exchanging_layers=config.num_layers if config.lanes is None else None,
    )


def kv_bytes_read(config: ModelConfig, context_tokens: int) -> int:
    """Keys and values in sight of a step, 16-bit numbers in every precision of the weights."""
    return kv_bytes_seen(config, Dtype.BF16, context_tokens)


def kv_bytes_held(config: ModelConfig, context_tokens: int) -> int:
    """KV cache of so many positions, which layers that slide hold in full as well."""
    return kv_bytes_per_token(config, Dtype.BF16) * context_tokens


def attention_flops(config: ModelConfig, context_tokens: int) -> int:
    """Scores and mixing: 4 · Q · D for each position in sight, layer by layer."""
    attentions = [layer.attention for layer in config.layers]
    return sum(
        4 * a.num_query_heads * a.head_dim * min(context_tokens, a.window or context_tokens)
        for a in attentions
    )
