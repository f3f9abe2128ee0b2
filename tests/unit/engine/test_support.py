"""What memory the kernel takes beside weights and pages."""

from pathlib import Path

from soloist.engine.support import Support
from soloist.megakernel.gpu import TYPICAL
from soloist.megakernel.plan import make_plan
from soloist.model.dtype import Dtype
from soloist.model.families import read_config

SHAPES = Path(__file__).parents[3] / "benchmarks" / "shapes"


def test_a_workspace_and_a_fresh_one_for_each_build_are_counted() -> None:
    config = read_config(SHAPES / "llama-3.2-1b.json")
    plan = make_plan(config, Dtype.BF16, TYPICAL["sm_90a"], ranks=4)
    memory = Support(plan).memory
    assert memory is not None
    logits_bytes = 25 * 4 * plan.exchanges.sampled_rows
    rest = memory.workspace_bytes - logits_bytes - 3 * plan.exchanges.num_bytes
    assert 0 < rest < plan.exchanges.num_bytes, "scratch of kernels that sample"


def test_where_there_is_no_plan_nothing_is_counted() -> None:
    assert Support(None, "it runs elsewhere").memory is None
