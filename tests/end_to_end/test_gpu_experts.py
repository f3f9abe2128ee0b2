"""Mixtures of experts in the decode kernel and in prompts, on one GPU and its ranks."""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from end_to_end.test_experts import WITH_SHARED, write_mixture
from end_to_end.test_gpu_kinds_and_formats import here, loaded
from end_to_end.test_gpu_lanes import Spread, rounded
from end_to_end.test_gpu_passes import GPU, PAGES, cut, random_ids, read, same
from interpreter.mixtures import MIXTURES, OF_WHOLE_WORDS, SMS, routing_early
from interpreter.models import prompt, reference_logits
from interpreter.quantised import alike, formats_of, quantised
from plan.shapes import MIXTURE
from soloist.bench.agreement import forced_logits
from soloist.engine import Completion, Engine, EngineConfig
from soloist.kv.layout import PAGE_POSITIONS
from soloist.kv.pool import PagePool
from soloist.megakernel.attention_plan import AttentionPlan
from soloist.megakernel.header import Build
from soloist.megakernel.launch import Query
from soloist.megakernel.limits import MAX_QUERIES
from soloist.megakernel.plan import make_plan
from soloist.megakernel.trace import block_times, chosen_experts, spans
from soloist.model.checkpoint import open_checkpoint
from soloist.model.config import Mixture, ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.families import read_config, tensors
from soloist.model.quantized import AT_LOAD
from soloist.parallel.share import Share
from soloist.prefill.expert_form import reads_packed_experts
from soloist.prefill.fused import FusedElementwise
from soloist.prefill.packed_experts import PackedExperts
from soloist.prefill.part import Part
from soloist.prefill.products import Products
from soloist.prefill.runner import Prefill
from soloist.prefill.widths import MOST_PASS_TOKENS
from soloist.reference.build import build_reference
from soloist.sampling import SamplingParams
from soloist.weights import random as random_of_specs
from soloist.weights.choice import Rounding, choose
from soloist.weights.memory import row_bytes
from soloist.weights.packed import pack_weights
from soloist.weights.reading import Forms, load_weights
from soloist.weights.unpacking import UnpackedExperts, routers_of
from unit.prefill.models import random_weights, vectors
from unit.prefill.test_fused import arch

pytestmark = pytest.mark.gpu

TOKENS = 150  # three pages
NOT_ROUNDED = Rounding()
# Of a token, half of all: what rounding to 16 bits may do where it changes no choice.
MOST_ERROR = 0.02


@pytest.fixture
def routes_early(request: pytest.FixtureRequest) -> Iterator[None]:
    """Logits of experts behind attention, or beside attention_output."""
    with routing_early(early=request.param == "early"):
        yield


EARLY_OR_NOT = pytest.mark.parametrize("routes_early", ["after", "early"], indirect=True)


@EARLY_OR_NOT
@pytest.mark.usefixtures("routes_early")
@pytest.mark.parametrize(
    "name",
    ["half steps", "softmax", "shared, gated", "eight slots", "shared beside eight slots"],
)
@pytest.mark.parametrize("kind", ["fp8-block", "fp8", "int4", "int4-zeros", "int4-offsets", "int8"])
def test_quantised_experts(kind: str, name: str) -> None:
    """Decoding by one query and by eight, whose bits are those of one, and from a prompt on."""
    config = MIXTURES[name]
    stored = alike(config, kind)
    plan = make_plan(config, Dtype.BF16, here(SMS), formats=formats_of(stored))
    parts, meant = quantised(
        {k: v.float() for k, v in rounded(random_weights(config)).items()}, stored
    )
    model = loaded(plan, parts, keep_rows=True)
    ids = prompt(config, TOKENS)
    wanted = reference_logits(config, meant, ids)
    one_by_one = forced_logits(model.decoder, config.vocab_size, ids, 1, TOKENS)
    require_near(one_by_one, wanted)
    eight = forced_logits(model.decoder, config.vocab_size, ids, MAX_QUERIES, TOKENS)
    assert torch.equal(eight, one_by_one)
    pages, errors = model.page_tables[0], []
    for start, stop in pairwise((0, 30, 70, 71, 110, 149)):
        seen = model.prefill.run(ids[start:stop], start, pages)
        assert seen is not None
        right = wanted[stop - 1]
        errors.append(float((seen.cpu() - right).norm() / right.norm()))
    assert float(torch.tensor(errors).median()) < MOST_ERROR
    # A prompt can be recorded, experts that it unpacks included.
    seen = model.prefill.run(ids[:20], 0, pages)
    assert seen is not None
    launched = seen.clone()
    model.prefill.capture([20])
    assert model.prefill.parts[0].graphs.by_rows
    recorded = model.prefill.run(ids[:20], 0, pages)
    assert recorded is not None
    assert float((recorded - launched).norm() / launched.norm()) < MOST_ERROR


