"""What memory the kernel takes beside weights and pages."""

from plan.shapes import SHAPES
from soloist.megakernel.gpu import TYPICAL
from soloist.megakernel.memory import workspace_bytes
from soloist.megakernel.plan import make_plan
from soloist.model.dtype import Dtype
from soloist.model.families import read_config


def test_a_workspace_and_a_fresh_one_for_each_build_are_counted() -> None:
    config = read_config(SHAPES["llama-3.2-1b"])
    plan = make_plan(config, Dtype.BF16, TYPICAL["sm_90a"], ranks=4)
    logits_bytes = 8 * (8 + 2) * 4 * plan.exchanges.sampled_rows
    rest = workspace_bytes(plan) - logits_bytes - 3 * plan.exchanges.num_bytes
    assert 0 < rest < plan.exchanges.num_bytes, "scratch of kernels that sample"
