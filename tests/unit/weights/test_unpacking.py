"""Rows come back from the kernel's image as they were packed."""

from dataclasses import replace

import pytest
import torch

from soloist.megakernel.gpu import TYPICAL
from soloist.megakernel.packed_weights import PackedWeights
from soloist.megakernel.plan import make_plan
from soloist.model.config import Attention
from soloist.model.dtype import Dtype
from soloist.model.families.dense import decoder_tensors
from soloist.weights.packing import gather, pack, place
from soloist.weights.random import random_weights
from soloist.weights.unpacking import Unpacked
from unit.prefill.models import model

DENSE = model(*[Attention(4, 2, 64)] * 2, hidden_size=256, ffn=512, vocab_size=1000)


@pytest.mark.parametrize("tied", [False, True])
def test_rows_come_back_from_the_image(tied: bool) -> None:
    config = replace(DENSE, tied_head=tied)
    plan = make_plan(config, Dtype.BF16, TYPICAL["sm_90a"])
    weights = random_weights(decoder_tensors(config), Dtype.BF16, torch.device("cpu"))
    image = torch.zeros(plan.blocks, plan.image.block_stride // 2, dtype=torch.bfloat16)
    for layer in range(config.num_layers):
        for op in plan.image.kinds[0].operations.values():
            values = weights[f"layers.{layer}.{op.matrix.name}"]
            place(plan, op, layer, pack(plan, op, {"": values}), image)
    packed_head = pack(plan, plan.head, {"": weights["embedding" if tied else "head"]})
    place(plan, plan.head, 0, packed_head, image)
    assert torch.equal(gather(plan, plan.head, 0, image), packed_head)
    table = None if tied else weights["embedding"]
    rows = Unpacked(plan, PackedWeights(image, torch.empty(0), table))
    for name, values in weights.items():
        if values.ndim == 2:
            assert torch.equal(rows(name), values), name
            assert rows(name).is_contiguous()