def require_near(seen: Tensor, wanted: Tensor) -> None:
    errors = (seen.cpu() - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert float(errors.median()) < MOST_ERROR


def spread(config: ModelConfig, ranks: int = 1) -> tuple[Spread, dict[str, Tensor]]:
    """The model, and its weights as the GPU has them."""
    weights = random_weights(config)
    return Spread(config, make_plan(config, Dtype.BF16, here(SMS), ranks), weights), rounded(
        weights
    )


@EARLY_OR_NOT
@pytest.mark.usefixtures("routes_early")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", MIXTURES)
def test_logits_are_the_references(name: str, ranks: int) -> None:
    """And a query has the bits that it has alone, whoever chooses what beside it."""
    config = MIXTURES[name]
    model, weights = spread(config, ranks)
    ids = prompt(config, TOKENS)
    wanted = reference_logits(config, weights, ids)
    one_by_one = model.logits(ids, 1)
    require_near(one_by_one, wanted)
    for queries in (2, 5):
        assert torch.equal(model.logits(ids, queries), one_by_one)
    assert torch.equal(model.logits(ids, 3, sequence=1), one_by_one)
    eight = model.logits(ids[:144], MAX_QUERIES)
    assert torch.equal(eight, one_by_one[:144])


@EARLY_OR_NOT
@pytest.mark.usefixtures("routes_early")
@pytest.mark.parametrize("queries", [1, MAX_QUERIES])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["softmax", "some layers dense", "shared of several sizes"])
def test_no_bit_depends_on_when_buffers_are_cleaned(name: str, ranks: int, queries: int) -> None:
    config = MIXTURES[name]
    model, _ = spread(config, ranks)
    ids = prompt(config, 96)
    wanted = model.logits(ids, queries)
    for decoder in model.decoders:
        decoder.load(Build(cleaner_cycles=50_000))  # longer than a layer takes
    assert torch.equal(model.logits(ids, queries), wanted)


@EARLY_OR_NOT
@pytest.mark.usefixtures("routes_early")
@pytest.mark.parametrize("name", MIXTURES)
def test_launches_that_follow_each_other_have_the_same_tokens(name: str) -> None:
    """Of one query, and of two sequences side by side."""
    config = MIXTURES[name]
    model, _ = spread(config)
    ids = prompt(config, 24)
    tokens = [model.ranks.run([Query(0, 0, ids)], 100) for _ in range(3)]
    assert tokens[1:] == tokens[:2]
    both = model.ranks.run([Query(0, 0, ids), Query(1, 0, ids)], 100)
    assert [round_[0] for round_ in both] == [round_[0] for round_ in tokens[0]]
    assert [round_[1] for round_ in both] == [round_[0] for round_ in tokens[0]]


