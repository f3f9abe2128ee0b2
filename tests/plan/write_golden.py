"""Write the golden header anew: PYTHONPATH=tests python -m plan.write_golden."""

from plan.shapes import etude
from plan.test_header import GOLDEN
from soloist.megakernel.gpu import TYPICAL
from soloist.megakernel.header import header
from soloist.megakernel.plan import make_plan
from soloist.model.dtype import Dtype

if __name__ == "__main__":
    plan = make_plan(etude(), Dtype.BF16, TYPICAL["sm_90a"])
    GOLDEN.write_text(header(plan), encoding="utf-8")
