"""Bytes that the decode kernel takes beside weights and pages. Pure arithmetic."""

from soloist.megakernel.header import BUILT_FOR
from soloist.megakernel.limits import KEPT_ROUNDS, MAX_QUERIES
from soloist.megakernel.plan import Plan
from soloist.megakernel.sampling_header import sample_workspace_bytes


def workspace_bytes(plan: Plan) -> int:
    """Exchange buffers, logits and the sampler's scratch of a rank."""
    # One workspace, and one that stays fresh for each build.
    exchanges = (1 + len(BUILT_FOR)) * plan.exchanges.num_bytes
    # Logits of some rounds, those of one adjusted, and counts of tokens.
    logits = (KEPT_ROUNDS + 2) * MAX_QUERIES * plan.exchanges.sampled_rows * 4
    return exchanges + logits + sample_workspace_bytes(plan.grid_blocks)
