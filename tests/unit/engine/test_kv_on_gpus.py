"""`--kv` where the decode kernel runs a model, where not, and where codes are the reason."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from interpreter.mixtures import MIXTURES
from interpreter.quantised import alike
from plan.shapes import LANEFORMER, MIXTURE, PUBLIC, SMALL
from soloist.engine import Engine, EngineConfig
from soloist.engine import engine as engine_module
from soloist.engine.config import Resolved, resolve
from soloist.engine.events import Completion
from soloist.engine.kernel import _costs_of_tails
from soloist.engine.reference import ReferenceModel
from soloist.engine.support import support_of
from soloist.errors import KvUnsupported, OutOfMemory, SettingError, ShapeUnsupported
from soloist.kv.memory import kv_bytes_per_token
from soloist.megakernel import plan as plan_module
from soloist.megakernel.gpu import TYPICAL
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.families import read_config, tensors
from soloist.model.kv_format import KV_FORMATS, KvName, kv_format
from soloist.model.torch_types import TORCH_DTYPES
from soloist.reference.build import build_reference
from soloist.reference.device import Reference
from soloist.sampling import SamplingParams
from soloist.weights.random import random_weights
from unit.engine.test_quantised import CPU, Card, load

H200 = TYPICAL["sm_90a"]
NAMES = pytest.mark.parametrize("name", KV_FORMATS)


# --- the kernel has codes -------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
@NAMES
def test_the_kernel_and_all_sums_get_the_codes(
    name: KvName, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, loaded = load(monkeypatch, ranks, kv=name)
    kv = kv_format(name, engine.config, Dtype.BF16)
    assert loaded.plan.kv == engine.resolved.kv == kv
    assert (engine.report.executor, engine.report.refusal) == ("decode kernel", "")
    plain, _ = load(monkeypatch, ranks)
    pages = engine.resolved.kv_tokens // 64
    assert engine.resolved.memory.kv_bytes == loaded.plan.kv_layout.pool_bytes(pages)
    assert engine.resolved.memory.kv_bytes * 1.9 < plain.resolved.memory.kv_bytes
    assert plain.resolved.kv.is_plain
    assert (plain.resolved.page_attention, engine.resolved.page_attention) == (True, False)


@NAMES
def test_more_context_fits_a_gpu(name: KvName) -> None:
    """Where memory bounds it, by as much as a position takes less."""
    config = replace(PUBLIC["llama-3.1-8b"], context_tokens=131_072)

    def resolved(kv: KvName | None, context: int | None = None) -> Resolved:
        support = support_of(H200, config, Dtype.BF16, kv=kv_format(kv, config, Dtype.BF16))
        asked = EngineConfig(kv=kv, context_tokens=context)
        return resolve(
            asked, config, lambda _: tensors(config), Dtype.BF16, "cuda:0", 24 * 10**9,
            lambda _: support.plan,
        )  # fmt: skip

    plain, coded = resolved(None), resolved(name)
    assert plain.context_tokens < config.context_tokens
    assert coded.context_tokens > 1.5 * plain.context_tokens
    assert coded.memory.kv_bytes == pytest.approx(
        coded.kv_tokens * kv_bytes_per_token(config, coded.kv), rel=0.01
    )
    with pytest.raises(OutOfMemory, match="KV cache"):
        resolved(None, coded.context_tokens)


@pytest.mark.parametrize("ranks", [1, 8])
@NAMES
def test_lanes_have_codes(name: KvName, ranks: int) -> None:
    config = read_config(LANEFORMER)
    kv = kv_format(name, config, Dtype.BF16)
    plan = support_of(H200, config, Dtype.BF16, ranks, kv=kv).plan
    assert plan is not None
    assert plan.kv_layout.format == kv


@NAMES
def test_mixtures_have_codes_beside_bf16(name: KvName) -> None:
    config = read_config(MIXTURE)
    plan = support_of(H200, config, Dtype.BF16, kv=kv_format(name, config, Dtype.BF16)).plan
    assert plan is not None
    assert plan.kv_layout.format.name == name
    with pytest.raises(KvUnsupported, match="beside fp16"):
        support_of(H200, config, Dtype.FP16, kv=kv_format(name, config, Dtype.FP16))


@NAMES
def test_what_reading_ends_of_prompts_takes_was_not_measured(name: KvName) -> None:
    config = PUBLIC["llama-3.1-8b"]
    for kv, is_known in ((None, True), (name, False)):
        plan = support_of(H200, config, Dtype.BF16, kv=kv_format(kv, config, Dtype.BF16)).plan
        assert plan is not None
        assert (_costs_of_tails(plan, attends_pages=False) is not None) == is_known


# --- codes are what the kernel refuses ------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
@NAMES
def test_in_fp16_they_are_refused_before_anything_is_loaded(
    name: KvName, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rather than run by the reference, which nobody asked for, or on fewer GPUs."""
    monkeypatch.setattr(engine_module, "load_ranks", lambda *_: pytest.fail("it is loaded"))
    with pytest.raises(KvUnsupported, match=f"--kv is '{name}'.*beside fp16.*allowed: bf16") as one:
        load(monkeypatch, ranks, precision="fp16", kv=name)
    assert one.value.hint == "take --precision bf16, or leave out --kv"
    with pytest.raises(KvUnsupported):
        load(monkeypatch, ranks, precision="fp16", kv=name, weights="int4")


