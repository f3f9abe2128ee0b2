"""Plans with experts give the reference's logits, and each query the bits that it has alone."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from interpreter.mixtures import (
    MIXTURES,
    SHARED,
    SMS,
    routing_early,
    wide_experts,
    with_shared_mlp,
)
from interpreter.models import Bench, gpu, load, load_experts, prompt, reference_logits
from interpreter.quantised import FORMATS, alike, formats_of, quantised
from plan.shapes import MIXTURE
from soloist.errors import ShapeUnsupported
from soloist.megakernel.gpu import TYPICAL
from soloist.megakernel.interpreter.experts import Chosen, chosen_by
from soloist.megakernel.plan import Plan, make_plan
from soloist.model.config import Mixture, Mlp, ModelConfig, Router
from soloist.model.dtype import Dtype
from soloist.model.families import read_config
from soloist.model.families.dense import decoder_tensors as tensors_of
from soloist.reference.experts import choose
from soloist.weights.formats import formats_of as formats_of_stored
from soloist.weights.loading import regrouped
from soloist.weights.memory import packed_bytes
from soloist.weights.packed import pack_weights
from unit.prefill.models import random_weights

ATOL = 1e-4


def plan_of(config: ModelConfig, ranks: int = 1) -> Plan:
    return make_plan(config, Dtype.BF16, gpu(SMS), ranks)


@pytest.fixture
def routes_early() -> Iterator[None]:
    with routing_early(early=True):
        yield


@pytest.mark.few(3)
@pytest.mark.usefixtures("routes_early")
@pytest.mark.parametrize("name", MIXTURES)
def test_logits_of_experts_may_come_with_attention(name: str) -> None:
    """From a product of the router and attention_output; a query has the bits it has alone."""
    config = MIXTURES[name]
    plan, weights, ids = plan_of(config), random_weights(config), prompt(config, 40)
    assert plan.routes_early
    wanted = reference_logits(config, weights, ids)
    bench = Bench(config, plan, weights)
    torch.testing.assert_close(bench.feed(ids[:4]), wanted[:4], rtol=0, atol=ATOL)
    torch.testing.assert_close(bench.feed(ids, 8), wanted, rtol=0, atol=ATOL)
    rounded = Bench(config, plan, weights, torch.bfloat16)
    one_by_one = rounded.feed(ids[:9])
    assert torch.equal(rounded.feed(ids[:9], 3), one_by_one)


@pytest.mark.usefixtures("routes_early")
@pytest.mark.parametrize("kind", ["fp8-block", "int4", "int8"])
def test_quantised_logits_may_come_with_attention(kind: str) -> None:
    config = MIXTURES["softmax"]
    bench, meant = quantised_bench(config, kind, 1, None)
    ids = prompt(config, 20)
    wanted = reference_logits(config, meant, ids)
    torch.testing.assert_close(bench.feed(ids, 8), wanted, rtol=0, atol=ATOL)


@pytest.mark.few(7)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_give_the_references_logits(name: str, ranks: int) -> None:
    """One query after the other, then eight at a time."""
    config = MIXTURES[name]
    weights, ids = random_weights(config), prompt(config, 40)
    wanted = reference_logits(config, weights, ids)
    bench = Bench(config, plan_of(config, ranks), weights)
    torch.testing.assert_close(bench.feed(ids[:4]), wanted[:4], rtol=0, atol=ATOL)
    torch.testing.assert_close(bench.feed(ids, 8), wanted, rtol=0, atol=ATOL)


@pytest.mark.few(3)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "name", ["softmax", "corrected sigmoids", "some layers dense", "shared of several sizes"]
)
def test_a_query_has_the_bits_that_it_has_alone(name: str, ranks: int) -> None:
    """Whoever else is in the round, and whatever they choose."""
    config = MIXTURES[name]
    plan = plan_of(config, ranks)
    bench = Bench(config, plan, random_weights(config), torch.bfloat16)
    ids = prompt(config, 9)
    one_by_one = bench.feed(ids)
    assert torch.equal(bench.feed(ids, 8), one_by_one)
    assert torch.equal(bench.feed(ids, 3), one_by_one)


@pytest.mark.parametrize("name", ["softmax", "shared, gated", "shared after a dense layer"])
def test_rounding_stays_near(name: str) -> None:
    config = MIXTURES[name]
    exact = ("router", "shared_gate")
    rounded = {k: v.bfloat16() for k, v in random_weights(config).items()}
    weights = {k: v.float() if any(x in k for x in exact) else v for k, v in rounded.items()}
    ids = prompt(config, 64)
    wanted = reference_logits(config, weights, ids)
    seen = Bench(config, plan_of(config), weights, torch.bfloat16).feed(ids, 8)
    # Where a choice hangs on rounding a token has another expert, which is no small difference.
    errors = (seen - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert 1e-5 < float(errors.median()) < 0.02


ROUTERS = [
    Router(16, 4),
    Router(16, 4, normalises=True),
    Router(40, 7, "sigmoid", is_corrected=True, normalises=True, least_sum=1e-20, scale=2.5),
]


@pytest.mark.parametrize("router", ROUTERS, ids=["softmax", "normalised", "corrected"])
def test_the_choice_is_the_references(router: Router) -> None:
    """Many logits are equal: of them the lower index comes first."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randint(-3, 4, (64, router.num_experts), generator=generator).float()
    correction = torch.randint(0, 2, (router.num_experts,), generator=generator).float()
    correction = correction if router.is_corrected else torch.zeros_like(correction)
    wanted = choose(router, logits, correction)
    for own, experts, shares in zip(logits, *wanted, strict=True):
        chosen = chosen_by(router, own, correction)
        assert list(chosen) == experts.tolist()
        torch.testing.assert_close(torch.tensor(list(chosen.values())), shares)


