"""How a mixture's weights are put in place for its prompts, with the operations of plain torch."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from end_to_end.test_experts import write_mixture
from interpreter.mixtures import MIXTURES, SMS
from interpreter.models import CONTEXT, gpu, prompt, reference_logits
from interpreter.quantised import alike, formats_of, quantised
from live_bytes import LiveBytes
from plan.shapes import MIXTURE
from soloist.engine import Engine, EngineConfig, engine, kernel
from soloist.engine.config import Resolved
from soloist.engine.drafting import PREDICTIONS, drafting_of, queries_beside
from soloist.engine.gpus import Placement
from soloist.engine.kernel import Capacity, _load_rank, _Reads
from soloist.engine.support import Support, support_of
from soloist.kv.pool import PagePool
from soloist.megakernel.gpu import TYPICAL
from soloist.megakernel.packed_weights import PackedWeights
from soloist.megakernel.plan import Plan, make_plan
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.families import read_config
from soloist.model.quantized import Codes
from soloist.model.torch_types import Weights
from soloist.prefill.elementwise import TorchElementwise, Vectors
from soloist.prefill.runner import Prefill
from soloist.weights.packed import EXPERTS
from soloist.weights.sharding import shard_all
from soloist.weights.unpacking import Unpacked
from unit.prefill.models import random_weights

CPU, TOKENS = torch.device("cpu"), 150


class NoDecoder:
    """In the place of what launches the kernel."""

    def __init__(self, *_: object, **__: object) -> None:
        self.page_tables = torch.zeros(1, CONTEXT // 64, dtype=torch.int32)


class OnCpu(TorchElementwise):
    """Made like `FusedElementwise`."""

    def __init__(
        self, config: ModelConfig, vectors: Vectors, pool: PagePool, arch: str,
        cache_root: Path | None, rope: Tensor | None = None, ranks: int = 1, pages: object = None,
    ) -> None:  # fmt: skip
        del arch, cache_root, ranks, pages
        super().__init__(config, vectors, pool, rope)


def unpacked_by_torch(plan: Plan, packed: PackedWeights, *_: object) -> Unpacked:
    """Called like `UnpackedMatrices`."""
    return Unpacked(plan, packed)


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced: list[tuple[Any, str, Any]] = [
        (kernel, "Decoder", NoDecoder),
        (kernel, "FusedElementwise", OnCpu),
        (kernel, "UnpackedMatrices", unpacked_by_torch),
        (torch.cuda, "synchronize", lambda _: None),
    ]
    for place, name, value in replaced:
        monkeypatch.setattr(place, name, value)


@pytest.mark.parametrize("reads", [_Reads.ROWS, _Reads.UNPACKED], ids=["rows", "unpacked"])
@pytest.mark.parametrize("kind", [None, "fp8-block", "int4"], ids=str)
@pytest.mark.parametrize("name", ["half steps", "some layers dense", "shared, gated"])
def test_prompts_of_what_was_loaded(name: str, kind: str | None, reads: _Reads) -> None:
    config = MIXTURES[name]
    stored = alike(config, kind) if kind else {}
    formats = formats_of(stored)
    rounded = {
        k: v if "router" in k else v.bfloat16().float() for k, v in random_weights(config).items()
    }
    parts, meant = quantised(rounded, stored)
    own = {matrix + part for matrix, of in formats.items() for part in of.parts}
    weights = {
        k: v if k in own or "router" in k else v.bfloat16() for k, v in parts.items()
    }  # fmt: skip
    plan = make_plan(config, Dtype.BF16, gpu(SMS), formats=formats)
    share = shard_all(plan.part_of(0), weights)
    rank = _load_rank(plan, 0, share, CPU, Capacity(CONTEXT), None, reads)
    ids = prompt(config, TOKENS)
    wanted, errors = reference_logits(config, meant, ids), []
    for start, stop in pairwise((0, 1, 70, 71, 100, TOKENS)):
        seen = Prefill([rank.prefill]).run(ids[start:stop], start, [2, 0, 1])
        assert seen is not None
        errors.append((seen - wanted[stop - 1]).norm() / wanted[stop - 1].norm())
    # Where a choice hangs on rounding a token has another expert, which is no small difference.
    assert float(torch.stack(errors).median()) < 0.02


class Arrived(Exception):
    """What an engine would run."""

    def __init__(self, plan: Plan, weights: list[Weights], resolved: Resolved) -> None:
        super().__init__()
        self.plan, self.weights, self.resolved = plan, weights, resolved


@pytest.mark.parametrize("codes", [None, Codes.INT8])
def test_an_engine_has_experts_packed_while_it_reads_them(
    codes: Codes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is one copy of them, which the estimate counted."""
    large = {"hidden_size": 512, "moe_intermediate_size": 512, "num_experts": 32}
    folder = write_mixture(tmp_path / "mixture", **large)

    def support(_: Placement, config: ModelConfig, dtype: Dtype, *how: Any) -> Support:
        return support_of(gpu(16), config, dtype, 1, *how)

    def arrive(
        _: EngineConfig, plan: Plan, weights: list[Weights], resolved: Resolved,
        *_more: Any, **_named: Any,
    ) -> None:  # fmt: skip
        raise Arrived(plan, weights, resolved)

    monkeypatch.setattr(Placement, "support", support)
    monkeypatch.setattr(engine, "_kernel", arrive)
    # A GPU holds what a CPU may leave in files.
    monkeypatch.setattr(engine, "_in_files", lambda *_: frozenset())
    asked = EngineConfig(str(folder), device="cpu", precision="bf16", weights=codes)
    with pytest.raises(Arrived) as caught, LiveBytes() as live:
        Engine.load(asked)
    plan, (own,) = caught.value.plan, caught.value.weights
    assert own[EXPERTS].numel() == plan.image.experts_bytes
    assert not [name for name in own if ".experts." in name]
    counted = caught.value.resolved.memory.weights_bytes
    assert counted > plan.image.experts_bytes
    assert live.most_bytes < counted + plan.image.experts_bytes / 2