def test_another_reason_is_told_with_another_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ShapeUnsupported("keys and values in int8 on this chip", "16 bits")

    monkeypatch.setattr(plan_module, "require_kv", refuse)
    kv = kv_format("int8", SMALL, Dtype.BF16)
    for stored in (None, alike(SMALL, "int4")):
        with pytest.raises(KvUnsupported, match=r"'int8', but .* on this chip \(allowed") as caught:
            support_of(H200, SMALL, Dtype.BF16, stored=stored, kv=kv)
        assert caught.value.hint == "leave out --kv"
    assert support_of(H200, SMALL, Dtype.BF16).plan is not None


@NAMES
def test_attention_from_pages_has_no_codes(name: KvName, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "load_ranks", lambda *_: pytest.fail("it is loaded"))
    with pytest.raises(SettingError, match=rf"'{name}' \(allowed: none with --page-attention"):
        load(monkeypatch, kv=name, page_attention=True)
    load_was_reached = pytest.raises(pytest.fail.Exception, match="it is loaded")
    with load_was_reached:
        load(monkeypatch, page_attention=True)


# --- the kernel refuses the model anyway ----------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "dtype", "named"),
    [
        (SMALL, Dtype.FP32, "fp32"),
        (replace(SMALL, embedding_scale=2.0), Dtype.FP16, "a scale of embeddings"),
    ],
)
def test_its_own_reason_is_told_and_the_reference_runs(
    config: ModelConfig, dtype: Dtype, named: str
) -> None:
    found = support_of(H200, config, dtype, kv=kv_format("int8", config, dtype))
    assert found == support_of(H200, config, dtype)
    assert named in found.refusal
    assert found.refusal.endswith("running the reference implementation")


@NAMES
def test_the_reference_then_keeps_codes(
    name: KvName, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The very engine that a GPU would have, on tensors of a CPU."""
    monkeypatch.setattr(engine_module, "place", lambda *_: Card((CPU,)))
    asked = EngineConfig(
        "etude-draft", precision="fp32", context_tokens=256, kv=name, keeps_prefixes=True,
        cache_dir=tmp_path,
    )  # fmt: skip
    engine = Engine.load(asked)
    assert isinstance(engine.model, ReferenceModel)
    assert "fp32 weights" in engine.report.refusal
    assert engine.report.executor == "reference"
    assert engine.model.drafting is None
    cache = engine.model.reference.new_cache(10)
    assert cache.num_bytes == 10 * kv_bytes_per_token(engine.config, engine.resolved.kv)
    greedy = SamplingParams(max_tokens=8, ignore_eos=True)
    first, again = (list(engine.generate("def add(a, b):", greedy))[-1] for _ in range(2))
    assert isinstance(first, Completion)
    assert isinstance(again, Completion)
    assert first.text == again.text != ""


@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.FP16])
@NAMES
def test_so_does_a_mixture_in_16_bits(name: KvName, dtype: Dtype) -> None:
    """Keys and values of its first layer are near; behind it tokens may go to other experts."""
    config = MIXTURES["softmax"]
    ids = torch.randint(config.vocab_size, (24,), generator=torch.Generator().manual_seed(0))

    def reference(kv: KvName | None) -> Reference:
        weights = random_weights(tensors(config), dtype, CPU)
        return build_reference(config, weights, kv_format(kv, config, dtype))

    coded, exact = reference(name), reference(None)
    cache, wide = coded.new_cache(24), exact.new_cache(24)
    logits, right = coded.forward(ids, 0, cache, "all"), exact.forward(ids, 0, wide, "all")
    assert logits is not None
    assert right is not None
    assert 0 < float((logits - right).norm() / right.norm()) < 0.5
    assert cache.num_bytes < 0.6 * wide.num_bytes
    keys, values = cache.view(0, 0, 24)
    wide_keys, wide_values = wide.view(0, 0, 24)
    assert keys.dtype == values.dtype == TORCH_DTYPES[dtype]
    for seen, number in ((keys, wide_keys), (values, wide_values)):
        assert 0 < float((seen - number).abs().max()) < float(number.abs().max()) / 8
