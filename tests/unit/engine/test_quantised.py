"""What the engine hands to the decode kernel of quantised weights, without a GPU."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from soloist.engine import Engine, EngineConfig
from soloist.engine import engine as engine_module
from soloist.engine.gpus import Placement
from soloist.engine.kernel import Capacity
from soloist.engine.memory import Staging
from soloist.engine.support import Support, support_of
from soloist.megakernel.gpu import TYPICAL
from soloist.megakernel.plan import Plan
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.folder import shipped_folder
from soloist.model.kv_format import KvFormat
from soloist.model.quantized import AT_LOAD, Codes, Quantized
from soloist.model.torch_types import Weights
from soloist.weights.export import write_export
from soloist.weights.export_plan import Asked, plan_export

CPU = torch.device("cpu")
INT8 = Codes.INT8


class Card(Placement):
    """Ranks on an H200 that lies in the host's memory."""

    def support(
        self,
        config: ModelConfig,
        dtype: Dtype,
        stored: Mapping[str, Quantized] | None = None,
        kv: KvFormat | None = None,
    ) -> Support:
        card = replace(TYPICAL["sm_90a"], num_sms=132 // self.ranks)
        return support_of(card, config, dtype, self.ranks, stored, kv)


@dataclass
class Loaded:
    """What `load_kernel` was given."""

    plan: Plan
    weights: list[Weights]
    keep_rows: bool
    packed_prompts: bool
    capacity: Capacity

    def prepare(self) -> None:
        """Nothing is there to be compiled."""


def load(monkeypatch: pytest.MonkeyPatch, ranks: int = 1, **asked: Any) -> tuple[Engine, Loaded]:
    def load_kernel(
        plan: Plan, weights: list[Weights], _devices: object, capacity: Capacity, *_: object,
        keep_rows: bool, packed_prompts: bool,
    ) -> Loaded:  # fmt: skip
        return Loaded(plan, weights, keep_rows, packed_prompts, capacity)

    monkeypatch.setattr(engine_module, "place", lambda *_: Card((CPU,) * ranks))
    monkeypatch.setattr("soloist.engine.kernel.load_kernel", load_kernel)
    config = EngineConfig(**{"model": "etude", "precision": "bf16", "context_tokens": 256, **asked})
    engine = Engine.load(config)
    assert isinstance(engine.model, Loaded)
    assert engine.model.capacity.page_attention == engine.resolved.page_attention
    return engine, engine.model


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("codes", list(AT_LOAD.values()))
def test_the_kernel_gets_codes_from_a_folder_and_when_rounded(
    codes: Codes, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "made"
    write_export(plan_export(shipped_folder("etude-draft"), Asked(codes, INT8)), folder)
    engine, from_folder = load(monkeypatch, ranks, model=str(folder))
    _, when_rounded = load(
        monkeypatch, ranks, model="etude-draft", weights=codes, head_weights=INT8
    )
    plan = from_folder.plan
    assert plan.formats == when_rounded.plan.formats
    assert len(plan.formats) == 3 * 4 + 1
    # One Hopper GPU reads prompts from codes; several keep rows where they fit.
    assert from_folder.packed_prompts == (ranks == 1)
    assert from_folder.keep_rows == (ranks > 1)
    for seen, wanted in zip(when_rounded.weights, from_folder.weights, strict=True):
        assert seen.keys() == wanted.keys() >= {"embedding", "head", "head.scales"}
        assert all(
            torch.equal(seen[name].view(torch.uint8), wanted[name].view(torch.uint8))
            for name in seen
        )
    assert engine.report.executor == "decode kernel"
    assert engine.report.weights == f"{codes.value}+int8 head"


def test_bytes_of_codes_and_scales_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = load(monkeypatch)
    int4, _ = load(monkeypatch, weights=Codes.INT4, head_weights=INT8)
    assert plain.report.weights == plain.report.weights_in_words == "bf16"
    assert plain.report.num_parameters == int4.report.num_parameters
    layers = plain.report.num_parameters - 320 * 8192
    assert plain.report.streamed_bytes == 2 * plain.report.num_parameters
    wanted = layers * (4 + 16 / 80) / 8 + 320 * 8192
    assert int4.report.streamed_bytes == pytest.approx(wanted, rel=0.02)
    memory = int4.resolved.memory
    assert memory.weights_bytes < plain.resolved.memory.weights_bytes


@pytest.mark.parametrize("on_host", [False, True])
def test_rows_stay_only_where_there_is_room(on_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        engine_module, "stage", lambda *_, **__: Staging(1, on_host=on_host, keeps_rows=False)
    )
    _, loaded = load(monkeypatch, weights=INT8)
    assert not loaded.keep_rows
    assert "layers.0.qkv.scales" in loaded.weights[0]
