"""Layers of several kinds, and quantised matrices, on one GPU and its ranks."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from interpreter.models import CONTEXT, mixed_model, prompt, reference_logits
from interpreter.quantised import (
    FORMATS,
    alike,
    as_q4_k_m,
    formats_of,
    matrices_of,
    quantised,
)
from soloist.bench.agreement import forced_logits
from soloist.engine.kernel import Capacity, KernelModel, load_kernel
from soloist.megakernel.gpu import Gpu, gpu_from_capability
from soloist.megakernel.header import Build
from soloist.megakernel.limits import MAX_QUERIES
from soloist.megakernel.plan import Plan, make_plan
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.quantized import Quantized
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
    # What a quantised matrix consists of has types of its own.
    own = {name + part for name, kind in plan.formats.items() for part in kind.parts}
    whole = {
        name: values.to("cuda", None if name in own else TORCH_DTYPES[plan.dtype])
        for name, values in weights.items()
    }
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


def require_quantised(config: ModelConfig, stored: dict[str, Quantized], dtype: Dtype) -> None:
    """Prompts read matrices unpacked."""
    plan = make_plan(config, dtype, here(9), formats=formats_of(stored))
    rounded = {k: v.to(TORCH_DTYPES[dtype]).float() for k, v in random_weights(config).items()}
    parts, meant = quantised(rounded, stored)
    ids = prompt(config, TOKENS)
    wanted = reference_logits(config, meant, ids)
    require_reference(loaded(plan, parts, keep_rows=False), ids, wanted, config.vocab_size)


@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.FP16], ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("kind", FORMATS)
def test_quantised_matrices(kind: str, dtype: Dtype) -> None:
    """The head included, of layers of two sizes: more of them take their time to compile."""
    config = replace(mixed_model(), layers=mixed_model().layers[:2])
    require_quantised(config, alike(config, kind), dtype)


@pytest.mark.parametrize("kind", ["int4", "int8", "int4-zeros"])
def test_no_bit_depends_on_when_buffers_are_cleaned(kind: str) -> None:
    """The cleaner also finds the norm before gate_up. A late one does that in time."""
    config = mixed_model()
    stored = alike(config, kind)
    plan = make_plan(config, Dtype.BF16, here(9), formats=formats_of(stored))
    parts, _ = quantised(random_weights(config), stored)
    decoder, ids = loaded(plan, parts, keep_rows=False).decoder, prompt(config, TOKENS)
    wanted = forced_logits(decoder, config.vocab_size, ids, 1, TOKENS)
    decoder.load(Build(cleaner_cycles=50_000))  # longer than a layer takes
    assert torch.equal(forced_logits(decoder, config.vocab_size, ids, 1, TOKENS), wanted)


def test_a_format_for_each_matrix() -> None:
    """Formats that share a layer, beside matrices that stand for themselves."""
    kinds = ("int4", "int8-zeros", "fp8-block", None, "int4-zeros", "fp8", None)
    config = replace(mixed_model(), layers=mixed_model().layers[:3])
    pairs = zip(matrices_of(config), kinds * 2, strict=False)
    require_quantised(config, {name: FORMATS[kind] for name, kind in pairs if kind}, Dtype.BF16)


@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.FP16], ids=lambda dtype: dtype.value)
def test_layers_that_differ_in_formats_only(dtype: Dtype) -> None:
    """As a file in Q4_K_M has them: some layers share a matrix's code with others, and some not."""
    first, config = mixed_model().layers[0], mixed_model()
    config = replace(config, layers=(first,) * 8)
    plan = make_plan(config, dtype, here(9), formats=formats_of(as_q4_k_m(config)))
    assert plan.image.kind_of == (0, 1, 1, 0, 1, 1, 0, 0)
    require_quantised(config, as_q4_k_m(config), dtype)
