"""Keys and values in 8 and 4 bits in the decode kernel, and prompts."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from end_to_end.test_gpu_kinds_and_formats import here
from interpreter import lane_models
from interpreter.mixtures import MIXTURES, SMS
from interpreter.models import CASES, CONTEXT, Bench, configured, prompt, reference_logits
from soloist.bench.agreement import forced_logits
from soloist.engine import Engine, EngineConfig
from soloist.engine.core import tokens_of
from soloist.engine.kernel import Capacity, KernelModel, load_kernel
from soloist.engine.reference import ReferenceModel
from soloist.engine.request import Request
from soloist.errors import KvUnsupported, ShapeUnsupported
from soloist.kv.layout import PAGE_POSITIONS
from soloist.megakernel.attention_plan import AttentionPlan
from soloist.megakernel.header import Build
from soloist.megakernel.limits import MAX_QUERIES
from soloist.megakernel.plan import Plan, make_plan
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.kv_format import KV_FORMATS, KvName, kv_format
from soloist.model.torch_types import Weights
from soloist.sampling import Sampler, SamplingParams
from soloist.weights.sharding import shard_all
from unit.prefill.models import random_weights

pytestmark = pytest.mark.gpu

NAMES = pytest.mark.parametrize("name", KV_FORMATS)
# Heads of 32, 64, 96 and 128 numbers; norms, a window, layers without rope, one KV head; 8 and 16
# query heads to a KV head.
MODELS = (
    "llama-untied-biases-32", "smollm3-nope-64", "mistral-window-96", "qwen3-norms-128",
    "llama-one-kv-head-128", "mistral-window-sixteen-heads-32", "qwen3-eight-heads-128",
    "qwen3-sixteen-heads-128",
)  # fmt: skip
WITH_ONE_KV_HEAD = ("llama-one-kv-head-128", "qwen3-eight-heads-128", "qwen3-sixteen-heads-128")
TOKENS = 150  # three pages
ROUNDS = 64
# Relative error of what is nearly the same: bf16 in another order, and codes that round to the next
# one by it.
MOST_ERROR = {"int8": 0.03, "fp8": 0.03, "int4": 0.05}


def coded(case: str, name: KvName, folder: Path, ranks: int = 1) -> tuple[ModelConfig, Plan]:
    config, _ = configured(case, folder)
    kv = kv_format(name, config, Dtype.BF16)
    return config, make_plan(config, Dtype.BF16, here(CASES[case][1]), ranks, kv=kv)


def loaded(
    config: ModelConfig,
    plan: Plan,
    *,
    page_attention: bool | None = None,
    weights: Weights | None = None,
    context: int = CONTEXT,
) -> KernelModel:
    devices = [torch.device("cuda", torch.cuda.current_device())] * plan.ranks
    weights = weights or random_weights(config)
    whole = {k: v.to("cuda", torch.bfloat16) for k, v in weights.items()}
    parts = [shard_all(plan.part_of(rank), whole) for rank in range(plan.ranks)]
    capacity = Capacity(context, page_attention=page_attention)
    return load_kernel(plan, parts, devices, capacity, None, keep_rows=True)


def require_near(
    seen: Tensor, config: ModelConfig, plan: Plan, ids: list[int], weights: Weights | None = None
) -> None:
    """No further from the reference with the same codes than the kernel's rounding has to be.

    Rounding activations to bf16 makes many numbers round to the next code, more in some models than
    in others: the interpreter says how far off logits are then.
    """
    weights = {k: v.bfloat16() for k, v in (weights or random_weights(config)).items()}
    wanted = reference_logits(config, weights, ids, plan.kv)
    interpreted = Bench(config, plan, weights, torch.bfloat16).feed(ids, MAX_QUERIES)
    assert error_of(seen, wanted) < 1.2 * error_of(interpreted, wanted)


def error_of(seen: Tensor, wanted: Tensor) -> float:
    return float((seen.cpu() - wanted).norm() / wanted.norm())


def forced(model: KernelModel, ids: list[int], queries: int, rounds: int = ROUNDS) -> Tensor:
    return forced_logits(model.decoder, model.plan.model.vocab_size, ids, queries, rounds)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", MODELS)
@NAMES
def test_logits_are_the_references_with_the_same_codes(
    name: KvName, case: str, ranks: int, tmp_path: Path
) -> None:
    """And a query has the bits that it has alone; so have the pages, byte for byte."""
    if ranks > 1 and case in WITH_ONE_KV_HEAD:
        pytest.skip("one KV head is not spread")
    config, plan = coded(case, name, tmp_path, ranks)
    model, ids = loaded(config, plan), prompt(config, TOKENS)
    one_by_one = forced(model, ids, 1)
    require_near(one_by_one, config, plan, ids)
    pages = [pool.tensor.clone() for pool in model.pools]
    for queries in (2, 5, MAX_QUERIES):
        for pool in model.pools:
            pool.tensor.zero_()
        assert torch.equal(forced(model, ids, queries), one_by_one)
        for pool, kept in zip(model.pools, pages, strict=True):
            assert torch.equal(pool.tensor, kept)


@pytest.mark.parametrize("ranks", [1, 2])
@NAMES
def test_lanes(name: KvName, ranks: int, tmp_path: Path) -> None:
    """By rounds and by a pass."""
    config, plain, weights = lane_models.configured("mean of lanes", tmp_path, ranks)
    kv = kv_format(name, config, Dtype.BF16)
    plan = make_plan(config, Dtype.BF16, here(plain.gpu.num_sms), ranks, kv=kv)
    ids = prompt(config, TOKENS)
    model = loaded(config, plan, weights=weights)
    one_by_one = forced(model, ids, 1)
    require_near(one_by_one, config, plan, ids, weights)
    wanted = reference_logits(config, {k: v.bfloat16() for k, v in weights.items()}, ids, kv)
    for queries in (5, MAX_QUERIES):
        assert torch.equal(forced(model, ids, queries), one_by_one)
    for start, stop in ((0, 70), (70, TOKENS)):
        logits = model.prefill.run(ids[start:stop], start, model.page_tables[0])
        assert logits is not None
        assert error_of(logits, wanted[stop - 1]) < 2 * MOST_ERROR[name]


@pytest.mark.parametrize("ranks", [1, 2])
@NAMES
def test_experts(name: KvName, ranks: int) -> None:
    config = MIXTURES["softmax"]
    kv = kv_format(name, config, Dtype.BF16)
    plan = make_plan(config, Dtype.BF16, here(SMS), ranks, kv=kv)
    weights = random_weights(config)
    model, ids = loaded(config, plan, weights=weights), prompt(config, TOKENS)
    one_by_one = forced(model, ids, 1)
    wanted = reference_logits(config, {k: v.bfloat16() for k, v in weights.items()}, ids, kv)
    # Where a choice hangs on rounding a token has another expert, which is no small difference.
    errors = (one_by_one.cpu() - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert float(errors.median()) < MOST_ERROR[name]
    assert torch.equal(forced(model, ids, MAX_QUERIES), one_by_one)


@NAMES
def test_the_reference_has_codes_on_a_gpu_too(name: KvName) -> None:
    """Where the kernel does not run the model: in fp32, nearly the CPU's logits."""
    seen = []
    for device in ("cpu", "cuda"):
        asked = EngineConfig(
            "etude-draft", device=device, precision="fp32", context_tokens=200, kv=name
        )
        engine = Engine.load(asked)
        assert isinstance(engine.model, ReferenceModel)
        assert engine.resolved.kv.name == name
        reference, vocab = engine.model.reference, engine.config.vocab_size
        ids = torch.tensor([7 + n * n % (vocab - 7) for n in range(TOKENS)])
        cache = reference.new_cache(TOKENS)
        logits = reference.forward(ids.to(reference.device), 0, cache, "all")
        assert logits is not None
        seen.append(logits.cpu().clone())
    on_cpu, on_gpu = seen
    assert error_of(on_gpu, on_cpu) < MOST_ERROR[name]


