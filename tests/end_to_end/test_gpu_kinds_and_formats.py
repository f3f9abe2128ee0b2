"""Layers of several kinds, and matrices in another format, on one GPU and its ranks."""

import pytest
import torch
from torch import Tensor

from interpreter.models import CONTEXT, mixed_model, prompt, quantised, reference_logits
from interpreter.test_kinds_and_formats import matrices_of
from soloist.bench.agreement import forced_logits
from soloist.engine.kernel import Capacity, KernelModel, load_kernel
from soloist.megakernel.gpu import Gpu, gpu_from_capability
from soloist.megakernel.limits import MAX_QUERIES
from soloist.megakernel.plan import Plan, make_plan
from soloist.megakernel.weight_format import INT8_SCALED
from soloist.model.dtype import Dtype
from soloist.model.torch_types import TORCH_DTYPES, Weights
from soloist.weights.sharding import shard_all
from unit.prefill.models import random_weights

pytestmark = pytest.mark.gpu

TOKENS = 150  # three pages
# Relative error of all logits: what rounding to 16 bits may do (tests/interpreter).
MOST_ERROR = 0.02


def here(num_sms: int) -> Gpu:
    """Some SMs of this GPU."""
    p = torch.cuda.get_device_properties("cuda")
    return gpu_from_capability(p.major, p.minor, num_sms, p.shared_memory_per_block_optin)


def loaded(plan: Plan, weights: Weights, *, keep_rows: bool) -> KernelModel:
    devices = [torch.device("cuda", torch.cuda.current_device())] * plan.ranks
    dtype = TORCH_DTYPES[plan.dtype]
    whole = {k: v.to("cuda", dtype if v.is_floating_point() else None) for k, v in weights.items()}
    parts = [shard_all(plan.part_of(rank), whole) for rank in range(plan.ranks)]
    return load_kernel(plan, parts, devices, Capacity(CONTEXT), None, keep_rows=keep_rows)


def require_near(seen: Tensor, wanted: Tensor) -> None:
    assert (seen.cpu() - wanted).norm() / wanted.norm() < MOST_ERROR


def require_reference(model: KernelModel, ids: list[int], wanted: Tensor, vocab_size: int) -> None:
    """Tokens one by one and eight at a time, and as a prompt that the kernel goes on from."""
    one_by_one = forced_logits(model.decoder, vocab_size, ids, 1, TOKENS)
    require_near(one_by_one, wanted)
    assert torch.equal(
        forced_logits(model.decoder, vocab_size, ids, MAX_QUERIES, TOKENS), one_by_one
    )
    for start, stop in ((0, 70), (70, TOKENS - 1)):
        logits = model.prefill.run(ids[start:stop], start, model.page_tables[0])
        assert logits is not None
        require_near(logits, wanted[stop - 1])


@pytest.mark.parametrize("keep_rows", [True, False], ids=["rows", "unpacked"])
@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.FP16], ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_layers_of_several_kinds(ranks: int, dtype: Dtype, keep_rows: bool) -> None:
    config = mixed_model()
    plan = make_plan(config, dtype, here(9), ranks)
    assert len(plan.image.kinds) == 3
    weights = {k: v.to(TORCH_DTYPES[dtype]) for k, v in random_weights(config).items()}
    ids = prompt(config, TOKENS)
    wanted = reference_logits(config, weights, ids)
    require_reference(loaded(plan, weights, keep_rows=keep_rows), ids, wanted, config.vocab_size)


@pytest.mark.parametrize("some", [True, False], ids=["some", "all"])
@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.FP16], ids=lambda dtype: dtype.value)
def test_matrices_in_8_bits(dtype: Dtype, some: bool) -> None:
    """Prompts read them unpacked."""
    config = mixed_model()
    names = [name for name in matrices_of(config) if not some or name.endswith(("down", "qkv"))]
    plan = make_plan(config, dtype, here(9), formats=dict.fromkeys(names, INT8_SCALED))
    rounded = {k: v.to(TORCH_DTYPES[dtype]).float() for k, v in random_weights(config).items()}
    parts, meant = quantised(rounded, names)
    ids = prompt(config, TOKENS)
    wanted = reference_logits(config, meant, ids)
    require_reference(loaded(plan, parts, keep_rows=False), ids, wanted, config.vocab_size)
