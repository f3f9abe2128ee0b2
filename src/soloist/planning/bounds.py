"""What one decode step must move and compute, and how fast that can be at best.

The speed of light of decoding one request: every weight that takes part and every key and value in
sight is read once a token, so no machine makes more than

    tokens/s = bandwidth × GPUs / bytes a token

even if computing, waiting and exchanging took no time. Nothing stays in a cache from one token to
the next; only of models of a few tens of megabytes could it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.memory import kv_bytes_per_token, kv_bytes_seen
from soloist.model.tensors import TensorSpec
from soloist.planning.mixture import Mixture
from soloist.planning.precision import Precision, streamed_bytes


@dataclass(frozen=True, slots=True)
class StepCost:
    """One decode step of one sequence, over all GPUs.

    Attributes:
        weight_bytes: weights read; of a mixture of experts only those that take part.
        kv_bytes: keys and values read.
        flops: multiplications and additions, of all columns.
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
    config: ModelConfig,
    specs: Iterable[TensorSpec],
    precision: Precision,
    context_tokens: int,
    *,
    mixture: Mixture | None = None,
    columns: int = 1,
) -> StepCost:
    """The step that sees `context_tokens` positions.

    Args:
        config: of the model.
        specs: its tensors.
        precision: of its weights.
        context_tokens: positions in sight.
        mixture: its experts, if it has any.
        columns: positions of the sequence that the step makes: they share what is read, but each
            may choose experts of its own.
    """

    def share_read(spec: TensorSpec, columns: int = columns) -> float:
        return 1.0 if mixture is None else mixture.share_read(spec, columns)

    specs, tied = tuple(specs), config.tied_head
    used = sum(
        spec.num_values * share_read(spec, 1) for spec in specs if tied or spec.name != "embedding"
    )
    return StepCost(
        weight_bytes=streamed_bytes(specs, precision, tied_head=tied, share_read=share_read),
        kv_bytes=kv_bytes_read(config, context_tokens),
        flops=columns * (2 * used + attention_flops(config, context_tokens)),
        # With lanes, sums arrive late and are not waited for in the same places; what experts wait
        # for was not measured.
        exchanging_layers=config.num_layers if config.lanes is None and mixture is None else None,
    )


def prompt_cost(
    config: ModelConfig,
    specs: Iterable[TensorSpec],
    precision: Precision,
    tokens: int,
    mixture: Mixture | None = None,
) -> StepCost:
    """Reading a prompt of so many tokens: one wide step over half of it, on average, and no head.

    The head is left out, since only the last token needs it.
    """
    headless = replace(config, tied_head=False)
    rest = [spec for spec in specs if spec.name != "head"]
    return step_cost(
        headless, rest, precision, max(1, tokens // 2), mixture=mixture, columns=tokens
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