@NAMES
def test_launches_of_one_round_and_of_many_give_the_same_bits(name: KvName, tmp_path: Path) -> None:
    config, plan = coded("qwen3-norms-128", name, tmp_path)
    model, ids = loaded(config, plan), prompt(config, TOKENS)
    for queries in (1, MAX_QUERIES):
        many = forced(model, ids, queries, ROUNDS)
        assert torch.equal(forced(model, ids, queries, 1), many)


@pytest.mark.parametrize("case", ["smollm3-nope-64", "mistral-window-96", "qwen3-norms-128"])
@NAMES
def test_split_caches(
    name: KvName, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several blocks of a KV head share a cache from its second page on."""
    monkeypatch.setattr(AttentionPlan, "unsplit_positions", property(lambda _: PAGE_POSITIONS))
    config, plan = coded(case, name, tmp_path)
    model, ids = loaded(config, plan), prompt(config, TOKENS)
    one_by_one = forced(model, ids, 1)
    require_near(one_by_one, config, plan, ids)
    assert torch.equal(forced(model, ids, MAX_QUERIES), one_by_one)


@NAMES
def test_pages_hold_what_the_interpreter_rounds(name: KvName, tmp_path: Path) -> None:
    config, plan = coded("smollm3-nope-64", name, tmp_path)
    model, ids = loaded(config, plan), prompt(config, 96)
    forced(model, ids, 1)
    weights = {k: v.bfloat16() for k, v in random_weights(config).items()}
    bench = Bench(config, plan, weights, torch.bfloat16)
    bench.feed(ids, MAX_QUERIES)
    table = torch.tensor(model.page_tables[0], device=model.device)
    for layer in range(config.num_layers):
        here_read = model.pools[0].read(layer, table, 0, len(ids))
        wanted = bench.pool.read(layer, bench.memory.page_tables[0], 0, len(ids))
        for seen, exact in zip(here_read, wanted, strict=True):
            assert error_of(seen.float(), exact.float()) < MOST_ERROR[name]


@pytest.mark.parametrize("queries", [1, MAX_QUERIES])
@NAMES
def test_no_bit_depends_on_when_buffers_are_cleaned(
    name: KvName, queries: int, tmp_path: Path
) -> None:
    config, plan = coded("smollm3-nope-64", name, tmp_path)
    model, ids = loaded(config, plan), prompt(config, 96)
    wanted = forced(model, ids, queries)
    model.decoder.load(Build(cleaner_cycles=50_000))  # type: ignore[union-attr]  # one rank
    assert torch.equal(forced(model, ids, queries), wanted)


@pytest.mark.parametrize("case", ["qwen3-norms-128", "mistral-window-96"])
@NAMES
def test_prompts_are_the_references_and_the_kernel_goes_on(
    name: KvName, case: str, tmp_path: Path
) -> None:
    config, plan = coded(case, name, tmp_path)
    model, ids = loaded(config, plan), prompt(config, TOKENS)
    weights = {k: v.bfloat16() for k, v in random_weights(config).items()}
    wanted = reference_logits(config, weights, ids, plan.kv)
    for start, stop in ((0, 70), (70, TOKENS - 1)):
        logits = model.prefill.run(ids[start:stop], start, model.page_tables[0])
        assert logits is not None
        assert error_of(logits, wanted[stop - 1]) < 2 * MOST_ERROR[name]
    sampler = Sampler(SamplingParams(max_tokens=8, ignore_eos=True), config.vocab_size, ids)
    assert len(list(tokens_of(model, Request(ids, sampler)))) == 8


@NAMES
def test_a_prompts_bits_do_not_depend_on_how_it_is_cut(name: KvName) -> None:
    """Of étude, which has prompts of several chunks: pages and logits, graphs, cached prompts."""
    engine = Engine.load(EngineConfig("etude", device="cuda", kv=name))
    model = engine.model
    assert isinstance(model, KernelModel)
    assert model.plan.kv is not None
    vocab_size = model.plan.model.vocab_size
    ids = [7 + n * n % (vocab_size - 7) for n in range(700)]
    table, (pool,) = list(range(12)), model.pools
    if model.prefill.widths:
        seen = []
        for cuts in ((0, 700), (0, 256, 700), (0, 512, 700), (0, 256, 512, 700)):
            if len(seen) == 3:
                model.prepare()  # from here on graphs
            pool.tensor.zero_()
            for start, stop in pairwise(cuts):
                if stop - start > model.prefill.most_tokens:
                    break
                logits = model.prefill.run(ids[start:stop], start, table)
            else:
                assert logits is not None
                seen.append((logits.clone(), pool.tensor[:11].clone()))
        for logits, pages in seen[1:]:
            assert torch.equal(logits, seen[0][0])
            assert torch.equal(pages, seen[0][1])
    greedy = SamplingParams(max_tokens=32, ignore_eos=True)

    def answer() -> list[int]:
        return list(tokens_of(model, Request(ids, Sampler(greedy, vocab_size, ids))))

    first = answer()
    assert answer() == first, "from the prefix cache"


@NAMES
def test_a_pool_of_codes_holds_more(name: KvName, tmp_path: Path) -> None:
    config, plan = coded("qwen3-norms-128", name, tmp_path)
    model = loaded(config, plan)
    plain = make_plan(config, Dtype.BF16, plan.gpu)
    assert model.pools[0].tensor.element_size() == 1
    ratio = plain.kv_layout.page_bytes / plan.kv_layout.page_bytes
    assert ratio > (3.5 if name == "int4" else 1.9)
    model.fill_pools()
    assert torch.isfinite(forced(model, prompt(config, 8), 1)).all()


@NAMES
def test_what_there_is_no_kernel_for_is_refused(name: KvName, tmp_path: Path) -> None:
    config, plan = coded("qwen3-norms-128", name, tmp_path)
    with pytest.raises(ShapeUnsupported, match="beside fp16"):
        make_plan(config, Dtype.FP16, plan.gpu, kv=plan.kv)
    with pytest.raises(ShapeUnsupported, match=f"from KV pages in {name}"):
        loaded(config, plan, page_attention=True)


@NAMES
def test_fp16_is_refused_before_it_is_loaded(name: KvName) -> None:
    with pytest.raises(KvUnsupported, match="beside fp16"):
        Engine.load(EngineConfig("etude", device="cuda", precision="fp16", kv=name))
