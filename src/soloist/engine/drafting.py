"""How requests draft on the decode kernel: what rounds cost that check drafts."""

from dataclasses import replace

from soloist.engine.tail_path import READ_BANDWIDTH, ROUND_LAYER_S
from soloist.megakernel.limits import MAX_QUERIES
from soloist.megakernel.plan import Plan
from soloist.speculation import Costs, Drafting, most_beside
from soloist.speculation.drafter import RIGHT_GUESSES

# How predictions are drafted; where launches draft, other texts are looked up as well. A round that
# checks drafts has more queries, and a launch of its own where the host drafts; what both cost is
# taken to be this, in thousandths of a round.
PREDICTIONS = Drafting(Costs((1300,) * (MAX_QUERIES - 1)), looks_up=False, rests_first=True)

# Weights of a round from which on it takes longer than the host's look for a repetition, which
# every token of an answer has: some 60 µs of an H200. Models below lose more than lookup brings.
_LEAST_LOOKUP_BYTES = 256 * 2**20
# What the host needs on an H200 to end a launch and to begin one that drafts, or the other way.
_CHANGE_S = 1.4e-3
# What one drafted query more costs a round of the build for eight, in thousandths of that round: on
# an H200 six of them beside two requests cost llama-3.2-1b 41, and llama-3.1-8b 30.
_QUERY_COST = 7


def drafting_of(plan: Plan) -> Drafting:
    """How requests draft: predictions, and where launches draft what is looked up as well.

    Of a mixture each query more may read experts of its own. They are taken to be chosen at random,
    which no text does: it shares more.
    """
    round_s = plan.image.streamed_bytes / READ_BANDWIDTH + plan.model.num_layers * ROUND_LAYER_S
    usual = replace(PREDICTIONS, right_guesses=RIGHT_GUESSES + round(_CHANGE_S / round_s))
    if not plan.has_experts:
        is_slow = plan.image.streamed_bytes >= _LEAST_LOOKUP_BYTES
        return replace(usual, looks_up=is_slow)
    costs = [
        round(cost * _bytes_read(plan, 1 + drafts) / plan.image.streamed_bytes)
        for drafts, cost in enumerate(PREDICTIONS.costs.of_drafts, 1)
    ]
    return replace(usual, costs=Costs(tuple(costs)))


def queries_beside(plan: Plan) -> tuple[int, ...]:
    """By the number of requests, queries of a round in which one of them has no draft."""
    alone = _bytes_read(plan, 1)
    costs = [
        round((1000 + _QUERY_COST * queries) * _bytes_read(plan, queries) / alone)
        for queries in range(1, MAX_QUERIES + 1)
    ]
    return most_beside(costs)


def _bytes_read(plan: Plan, queries: int) -> float:
    """Weights that a round of so many queries reads, of a mixture as `drafting_of` says."""
    more = 0.0
    for layer in range(plan.shape.num_layers if plan.has_experts else 0):
        if (experts := plan.image.layer(layer).experts) is not None:
            count, chosen = experts.router.num_experts, experts.router.num_chosen
            distinct = count * (1 - (1 - chosen / count) ** queries)
            more += experts.num_bytes * (distinct - chosen)
    return plan.image.streamed_bytes + more