@EARLY_OR_NOT
@pytest.mark.usefixtures("routes_early")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", MIXTURES)
def test_attention_blocks(name: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They attend until the cache is split, in the midst of a launch: bits are those without."""
    monkeypatch.setattr(AttentionPlan, "unsplit_positions", property(lambda _: PAGE_POSITIONS))
    config, weights = MIXTURES[name], random_weights(MIXTURES[name])
    plan = make_plan(config, Dtype.BF16, here(132 // ranks), ranks)
    assert plan.attention_blocks == plan.shape.kv_heads
    model = Spread(config, plan, weights)
    ids = prompt(config, TOKENS)
    one_by_one = model.logits(ids, 1)
    require_near(one_by_one, reference_logits(config, rounded(weights), ids))
    assert torch.equal(model.logits(ids, 5), one_by_one), "a build for several queries has none"
    # Launches that end before the border, at it, and behind it.
    decoder, whole = model.decoders[0], model.ranks.run([Query(0, 0, ids)], TOKENS)
    for begun in (PAGE_POSITIONS // 2, PAGE_POSITIONS - 1, PAGE_POSITIONS, PAGE_POSITIONS + 1):
        first = model.ranks.run([Query(0, 0, ids[:begun])], begun)
        rest = model.ranks.run([Query(0, begun, ids[begun:])], TOKENS - begun)
        assert [*first, *rest] == whole
    model.ranks.load(Build(cleaner_cycles=50_000))  # longer than a layer takes
    assert torch.equal(model.logits(ids, 1), one_by_one)
    model.ranks.load(Build(trace_round=10))
    model.ranks.run([Query(0, 0, ids)], 12)
    *_, row = decoder.trace.tolist()
    times = zip(spans(plan), pairwise(block_times(plan, row).marks_ns), strict=True)
    attended = {span.layer: end - begin for span, (begin, end) in times if span.name == "pages"}
    assert len(attended) == len(config.layers)
    assert min(attended.values()) > 0


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["softmax", "corrected sigmoids", "some layers dense"])
def test_a_traced_round_tells_how_many_experts_were_chosen(name: str, ranks: int) -> None:
    config = MIXTURES[name]
    model, _ = spread(config, ranks)
    routers = [layer.mlp.router for layer in config.layers if isinstance(layer.mlp, Mixture)]
    alone = [router.num_chosen for router in routers]
    ids = prompt(config, 96)
    for decoder in model.decoders:
        decoder.load(Build(trace_round=10))

    def chosen(*queries: Query) -> list[int]:
        model.ranks.run(list(queries), 12)
        told = [chosen_experts(model.plan, row) for d in model.decoders for row in d.trace.tolist()]
        assert told[1:] == told[:-1], "blocks and ranks disagree"
        return told[0]

    assert chosen(Query(0, 0, ids)) == alone
    assert chosen(Query(0, 0, ids), Query(1, 0, ids)) == alone, "they choose the same ones"
    eight = chosen(*[Query(0, c, ids[c::8], stride=8) for c in range(8)])
    for count, router in zip(eight, routers, strict=True):
        assert router.num_chosen < count <= min(router.num_experts, 8 * router.num_chosen)


@EARLY_OR_NOT
@pytest.mark.usefixtures("routes_early")
@pytest.mark.parametrize("queries", [1, 3, MAX_QUERIES])
@pytest.mark.parametrize("name", ["softmax", "shared, gated"])
def test_activations_that_are_no_numbers_end_a_launch_in_order(name: str, queries: int) -> None:
    """A choice of NaN is of experts that there are: the kernel reads no other address."""
    config = MIXTURES[name]
    weights = random_weights(config)
    weights["layers.0.attention_norm"][0] = torch.nan
    model = Spread(config, make_plan(config, Dtype.BF16, here(SMS)), weights)
    logits = model.logits(prompt(config, 24), queries)
    assert logits.isnan().all()


@pytest.mark.parametrize("keep_rows", [True, False], ids=["rows", "unpacked"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", [*MIXTURES, *OF_WHOLE_WORDS])
def test_the_kernel_goes_on_from_a_prompt(name: str, ranks: int, keep_rows: bool) -> None:
    config, sms = OF_WHOLE_WORDS.get(name) or (MIXTURES[name], SMS)
    plan, weights = make_plan(config, Dtype.BF16, here(sms), ranks), random_weights(config)
    assert ranks > 1 or reads_packed_experts(plan) is (
        name in OF_WHOLE_WORDS and arch() == "sm_90a"
    )
    model = loaded(plan, weights, keep_rows=keep_rows)
    ids = prompt(config, TOKENS)
    wanted = reference_logits(config, rounded(weights), ids)
    errors = []

    def note(seen: Tensor | None, position: int) -> None:
        assert seen is not None
        right = wanted[position]
        errors.append(float((seen.cpu() - right).norm() / right.norm()))

    cuts = (0, 1, 70, 71, 100, 120)
    for start, stop in pairwise(cuts):
        note(model.prefill.run(ids[start:stop], start, model.page_tables[0]), stop - 1)
    rest = ids[cuts[-1] :]
    kept = torch.zeros(len(rest), 1, plan.exchanges.sampled_rows, device="cuda")
    model.decoder.run([Query(0, cuts[-1], rest)], len(rest), logits=kept)
    for i, seen in enumerate(kept[:, 0, : config.vocab_size]):
        note(seen, cuts[-1] + i)
    assert float(torch.tensor(errors).median()) < MOST_ERROR
    assert float(torch.tensor(errors[: len(cuts) - 1]).median()) < MOST_ERROR


@pytest.fixture(scope="module", params=["packed", "in rows"])
def wide(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Prefill:
    """Two layers of qwen3-30b-a3b."""
    config = read_config(MIXTURE)
    config = replace(config, layers=config.layers[:2], context_tokens=8192)
    weights = random_of_specs.random_weights(tensors(config), Dtype.BF16, GPU)
    plan = make_plan(config, Dtype.BF16, here(132))
    packed = pack_weights(plan, weights, GPU, keep_rows=True)
    a = config.layers[0].attention
    pool = PagePool(config.num_layers, a.num_kv_heads, a.head_dim, PAGES, torch.bfloat16, GPU)
    own = vectors(weights) | routers_of(plan, packed)
    cache = tmp_path_factory.mktemp("cache")
    experts: PackedExperts | UnpackedExperts = UnpackedExperts(plan, packed)
    if request.param == "packed":
        experts = PackedExperts(plan, packed, MOST_PASS_TOKENS, cache)
    products = Products(weights.__getitem__, experts)
    fused = partial(FusedElementwise, arch=arch(), cache_root=cache)
    return Prefill([Part(Share(config, 1, 0), products, own, pool, fused)])


def test_the_host_waits_for_nothing_in_a_mixture(wide: Prefill) -> None:
    """Whichever experts are chosen: the host does not know, so a pass can be recorded."""
    mixtures = wide.parts[0].work.mixtures
    assert mixtures is not None
    wide.run(random_ids(wide.config, 300), 0, list(range(PAGES)))
    normed = torch.randn(300, wide.config.hidden_size, device="cuda").bfloat16()
    out = torch.empty_like(normed)
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings(action="ignore"):  # that it may miss some
            torch.cuda.set_sync_debug_mode("error")
        with torch.inference_mode():
            mixtures(0, normed, out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert out.isfinite().all()


def test_no_bit_of_a_token_depends_on_how_its_prompt_is_cut(wide: Prefill) -> None:
    """As of models without experts in test_gpu_passes.py; recorded passes included."""
    mixtures = wide.parts[0].work.mixtures
    assert mixtures is not None
    normed = torch.randn(2048, wide.config.hidden_size, device="cuda").bfloat16()
    with torch.inference_mode():
        whole, part = torch.empty_like(normed), torch.empty_like(normed)
        mixtures(1, normed, whole)
        for start, stop in ((0, 1), (5, 300), (1024, 2048)):
            mixtures(1, normed[start:stop], part[start:stop])
            assert torch.equal(part[start:stop], whole[start:stop])
    wide.settle_widths()
    if not wide.widths:
        pytest.skip("no widths agree here: prompts are read in the grid's chunks")
    wide.capture([32, *wide.widths])
    ids, most = random_ids(wide.config, 1500), wide.widths[-1]
    cold = read(wide, ids, cut(1500, min(most, 1500), most))
    assert cold[0].isfinite().all()
    for first in (256, 768, 1280):
        assert same(read(wide, ids, cut(1500, first, most)), cold), first
        assert same(read(wide, ids, cut(1500, first, most), by_graph=False), cold), first


@EARLY_OR_NOT
@pytest.mark.usefixtures("routes_early")
@pytest.mark.parametrize("words", [6, 300], ids=["read by the kernel", "read by prefill"])
@pytest.mark.parametrize(
    "how", [{}, {"rank_devices": (0, 0)}, *({"weights": codes} for codes in AT_LOAD.values())],
    ids=["bf16", "two ranks", *AT_LOAD],
)  # fmt: skip
def test_a_request_of_a_mixture(words: int, how: dict[str, Any], tmp_path: Path) -> None:
    """Its tokens are those that the reference would choose, or nearly."""
    folder = write_mixture(tmp_path / "mixture", hidden_size=256, moe_intermediate_size=256)
    asked = EngineConfig(str(folder), device="cuda", precision="bf16", **how)
    engine = Engine.load(asked)
    assert engine.report.executor == "decode kernel", engine.report.refusal
    assert (engine.report.weights == "bf16") is (asked.weights is None)
    ids = prompt(engine.config, words)
    *_, end = engine.generate(ids, SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True))
    assert isinstance(end, Completion)
    require_near_best(folder, ids, list(end.token_ids), asked.rounding)


@pytest.mark.parametrize("words", [6, 300], ids=["read by the kernel", "read by prefill"])
@pytest.mark.parametrize("how", [{}, {"rank_devices": (0, 0)}], ids=["bf16", "two ranks"])
@pytest.mark.parametrize("family", WITH_SHARED)
def test_a_request_of_a_mixture_with_shared_experts(
    family: str, words: int, how: dict[str, Any], tmp_path: Path
) -> None:
    """As its family's files have them."""
    folder = write_mixture(tmp_path / "mixture", WITH_SHARED[family])
    engine = Engine.load(EngineConfig(str(folder), device="cuda", precision="bf16", **how))
    assert engine.report.executor == "decode kernel", engine.report.refusal
    ids = prompt(engine.config, words)
    *_, end = engine.generate(ids, SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True))
    assert isinstance(end, Completion)
    require_near_best(folder, ids, list(end.token_ids))


