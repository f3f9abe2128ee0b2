"""What a round has to read, of a model whose weights are codes."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from plan.shapes import PUBLIC, SMALL
from soloist.bench.subject import Subject, rounded_shape, shape_on_cpu
from soloist.kv.memory import kv_bytes_per_token
from soloist.megakernel.gpu import TYPICAL
from soloist.megakernel.plan import make_plan
from soloist.model.dtype import Dtype
from soloist.model.kv_format import KV_FORMATS, KvName
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


@pytest.mark.parametrize(("name", "head_bytes"), [("int8", 130), ("fp8", 130), ("int4", 72)])
def test_a_round_reads_codes_of_keys_and_values(name: KvName, head_bytes: int) -> None:
    shape = rounded_shape(PUBLIC["qwen3-1.7b"], Dtype.BF16, kv=name)
    assert (shape.kv_label, rounded_shape(shape.config, Dtype.BF16).kv_label) == (name, "")
    plan = make_plan(shape.config, Dtype.BF16, TYPICAL["sm_90a"], kv=shape.kv)
    coded, plain = (
        Subject("", SimpleNamespace(plan=one), [1], 1, "bf16")
        for one in (plan, replace(plan, kv=None))
    )
    a_position = 2 * 8 * 28
    assert coded.phase_bytes(99)["attention"] == a_position * 99 * head_bytes
    saved = plain.streamed_bytes(99) - coded.streamed_bytes(99)
    assert saved == a_position * 99 * (256 - head_bytes)


@pytest.mark.parametrize("name", KV_FORMATS)
def test_a_shape_on_a_cpu_keeps_codes(name: KvName) -> None:
    shape = rounded_shape(SMALL, Dtype.FP32, kv=name)
    model = shape_on_cpu(shape, 64)
    cache = model.reference.new_cache(64)
    assert cache.num_bytes == 64 * kv_bytes_per_token(SMALL, shape.kv)
    exact = shape_on_cpu(rounded_shape(SMALL, Dtype.FP32), 64)
    assert exact.reference.new_cache(64).num_bytes > 3 * cache.num_bytes
