"""What a round has to read, of a model whose weights are codes."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from plan.shapes import PUBLIC
from soloist.bench.subject import Subject, rounded_shape
from soloist.megakernel.gpu import TYPICAL
from soloist.megakernel.plan import make_plan
from soloist.model.dtype import Dtype
from soloist.model.quantized import Codes
from soloist.weights.choice import Rounding
from soloist.weights.formats import formats_of


@pytest.mark.parametrize("head", [None, Codes.INT8], ids=["tied", "int8-head"])
def test_codes_and_scales_are_what_is_read(head: Codes | None) -> None:
    shape = rounded_shape(PUBLIC["qwen3-1.7b"], Dtype.BF16, Rounding(Codes.INT4, head))
    formats = formats_of(shape.stored, shape.config)
    plan = make_plan(shape.config, Dtype.BF16, TYPICAL["sm_90a"], formats=formats)
    model = SimpleNamespace(plan=plan, device=torch.device("cpu"))
    subject = Subject("qwen3-1.7b", model, [1], 1, "int4")
    hidden, ffn, layers, vocab = 2048, 6144, 28, 151936
    in_int4 = 0.5 + 2 / 128  # bytes a number, scales of 16 bits included
    kv = 2 * 8 * 128 * 100 * layers * 2
    seen = subject.phase_bytes(99)
    assert seen == {
        "qkv": layers * hidden * (16 + 2 * 8) * 128 * in_int4,
        "output": layers * hidden * 16 * 128 * in_int4,
        "gate_up": layers * 2 * hidden * ffn * in_int4,
        "down": layers * hidden * ffn * in_int4,
        # A row's only scale stands beside each part of it that a block streams at once.
        "head": vocab * hidden * 2 if head is None else pytest.approx(vocab * hidden, rel=0.005),
        "attention": pytest.approx(kv, rel=0.02),
    }
    norms = subject.streamed_bytes(99) - sum(seen.values())
    assert 0 < norms < 0.001 * sum(seen.values()), "in no phase, and small"
    in_16_bits = Subject("", SimpleNamespace(plan=replace(plan, formats={})), [1], 1, "bf16")
    assert subject.streamed_bytes(99) < 0.6 * in_16_bits.streamed_bytes(99)
