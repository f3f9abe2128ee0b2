"""Prompts of mixtures: the reference's logits, and bits that hang on nobody else's choice."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from interpreter.mixtures import MIXTURES, SMS
from interpreter.models import CONTEXT, gpu, prompt, reference_logits
from interpreter.quantised import alike, formats_of, quantised
from soloist.errors import ShapeUnsupported
from soloist.kv.pool import PagePool
from soloist.megakernel.plan import Plan, make_plan
from soloist.megakernel.program import place_of
from soloist.model.config import Mixture, Mlp, ModelConfig, Router
from soloist.model.dtype import Dtype
from soloist.model.torch_types import Weights
from soloist.parallel.share import Share
from soloist.prefill import settling
from soloist.prefill.batched_experts import (
    ExpertMatrices,
    batched_bytes,
    num_pieces,
    piece_rows,
    pieces_at_once,
    pieces_of,
)
from soloist.prefill.experts import shared_bytes
from soloist.prefill.packed_prompts import require_packed_prompts
from soloist.prefill.part import Part
from soloist.prefill.products import Products
from soloist.prefill.runner import Prefill
from soloist.prefill.settling import experts_are_invariant
from soloist.prefill.sources import prefill_sources
from soloist.reference.experts import choose
from soloist.weights.memory import unpacked_experts_bytes
from soloist.weights.packed import pack_weights
from soloist.weights.sharding import shard_all
from soloist.weights.unpacking import Unpacked, UnpackedExperts, routers_of
from unit.prefill.models import matrices, random_weights, vectors

CPU = torch.device("cpu")
TOKENS, PAGES = 150, [2, 0, 3]
CUTS = {"one": [0, 150], "uneven": [0, 1, 30, 65, 66, 150], "pages": [0, 64, 128, 150]}


def from_rows(weights: Weights) -> ExpertMatrices:
    def experts(layer: int, numbers: Tensor) -> tuple[Tensor, Tensor]:
        gate_up, down = (
            torch.stack([weights[f"layers.{layer}.experts.{n}.{name}"] for n in numbers.tolist()])
            for name in ("gate_up", "down")
        )
        return gate_up, down

    return experts


def prefill(
    config: ModelConfig, weights: Weights, dtype: torch.dtype = torch.float32, ranks: int = 1
) -> Prefill:
    parts = []
    for rank in range(ranks):
        share = Share(config, ranks, rank)
        own = shard_all(share, weights)
        held, a = matrices(own, dtype), share.sizes().attention
        pool = PagePool(config.num_layers, a.num_kv_heads, a.head_dim, 4, dtype, CPU)
        products = Products(held.__getitem__, from_rows(held))
        parts.append(Part(share, products, vectors(own), pool, most_tokens=CONTEXT))
    return Prefill(parts)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", MIXTURES)
def test_logits_are_the_references(name: str, ranks: int) -> None:
    config = MIXTURES[name]
    weights, ids = random_weights(config), prompt(config, TOKENS)
    wanted = reference_logits(config, weights, ids)
    for cuts in CUTS.values():
        run = prefill(config, weights, ranks=ranks)
        for start, stop in pairwise(cuts):
            logits = run.run(ids[start:stop], start, PAGES)
            torch.testing.assert_close(logits, wanted[stop - 1], rtol=0, atol=3e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", ["corrected sigmoids", "shared, gated"])
def test_16_bits_stay_near(name: str, dtype: torch.dtype) -> None:
    config = MIXTURES[name]
    weights, ids = random_weights(config), prompt(config, TOKENS)
    exact = ("router", "shared_gate")
    rounded = {
        k: v if any(x in k for x in exact) else v.to(dtype).float() for k, v in weights.items()
    }
    wanted = reference_logits(config, rounded, ids)
    run = prefill(config, weights, dtype)
    errors = []
    for position, token in enumerate(ids[:40]):
        logits = run.run([token], position, PAGES)
        assert logits is not None
        errors.append((logits - wanted[position]).norm() / wanted[position].norm())
    # Where a choice hangs on rounding a token has another expert, which is no small difference.
    assert float(torch.stack(errors).median()) < 0.02


@pytest.mark.parametrize("name", ["softmax", "mixtral", "corrected sigmoids", "shared, gated"])
def test_experts_give_a_token_the_same_bits_whoever_else_is_there(name: str) -> None:
    """In passes of any number of rows, in any order, beside any other tokens."""
    config = MIXTURES[name]
    run = prefill(config, random_weights(config), torch.bfloat16)
    mixtures = run.parts[0].work.mixtures
    assert mixtures is not None
    generator = torch.Generator().manual_seed(5)
    normed = torch.randn(CONTEXT, config.hidden_size, generator=generator).bfloat16()

    def given(rows: Tensor) -> Tensor:
        out = torch.empty(rows.shape, dtype=torch.bfloat16)
        # What the MLP beside them gives, if there is one, is a product that is tried on its own.
        mixtures(0, rows, out, rows.flip(1) if mixtures.beside.numel() else None)
        return out

    whole = given(normed)
    assert whole.isfinite().all()
    for start, stop in ((0, 1), (0, 100), (77, 192), (191, 192)):
        assert torch.equal(given(normed[start:stop]), whole[start:stop])
    order = torch.randperm(CONTEXT, generator=generator)
    assert torch.equal(given(normed[order]), whole[order])
    crowd = normed[3:4].repeat(CONTEXT, 1)  # all tokens choose the same experts
    assert torch.equal(given(crowd), whole[3:4].expand(CONTEXT, -1))


MANY = Mixture(Router(128, 8, normalises=True), Mlp(768))
FEW = Mixture(Router(4, 2), Mlp(136))


@pytest.mark.parametrize("tokens", [1, 5, 64, 200, 2048])
@pytest.mark.parametrize("mixture", [MANY, FEW], ids=["many", "few"])
@pytest.mark.parametrize("crowd", ["spread", "one", "skewed"])
def test_every_row_has_one_place_in_a_piece_of_its_expert(
    mixture: Mixture, tokens: int, crowd: str
) -> None:
    router = mixture.router
    logits = torch.randn(tokens, router.num_experts, generator=torch.Generator().manual_seed(0))
    if crowd == "one":
        logits[:] = logits[:1].clone()
    if crowd == "skewed":
        logits += torch.arange(router.num_experts) / 8
    chosen = choose(router, logits).experts
    pieces = pieces_of(mixture, 2048, chosen)
    assert len(pieces.experts) == num_pieces(mixture, 2048, tokens)
    assert len(pieces.experts) % pieces_at_once(mixture, 2048) == 0
    assert pieces.slots.shape[1] == piece_rows(router)
    assert bool(((pieces.experts >= 0) & (pieces.experts < router.num_experts)).all())
    seen = pieces.slots[pieces.slots < chosen.numel()]
    assert seen.sort().values.tolist() == list(range(chosen.numel()))
    for expert, slots in zip(pieces.experts.tolist(), pieces.slots, strict=True):
        own = slots[slots < chosen.numel()]
        assert (chosen.flatten()[own] == expert).all()


def test_the_choice_is_the_references_where_scores_are_equal() -> None:
    config = MIXTURES["softmax"]
    weights = random_weights(config)
    weights["layers.0.router"][1::2] = weights["layers.0.router"][::2]
    mixtures = prefill(config, weights).parts[0].work.mixtures
    assert mixtures is not None
    x = torch.randn(40, config.hidden_size, generator=torch.Generator().manual_seed(0))
    seen = mixtures.choice(0, x)
    router = config.layers[0].router
    assert router is not None
    wanted = choose(router, x @ weights["layers.0.router"].T)
    assert torch.equal(seen.experts, wanted.experts)
    assert (seen.experts[:, 0] % 2 == 0).all(), "of equal scores the lower index comes first"
    torch.testing.assert_close(seen.shares, wanted.shares)


def plan_of(config: ModelConfig, dtype: Dtype = Dtype.BF16, ranks: int = 1) -> Plan:
    return make_plan(config, dtype, gpu(SMS), ranks)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_come_out_of_what_the_kernel_reads(name: str, ranks: int) -> None:
    """Any of them, some several times, bit by bit, and in the buffers of the call before."""
    config = MIXTURES[name]
    plan = plan_of(config, ranks=ranks)
    weights = {k: v if "router" in k else v.bfloat16() for k, v in random_weights(config).items()}
    for rank in range(ranks):
        own = shard_all(plan.part_of(rank), weights)
        packed = pack_weights(plan, dict(own), CPU)
        unpacked, rows = UnpackedExperts(plan, packed), from_rows(own)
        routers = routers_of(plan, packed)
        for layer, kind in enumerate(plan.share.layers):
            if kind.router is None:
                continue
            last = kind.router.num_experts - 1
            for numbers in ([0, last, 0], [1, 2, last]):
                seen = unpacked(layer, torch.tensor(numbers))
                for ours, theirs in zip(seen, rows(layer, torch.tensor(numbers)), strict=True):
                    assert torch.equal(ours, theirs)
            ends = ("router", "router_correction", "shared_gate")
            for at in (f"layers.{layer}.{end}" for end in ends):
                assert (at in routers) == (at in weights)
                if at in weights:
                    assert torch.equal(routers[at], weights[at].float())


@pytest.mark.parametrize("kind", ["fp8-block", "fp8", "int4", "int4-zeros", "int8"])
@pytest.mark.parametrize("name", ["softmax", "some layers dense"])
def test_quantised_experts_come_out_as_the_numbers_that_they_stand_for(
    name: str, kind: str
) -> None:
    config = MIXTURES[name]
    stored = alike(config, kind)
    plan = make_plan(config, Dtype.BF16, gpu(SMS), formats=formats_of(stored))
    parts, meant = quantised(random_weights(config), stored)
    unpacked = UnpackedExperts(plan, pack_weights(plan, dict(parts), CPU))
    rows = from_rows({key: values.bfloat16() for key, values in meant.items()})
    for layer, of_layer in enumerate(config.layers):
        if of_layer.router is None:
            continue
        numbers = torch.tensor([3, 0, 3, of_layer.router.num_experts - 1])
        for ours, theirs in zip(unpacked(layer, numbers), rows(layer, numbers), strict=True):
            assert torch.equal(ours, theirs)
    at_once = partial(pieces_at_once, hidden_size=config.hidden_size)
    assert unpacked.num_bytes <= unpacked_experts_bytes(plan, at_once)


@pytest.mark.parametrize("name", ["some layers dense", "shared of several sizes"])
def test_what_is_unpacked_gives_the_bits_of_rows(name: str) -> None:
    """Of experts, and of what all tokens take beside them."""
    config = MIXTURES[name]
    weights, plan = random_weights(config), plan_of(config)
    exact = ("router", "shared_gate")
    rounded = {k: v if any(x in k for x in exact) else v.bfloat16() for k, v in weights.items()}
    packed = pack_weights(plan, shard_all(plan.part_of(0), rounded), CPU)
    ids, wanted = prompt(config, TOKENS), prefill(config, weights, torch.bfloat16)
    own = shard_all(Share(config, 1, 0), weights)
    a = config.layers[0].attention
    pool = PagePool(config.num_layers, a.num_kv_heads, a.head_dim, 4, torch.bfloat16, CPU)
    products = Products(Unpacked(plan, packed), UnpackedExperts(plan, packed))
    norms = {k: v for k, v in vectors(own).items() if not any(x in k for x in exact)}
    part = Part(
        Share(config, 1, 0), products, norms | routers_of(plan, packed), pool, most_tokens=CONTEXT
    )
    for start, stop in pairwise(CUTS["uneven"]):
        seen = Prefill([part]).run(ids[start:stop], start, PAGES)
        assert seen is not None
        logits = wanted.run(ids[start:stop], start, PAGES)
        assert logits is not None
        assert torch.equal(seen, logits)


def test_keeping_rows_keeps_no_second_copy_of_experts() -> None:
    config = MIXTURES["softmax"]
    plan, weights = plan_of(config), random_weights(config)
    pack_weights(plan, weights, CPU, keep_rows=True)
    assert "layers.1.qkv" in weights
    assert not [name for name in weights if ".experts." in name]


def test_buffers_take_no_more_than_the_estimate_says() -> None:
    for name, config in MIXTURES.items():
        run = prefill(config, random_weights(config), torch.bfloat16)
        mixtures = run.parts[0].work.mixtures
        assert mixtures is not None
        # On CUDA products are fp32.
        estimate = batched_bytes(config, Dtype.BF16, CONTEXT) + shared_bytes(config, CONTEXT)
        assert mixtures.num_bytes <= estimate, name
        plan = plan_of(config)
        unpacked = UnpackedExperts(plan, pack_weights(plan, random_weights(config), CPU))
        for layer, kind in enumerate(config.layers):
            if isinstance(kind.mlp, Mixture):
                at_once = pieces_at_once(kind.mlp, config.hidden_size)
                unpacked(layer, torch.zeros(at_once, dtype=torch.int64))
        counted = unpacked_experts_bytes(
            plan, partial(pieces_at_once, hidden_size=config.hidden_size)
        )
        assert unpacked.num_bytes <= counted, name
    dense = replace(config, layers=MIXTURES["some layers dense"].layers[:1])
    assert batched_bytes(dense, Dtype.BF16, CONTEXT) == 0


def test_widths_are_given_up_where_a_row_s_bits_hang_on_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = MIXTURES["softmax"]
    run = prefill(config, random_weights(config), torch.bfloat16)
    assert experts_are_invariant(run.parts[0])
    bmm = torch.bmm

    def uneven(x: Tensor, matrix: Tensor, **given: Tensor) -> Tensor:
        made = bmm(x, matrix, **given)
        made[-1, -1] *= 1.5
        return made

    monkeypatch.setattr(torch, "bmm", uneven)
    assert not experts_are_invariant(run.parts[0])
    monkeypatch.setattr(settling, "tries_widths", lambda _: True)
    run.settle_widths()
    assert run.widths == ()


def test_products_of_what_all_tokens_take_are_tried_where_passes_have_them() -> None:
    """Beside those of a dense layer, whose MLP has another size; those of experts are not."""
    config = MIXTURES["shared after a dense layer"]
    weights = random_weights(config)
    (part,) = prefill(config, weights).parts
    own = [name for name, _ in settling.products_of(part)]
    attention = {"qkv", "attention_output"}
    assert {place_of(name)[1] for name in own if "layers.0" in name} == {
        *attention, "gate_up", "down"
    }  # fmt: skip
    assert {place_of(name)[1] for name in own if "layers.0" not in name} - attention == {
        "shared.gate_up", "shared.down"
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    for name in ("layers.1.shared.gate_up", "layers.1.shared.down"):
        matrix = weights[name]
        x = torch.randn(5, matrix.shape[1], generator=generator)
        wanted = x @ matrix.T
        if name.endswith("gate_up"):
            gate, up = wanted.chunk(2, 1)
            wanted = torch.nn.functional.silu(gate) * up
        seen = settling.multiply_as_a_pass(part, name, 0, x)
        torch.testing.assert_close(seen, wanted, rtol=0, atol=1e-5)


def test_swiglu_is_compiled_for_every_size_of_mlp() -> None:
    for name, sizes in (("softmax", {40}), ("shared, gated", {40, 72})):
        sources = prefill_sources(MIXTURES[name], Dtype.BF16, "sm_90a")
        assert {*sources.swiglu} == sizes


def test_prompts_of_mixtures_from_packed_weights_are_refused() -> None:
    with pytest.raises(ShapeUnsupported, match="prompts of mixtures from packed weights"):
        require_packed_prompts(plan_of(MIXTURES["softmax"]))
