"""Laneformer on the kernel: sizes of a lane, what lanes exchange, what is refused. Pure.

For the kernel a lane is a small model of its own, on blocks of its own. A rank runs some lanes side
by side. `parallel/lanes.py` says who receives what when.
"""

import math

from soloist.errors import ShapeUnsupported
from soloist.megakernel.limits import MAX_QUERIES
from soloist.megakernel.shape import ModelShape
from soloist.model.config import ModelConfig
from soloist.parallel.lanes import lane_of, modules_of, rules_of
from soloist.parallel.share import RANKS

# Neurons of a lane come in units of so many.
_UNIT = 8


def shape_of_lanes(model: ModelConfig, ranks: int) -> ModelShape:
    """Of a model with lanes. Rope may turn neighbours: rows are brought into another order.

    Raises:
        ShapeUnsupported: the kernel cannot run these lanes.
    """
    _require_supported(model, ranks)
    rules, meets, copies = rules_of(model), rules_of(model).head == "replicate", copies_of(model)
    layers, modules = range(model.num_layers), modules_of(model)
    # Pairs of 32 bits: a number and its epoch.
    of_all = (rules.num_lanes, MAX_QUERIES, model.hidden_size, 8)
    partial_results = {
        name: (copies, *of_all)
        for name, module in zip(("published_mid", "published_in"), modules, strict=True)
        if any(map(module.publishes, layers))
    }
    published = sum(m.publishes(i) for m in modules for i in layers)
    waits = sum(m.sums(i) for m in modules for i in layers)
    here = rules.num_lanes // ranks
    return ModelShape(
        model,
        ranks,
        share=lane_of(model),
        summing_ranks=1,  # results of others come late
        partial_results=partial_results | ({"published_out": of_all} if meets else {}),
        has_lanes=True,
        lanes=rules.num_lanes,
        lanes_here=here,
        vector_lanes=1 if rules.shared_norm_scales else here,
        meets=meets,
        delays={
            "kDelayLayers": rules.delay_layers,
            "kLaneCopies": copies,
            "kEarlySum": rules.early_sum,
            "kAttentionCommunicates": rules.attention_comm,
            "kMlpCommunicates": rules.mlp_comm,
            "kSumBeforeNorm": rules.sum_before_norm,
            "kAloneScale": math.sqrt(rules.num_lanes),
        },
        delays_in_words=(
            f"of {2 * len(layers)} partial results a round a lane publishes {published}, "
            f"{8 * model.hidden_size:,} bytes to each rank, received {rules.delay_layers} layers "
            f"later; {waits} are waited for"
        ),
    )


def copies_of(model: ModelConfig) -> int:
    """Copies of partial results: a lane receives them d layers later, then publishes.

    A lane at layer l has received all results of layer l - d. Their senders had by then received
    all results of layer l - 2 d, so that nobody needs those any more.
    """
    return 2 * min(rules_of(model).delay_layers, model.num_layers)


def _require_supported(model: ModelConfig, ranks: int) -> None:
    """Lanes have one shape, divide over the ranks, and do not meet side by side, or never."""
    lanes, mlp = rules_of(model), model.layers[0].dense_mlp
    if any(layer.mlp != mlp for layer in model.layers):
        given = "layers of different shapes in a model with lanes"
        raise ShapeUnsupported(given, "layers that differ in window and rope only")
    if lanes.num_lanes % ranks:
        fine = ", ".join(str(r) for r in RANKS if lanes.num_lanes % r == 0)
        raise ShapeUnsupported(f"{lanes.num_lanes} lanes on {ranks} ranks", fine)
    if mlp.intermediate_size % (lanes.num_lanes * _UNIT):
        allowed = f"a multiple of {_UNIT} for each of {lanes.num_lanes} lanes"
        raise ShapeUnsupported(f"intermediate_size {mlp.intermediate_size}", allowed)
    talks = lanes.early_sum or lanes.attention_comm or lanes.mlp_comm
    if ranks > 1 and lanes.head == "vocab_parallel" and not talks:
        # What ranks store for sampling would have no order.
        raise ShapeUnsupported(f"lanes that exchange no results, on {ranks} ranks", "one rank")
    if lanes.head == "lane":
        given = "an LM head over all lanes side by side"
        raise ShapeUnsupported(given, "'replicate' or 'vocab_parallel'")