def test_slots_are_the_distinct_experts_in_ascending_order() -> None:
    chosen = Chosen(({3: 0.5, 9: 0.5}, {0: 0.1, 9: 0.9}))
    assert chosen.slots == [0, 3, 9]
    assert [chosen.queries(expert) for expert in chosen.slots] == [[1], [0], [0, 1]]


KINDS = ("fp8-block", "fp8", "int4", "int4-zeros", "int4-offsets", "int8")


def quantised_bench(
    config: ModelConfig, kind: str, ranks: int, dtype: torch.dtype | None
) -> tuple[Bench, dict[str, Tensor]]:
    """All matrices in one format, and the numbers that they stand for."""
    rounded = {
        k: v if "router" in k else v.bfloat16().float() for k, v in random_weights(config).items()
    }
    stored = alike(config, kind)
    parts, meant = quantised(rounded, stored)
    formats = formats_of_stored(stored, config, ranks)
    assert formats.keys() >= stored.keys(), "the kernel reads all of these"
    read = regrouped(parts.items(), tensors_of(config), stored, formats)
    plan = make_plan(config, Dtype.BF16, gpu(SMS), ranks, formats)
    return Bench(config, plan, dict(read), dtype), meant


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("config", "ranks", "kind"),
    [
        *((wide_experts(1040), 1, kind) for kind in KINDS),
        (wide_experts(256), 2, "fp8-block"), (wide_experts(256), 2, "int4"),
        (MIXTURES["some layers dense"], 1, "fp8-block"),
        *((with_shared_mlp(wide_experts(256)), 1, kind) for kind in KINDS),
        (with_shared_mlp(wide_experts(256)), 2, "fp8-block"),
        (with_shared_mlp(wide_experts(256)), 2, "int4"),
    ],
    ids=[
        *KINDS, "fp8-block on ranks", "int4 on ranks", "some layers dense",
        *(f"shared {kind}" for kind in KINDS), "shared fp8-block on ranks", "shared int4 on ranks",
    ],
)  # fmt: skip
def test_quantised_experts_give_the_logits_of_their_numbers(
    config: ModelConfig, ranks: int, kind: str
) -> None:
    """Without rounding, so that places and scales alone decide."""
    bench, meant = quantised_bench(config, kind, ranks, None)
    ids = prompt(config, 16)
    wanted = reference_logits(config, meant, ids)
    torch.testing.assert_close(bench.feed(ids, 8), wanted, rtol=0, atol=ATOL)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["fp8-block", "int4"])
@pytest.mark.parametrize("config", [wide_experts(256), with_shared_mlp(wide_experts(256))])
def test_what_quantised_experts_are_multiplied_with_stays_near(
    config: ModelConfig, kind: str
) -> None:
    bench, meant = quantised_bench(config, kind, 1, torch.bfloat16)
    ids = prompt(config, 16)
    wanted = reference_logits(config, meant, ids)
    for seen in (bench.feed(ids, 8), bench.feed(ids[:8])):
        right = wanted[: len(seen)]
        errors = (seen - right).norm(dim=1) / right.norm(dim=1)
        assert 1e-5 < float(errors.median()) < 0.02