def test_a_round_that_checks_predictions_costs_what_its_queries_read() -> None:
    """Eight queries of qwen3-30b-a3b that choose at random read 4.2 times the bytes of one."""
    plan = make_plan(read_config(MIXTURE), Dtype.BF16, TYPICAL["sm_90a"])
    costs = drafting_of(plan).costs.of_drafts
    assert list(costs) == sorted(set(costs))
    plain = PREDICTIONS.costs.of_drafts
    chosen = 48 * 8 * 3 * 768 * 2048 * 2 / plan.image.streamed_bytes  # share of the bytes
    assert costs[0] / plain[0] == pytest.approx(1 + chosen * (15.5 / 8 - 1), rel=0.005)
    assert costs[-1] / plain[-1] == pytest.approx(1 + chosen * (51.6 / 8 - 1), rel=0.005)
    assert not drafting_of(plan).looks_up
    dense = replace(MIXTURES["softmax"], layers=MIXTURES["some layers dense"].layers[:1])
    costs = drafting_of(make_plan(dense, Dtype.BF16, gpu(SMS))).costs
    assert costs == PREDICTIONS.costs
    assert kernel._costs_of_tails(plan, attends_pages=True) is None


def test_beside_others_a_query_more_may_read_experts_of_its_own() -> None:
    plan = make_plan(read_config(MIXTURE), Dtype.BF16, TYPICAL["sm_90a"])
    assert queries_beside(plan) == tuple(range(1, 9)), "each reads a seventh more, or a fifth"
    dense = replace(MIXTURES["softmax"], layers=MIXTURES["some layers dense"].layers[:1])
    most = queries_beside(make_plan(dense, Dtype.BF16, gpu(SMS)))
    assert most == (8,) * 8, "a query costs them too little"