def test_loading_takes_what_was_estimated(tmp_path: Path) -> None:
    """Beside the rows of all but experts; the reserve has what libraries keep for themselves.

    A second copy of experts is half a gigabyte, more than that reserve.
    """
    large = {"hidden_size": 1024, "moe_intermediate_size": 768, "num_experts": 32}
    folder = write_mixture(tmp_path / "mixture", **large)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    asked = EngineConfig(str(folder), device="cuda", precision="bf16", prepare=False)
    engine = Engine.load(asked)
    assert engine.report.executor == "decode kernel", engine.report.refusal
    rest = row_bytes((s for s in tensors(engine.config) if s.expert is None), Dtype.BF16)
    counted = engine.resolved.memory.needed_bytes + rest
    assert torch.cuda.max_memory_allocated() - before <= counted


def require_near_best(
    folder: Path, ids: list[int], made: list[int], rounding: Rounding = NOT_ROUNDED
) -> None:
    """By logits of the reference in fp32, of which rounding may change a few by much."""
    assert len(made) == 40
    checkpoint = open_checkpoint(folder)
    config = read_config(folder / "config.json")
    chosen = choose(checkpoint, config, tensors(config), rounding)
    forms = Forms(rounding=chosen.rounding)
    cpu = torch.device("cpu")
    weights = load_weights(checkpoint, chosen.specs, Dtype.FP32, cpu, forms=forms)
    reference = build_reference(config, weights)
    whole = torch.tensor(ids + made[:-1])
    logits = reference.forward(whole, 0, reference.new_cache(len(whole)), "all")
    assert logits is not None
    logits = logits[len(ids) - 1 :]
    lacking = (logits.amax(1) - logits[torch.arange(len(made)), made]) / logits.std(1)
    assert float(lacking.median()) < 0.05
    assert float(lacking.mean()) < 0.3
