"""Prefill against the reference: logits and what lies in the pool, however a prompt is cut."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from soloist.errors import ShapeUnsupported
from soloist.model.config import Attention, Lanes, ModelConfig
from soloist.model.rope import Rope, YarnScaling
from soloist.prefill.pages import PagePool
from soloist.prefill.runner import Prefill
from soloist.reference import build_reference
from unit.prefill.models import GQA, MODELS, matrices, model, random_weights, vectors

CPU = torch.device("cpu")
SCATTERED = [5, 0, 3, 1]
TOKENS = 200
CUTS = {
    "one": [0, 200],
    "granules": [0, 32, 96, 128, 200],
    "uneven": [0, 1, 30, 65, 66, 190, 200],
    "pages": [0, 64, 128, 192, 200],
}


def prefill(config: ModelConfig, dtype: torch.dtype = torch.float32, seed: int = 0) -> Prefill:
    weights = random_weights(config, seed)
    a = config.layers[0].attention
    pool = PagePool(config.num_layers, a.num_kv_heads, a.head_dim, 6, dtype, CPU)
    held = matrices(weights, dtype)
    return Prefill(config, held.__getitem__, vectors(weights), pool, most_tokens=256)


def prompt(config: ModelConfig, num_tokens: int = TOKENS) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(config.vocab_size, (num_tokens,), generator=generator)


def reference_logits(config: ModelConfig, ids: Tensor) -> Tensor:
    """[T, V]."""
    reference = build_reference(config, random_weights(config))
    logits = reference.forward(ids, 0, reference.new_cache(len(ids)), "all")
    assert logits is not None
    return logits


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest) -> tuple[ModelConfig, Tensor]:
    config = MODELS[request.param]
    return config, reference_logits(config, prompt(config))


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_logits_are_the_references(case: tuple[ModelConfig, Tensor], cuts: list[int]) -> None:
    config, wanted = case
    run, ids = prefill(config), prompt(config)
    for start, stop in pairwise(cuts):
        logits = run.run(ids[start:stop], start, SCATTERED)
        assert logits is not None
        assert logits.dtype is torch.float32
        torch.testing.assert_close(logits, wanted[stop - 1], rtol=0, atol=2e-5)


def test_a_prompt_in_silent_chunks(case: tuple[ModelConfig, Tensor]) -> None:
    config, wanted = case
    logits = prefill(config).run_prompt(prompt(config), SCATTERED, 70, lambda: False)
    torch.testing.assert_close(logits, wanted[-1], rtol=0, atol=2e-5)


def test_a_longer_prompt_of_a_kept_sequence() -> None:
    config = MODELS["windows"]
    run, ids = prefill(config), prompt(config)
    run.run_prompt(ids[:90], SCATTERED, 40, lambda: False)
    logits = run.run_prompt(ids[90:], SCATTERED, 64, lambda: False, position=90)
    wanted = reference_logits(config, ids)[-1]
    torch.testing.assert_close(logits, wanted, rtol=0, atol=2e-5)


def test_silent_chunks_store_what_others_store() -> None:
    config = MODELS["qwen3"]
    silent, spoken = prefill(config), prefill(config)
    assert silent.run(prompt(config), 0, SCATTERED, want_logits=False) is None
    spoken.run(prompt(config), 0, SCATTERED)
    assert torch.equal(silent.pool.tensor, spoken.pool.tensor)
    assert silent.pool.tensor[[5, 0, 3, 1]].abs().amax((1, 2, 3, 4, 5)).min() > 0
    assert not silent.pool.tensor[[2, 4]].any()


def test_scaled_rope() -> None:
    rope = Rope(1000.0, YarnScaling(4.0, 64, 32.0, 1.0, 1.2, truncate=True))
    config = model(GQA, GQA, rope=rope)
    logits = prefill(config).run(prompt(config), 0, SCATTERED)
    wanted = reference_logits(config, prompt(config))[-1]
    torch.testing.assert_close(logits, wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("after", [0, 1, 2])
def test_cancelling_between_chunks(after: int) -> None:
    config = MODELS["mha"]
    run = prefill(config)
    asked: list[None] = []

    def cancelled() -> bool:
        asked.append(None)
        return len(asked) > after

    assert run.run_prompt(prompt(config), SCATTERED, 64, cancelled) is None
    stored = run.pool.tensor.abs().amax((1, 2, 3, 4, 5)) > 0
    assert stored.nonzero().flatten().tolist() == sorted(SCATTERED[:after])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_16_bits_stay_near(case: tuple[ModelConfig, Tensor], dtype: torch.dtype) -> None:
    config, wanted = case
    logits = prefill(config, dtype).run_prompt(prompt(config), SCATTERED, 70, lambda: False)
    assert logits is not None
    error = (logits - wanted[-1]).norm() / wanted[-1].norm()
    assert error < (0.03 if dtype is torch.bfloat16 else 0.004)


def test_lanes_are_refused() -> None:
    lanes = Lanes(
        2, 1, early_sum=False, attention_comm=True, mlp_comm=True, shared_norm_scales=True,
        head="replicate", sum_before_norm=True,
    )  # fmt: skip
    with pytest.raises(ShapeUnsupported, match="2 lanes"):
        Prefill(replace(MODELS["mha"], lanes=lanes), {}.__getitem__, {}, pool=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (model(Attention(4, 2, 8), Attention(4, 4, 8)), "layers of different sizes"),
        (model(GQA, rope=Rope(1000.0, interleaved=True)), "rotates neighbours"),
    ],
)
def test_what_kernels_cannot_do_is_refused(config: ModelConfig, named: str) -> None:
    with pytest.raises(ShapeUnsupported, match=named):
        prefill(config)
