"""The decode kernel of every family against the fp32 reference, also as it is built for older GPUs.

Their machine code runs nowhere else, but the driver translates their PTX for a newer GPU: the same
copies, barriers, ring and tiles, only another assembler.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from interpreter.models import CASES, CONTEXT, configured, prompt, reference_logits
from soloist.engine.kernel import KernelModel
from soloist.jit.compiler import Cubin, compile_source
from soloist.jit.source import Source
from soloist.megakernel import launch
from soloist.megakernel.gpu import TYPICAL, arch_from_capability
from soloist.megakernel.launch import Column, Decoder
from soloist.prefill import fused
from unit.megakernel.assembly import assembly
from unit.prefill.models import random_weights

pytestmark = pytest.mark.gpu

TOKENS = 150  # three pages
# Relative error of all logits: what rounding to bf16 may do (tests/interpreter).
MOST_ERROR = 0.02


def translatable(source: Source, arch: str, _cache_root: Path | None) -> Cubin:
    """PTX in the place of machine code, with the report of the latter."""
    return replace(compile_source(source, arch), data=assembly(source, arch))


@pytest.fixture(params=["native", "sm_80", "sm_86"])
def arch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An architecture whose kernels run here from now on."""
    native = arch_from_capability(*torch.cuda.get_device_capability())
    if request.param == "native":
        if native not in TYPICAL:
            pytest.skip(f"no typical figures of {native}")
        yield native
        return
    for module in (launch, fused):
        monkeypatch.setattr(module, "load_or_build", translatable)
    yield request.param


def forced_logits(decoder: Decoder, ids: list[int], columns: int, vocab_size: int) -> Tensor:
    """[T, V] of forced tokens, `columns` positions side by side."""
    rounds = len(ids) // columns
    kept = torch.zeros(rounds, columns, decoder.logits.shape[1], device="cuda")
    side_by_side = [Column(0, c, ids[c::columns], stride=columns) for c in range(columns)]
    decoder.run(side_by_side, rounds, logits=kept)
    return kept.flatten(0, 1)[:, :vocab_size]


@pytest.mark.parametrize("name", CASES)
def test_logits_are_the_references(name: str, arch: str, tmp_path: Path) -> None:
    config, plan = configured(name, tmp_path, like=arch)
    weights = {k: v.to(torch.bfloat16) for k, v in random_weights(config).items()}
    ids = prompt(config, TOKENS)
    wanted = reference_logits(config, weights, ids)
    on_gpu = {k: v.cuda() for k, v in weights.items()}
    device = torch.device("cuda", torch.cuda.current_device())
    kernel = KernelModel(plan, [on_gpu], CONTEXT, [device], None, keep_rows=False)
    one_by_one = forced_logits(kernel.decoder, ids, 1, config.vocab_size)
    error = (one_by_one.cpu() - wanted).norm() / wanted.norm()
    assert error < MOST_ERROR
    for columns in (2, 5):
        assert torch.equal(
            forced_logits(kernel.decoder, ids, columns, config.vocab_size), one_by_one
        )