def test_a_layers_experts_may_have_a_format_of_their_own() -> None:
    """Quantised gate_up beside a `down` in 16 bits, in one layer alone."""
    config = MIXTURES["softmax"]
    names = [f"layers.1.experts.{n}.gate_up" for n in range(16)]
    stored = alike(config, "fp8-block", names)
    plan = make_plan(config, Dtype.BF16, gpu(SMS), formats=formats_of(stored))
    assert len(plan.image.kinds) == 2
    whole, mixed = (kind.experts for kind in plan.image.kinds)
    assert whole is not None
    assert mixed is not None
    assert mixed.gate_up.num_bytes < whole.gate_up.num_bytes
    assert mixed.down.num_bytes == whole.down.num_bytes
    rounded = {
        k: v if "router" in k else v.bfloat16().float() for k, v in random_weights(config).items()
    }
    parts, meant = quantised(rounded, stored)
    ids = prompt(config, 24)
    seen, wanted = (
        Bench(config, plan, parts, torch.bfloat16).feed(ids, 8),
        reference_logits(config, meant, ids),
    )
    errors = (seen - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert float(errors.median()) < 0.02


@pytest.mark.parametrize(
    ("kinds", "named"),
    [
        ({0: "int4"}, "experts of layer 0 with gate_up in several formats"),
        (dict.fromkeys(range(16), "int4-permuted"), "gate_up of experts in int4"),
        (dict.fromkeys(range(16), "super-int4"), "gate_up of experts in int4"),
        ({16: "int4"}, "a format of layers.0.experts.16.gate_up"),
    ],
    ids=["one of them", "permuted", "super-blocks", "none such"],
)
def test_formats_of_experts_that_the_kernel_does_not_read(
    kinds: dict[int, str], named: str
) -> None:
    stored = {f"layers.0.experts.{n}.gate_up": FORMATS[kind] for n, kind in kinds.items()}
    with pytest.raises(ShapeUnsupported, match=named):
        make_plan(MIXTURES["softmax"], Dtype.BF16, gpu(SMS), formats=formats_of(stored))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", MIXTURES)
def test_every_tile_and_every_logit_is_one_blocks(name: str, ranks: int) -> None:
    plan = plan_of(MIXTURES[name], ranks)
    for kind in plan.image.kinds:
        experts = kind.experts
        if experts is None:
            continue
        count = experts.num_logits
        rows = [row for block in range(plan.blocks) for row in experts.router_rows(block)]
        assert rows == list(range(count))
        for slots in range(1, experts.most_slots(8) + 1):
            shares = [experts.tiles(block, slots) for block in range(plan.blocks)]
            owned = [tile for share in shares for tile in share]
            wanted = [(s, t) for s in range(slots) for t in range(experts.gate_up.units)]
            assert owned == wanted
            assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_memory_and_streams_count_experts() -> None:
    plan = plan_of(MIXTURES["softmax"])
    tile = 16 * 512 * 2
    each = 40 // 8 * tile + 72 // 8 * tile // 2
    assert plan.image.experts_bytes == 2 * 16 * each
    attention = [op.matrix.num_bytes for op in plan.image.kinds[0].in_blocks.values()]
    of_layers = 2 * (sum(attention) + 3 * each)  # three experts of a token
    assert plan.image.streamed_bytes == of_layers + plan.head.matrix.num_bytes
    assert packed_bytes(plan) - plan.image.num_bytes >= plan.image.experts_bytes


@pytest.mark.parametrize(
    ("mixture", "named"),
    [
        (Mixture(Router(16, 3), Mlp(40), shared=Mlp(36)), "shared experts of 36 neurons"),
        (Mixture(Router(16, 3), Mlp(40), shared=Mlp(40, bias=True)), "shared experts with biases"),
        (
            Mixture(Router(16, 3), Mlp(40), shared=Mlp(40, activation="gelu_tanh")),
            "the activation gelu_tanh of shared experts",
        ),
        (Mixture(Router(16, 3, num_groups=4, num_groups_kept=2), Mlp(40)), "groups of experts"),
        (Mixture(Router(1024, 3), Mlp(40)), "1024 experts"),
        (Mixture(Router(64, 40), Mlp(40)), "40 experts for a token"),
        (Mixture(Router(16, 3), Mlp(40, bias=True)), "experts with biases"),
        (Mixture(Router(16, 3), Mlp(40, activation="gelu_tanh")), "the activation gelu_tanh"),
        (Mixture(Router(16, 3), Mlp(36)), "intermediate_size 36"),
    ],
)
def test_what_the_kernel_does_not_know_is_named(mixture: Mixture, named: str) -> None:
    config = MIXTURES["softmax"]
    layers = tuple(replace(layer, mlp=mixture) for layer in config.layers)
    with pytest.raises(ShapeUnsupported, match=named):
        plan_of(replace(config, layers=layers))


def test_experts_of_too_few_neurons_for_the_ranks_are_refused() -> None:
    with pytest.raises(ShapeUnsupported, match="experts of 40 neurons on 4 ranks"):
        plan_of(MIXTURES["softmax"], 4)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("name", ["softmax", "some layers dense", *SHARED])
def test_what_is_packed_for_a_gpu_is_what_the_interpreter_reads(name: str, early: bool) -> None:
    with routing_early(early=early):
        require_packed_alike(MIXTURES[name])


def require_packed_alike(config: ModelConfig) -> None:
    plan, weights = plan_of(config), random_weights(config)
    packed = pack_weights(plan, dict(weights), torch.device("cpu"))
    experts = load_experts(plan, weights, torch.bfloat16)
    assert packed.experts is not None
    assert experts is not None
    assert torch.equal(packed.experts, experts)
    vectors = load(plan, weights, torch.bfloat16)[1]
    known = ~vectors.isnan()
    assert torch.equal(packed.vectors[known], vectors[known])


def test_what_all_tokens_take_lies_and_streams_like_an_mlp() -> None:
    """Between the output of attention and the experts, in the blocks' own weights."""
    plan = plan_of(MIXTURES["shared, gated"])
    (kind,) = plan.image.kinds
    names = ["qkv", "attention_output", "shared.gate_up", "shared.down"]
    assert [*kind.in_blocks] == names
    assert [*kind.operations] == [*names[:3], "gate_up", "shared.down", "down"]
    assert kind.matrix_offset("shared.down") > kind.matrix_offset("shared.gate_up") > 0
    assert kind.vectors["router"].shape == (16 * 72,)
    assert kind.vectors["shared_gate"].shape == (72,)
    without = plan_of(MIXTURES["softmax"])
    more = plan.image.streamed_bytes - without.image.streamed_bytes
    own = [kind.operations[name].matrix.num_bytes for name in names[2:]]
    assert more == 2 * sum(own)
    assert packed_bytes(plan) - packed_bytes(without) >= more


def test_blocks_without_rows_of_what_all_tokens_take() -> None:
    """An MLP of few neurons leaves as many blocks at work as there would be without it."""
    plan = plan_of(MIXTURES["shared of several sizes"])
    small = plan.image.layer(0).operations["shared.gate_up"].matrix
    assert plan.blocks == SMS
    assert small.units < plan.blocks
    assert 0 in {small.num_units(block) for block in range(plan.blocks)}


def test_super_blocks_of_what_all_tokens_take_are_refused_where_they_join() -> None:
    config = with_shared_mlp(wide_experts(256))
    for name, is_fine in (("gate_up", True), ("down", False)):
        stored = {f"layers.0.shared.{name}": FORMATS["super-int4"]}
        if is_fine:
            make_plan(config, Dtype.BF16, gpu(SMS), formats=formats_of(stored))
            continue
        with pytest.raises(ShapeUnsupported, match="down of shared experts in int4"):
            make_plan(config, Dtype.BF16, gpu(SMS), formats=formats_of(stored))


def test_a_gate_lies_right_behind_the_routers_rows() -> None:
    mixture = Mixture(Router(15, 3), Mlp(40), shared=Mlp(40), gates_shared=True)
    config = MIXTURES["softmax"]
    layers = tuple(replace(layer, mlp=mixture) for layer in config.layers)
    with pytest.raises(ShapeUnsupported, match="a gate of shared experts behind 1080 values"):
        plan_of(replace(config, layers=layers))


def test_all_blocks_of_qwen3_30b_a3b_stream_as_much() -> None:
    plan = make_plan(read_config(MIXTURE), Dtype.BF16, TYPICAL["sm_90a"])
    (experts,) = (kind.experts for kind in plan.image.kinds)
    assert experts is not None
    assert plan.blocks == 128
    assert {len(experts.tiles(block, 8)) for block in range(plan.blocks)} == {6}
    assert len({plan.image.block_bytes(block) for block in range(plan.blocks)}) == 1
