"""Prompts of mixtures through packed experts; the kernels are those for the GPU, by g++."""

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from interpreter.mixtures import MIXTURES
from interpreter.quantised import alike, formats_of, quantised
from plan.shapes import PUBLIC
from soloist.engine.compiling import kernel_sources
from soloist.jit.source import Source
from soloist.megakernel.gpu import TYPICAL, Gpu
from soloist.megakernel.packed_weights import PackedWeights
from soloist.megakernel.plan import Plan, make_plan
from soloist.model.config import Layer, Mixture, Mlp, ModelConfig, Router
from soloist.model.dtype import Dtype
from soloist.prefill import expert_form, packed_experts
from soloist.prefill.expert_form import (
    expert_sources,
    most_pieces,
    packed_experts_bytes,
    piece_rows,
    reads_packed_experts,
)
from soloist.prefill.fragments import Tiling
from soloist.prefill.packed_experts import PackedExperts
from soloist.prefill.packed_form import Form
from soloist.prefill.packed_product import Groups
from soloist.reference.experts import Choice, choose
from soloist.weights.packed import pack_weights
from soloist.weights.unpacking import UnpackedExperts
from unit.prefill.models import random_weights
from unit.prefill.packed_on_host import built, built_expert_rows

CPU = torch.device("cpu")
TOKENS = 150


def mixture_model(*neurons: int, hidden_size: int, router: Router) -> ModelConfig:
    attention = MIXTURES["softmax"].layers[0].attention
    layers = tuple(Layer(attention, Mixture(router, Mlp(n))) for n in neurons)
    return replace(MIXTURES["softmax"], layers=layers, hidden_size=hidden_size)


USUAL = Router(16, 3, normalises=True)
# A model, and the number of SMs: it decides whether `down` ends in half a step.
MODELS = {
    "usual": (mixture_model(64, 96, hidden_size=64, router=USUAL), 7),
    "half steps": (mixture_model(224, 768, hidden_size=96, router=USUAL), 6),
    "few experts": (mixture_model(544, hidden_size=64, router=Router(4, 2)), 7),
    "many experts": (mixture_model(32, hidden_size=64, router=Router(70, 5)), 7),
}


class OnHost:
    """`PackedProduct` of the same form, by coroutines."""

    folder: Path
    libraries: ClassVar[dict[Form, ctypes.CDLL]] = {}  # of all tests

    def __init__(self, form: Form, _: Path | None) -> None:
        self.form = replace(form, token_slots=3, most_weight_slots=3)
        if form not in self.libraries:
            self.libraries[form] = built(self.form, self.folder / str(len(self.libraries)))
        self._library = self.libraries[form]

    def launch_grouped(
        self, x: Tensor, image: int, groups: Groups, table: Tensor, tiling: Tiling, out: Tensor,
        _: int,
    ) -> None:  # fmt: skip
        assert out.shape == (len(x), tiling.results)
        assert int(groups.number[:4].view(torch.int32)) <= groups.most
        places = (x.data_ptr(), image, *(t.data_ptr() for t in (table, out, *groups[:2])))
        numbers = (len(x), x.shape[1], tiling.count, tiling.results, 2, 1)
        run = self._library.run_grouped
        given = (*map(ctypes.c_void_p, places), *map(ctypes.c_uint32, numbers))
        assert run(*given, ctypes.c_uint64(groups.expert_bytes)), "somebody waits forever"


class RowsOnHost:
    """`ExpertRows` of the same source."""

    folder: Path
    libraries: ClassVar[dict[Source, ctypes.CDLL]] = {}

    def __init__(self, source: Source, _: Path | None) -> None:
        if source not in self.libraries:
            place = self.folder / f"rows{len(self.libraries)}"
            self.libraries[source] = built_expert_rows(source, place)
        self._library = self.libraries[source]

    def route(self, x: Tensor, router: Tensor, logits: Tensor, _: int) -> None:
        assert self._library.run_route(*map(address, (x, router, logits)), len(x))

    def choose(self, logits: Tensor, correction: Tensor | None, choice: Choice, _: int) -> None:
        corrected = ctypes.c_void_p(None) if correction is None else address(correction)
        places = (address(logits), corrected, *map(address, choice))
        assert self._library.run_choose(*places, len(choice.experts))

    def cut(
        self, chosen: Tensor, rows: int, number: Tensor, pieces: Tensor, row_of: Tensor,
        token_of: Tensor, _: int,
    ) -> None:  # fmt: skip
        places = (chosen, number, pieces, row_of, token_of)
        assert self._library.run_cut(*map(address, places), chosen.numel(), rows)

    def take(self, x: Tensor, token_of: Tensor, out: Tensor, _: int) -> None:
        self._library.run_take(*map(address, (x, token_of, out)), out.numel() // 8)

    def add_shares(
        self, given: Tensor, row_of: Tensor, shares: Tensor, out: Tensor, _: int
    ) -> None:
        places = map(address, (given, row_of, shares, out))
        self._library.run_add_shares(*places, len(out), int(out.dtype is torch.float32))


def address(x: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    OnHost.libraries.clear()
    RowsOnHost.libraries.clear()
    return tmp_path_factory.mktemp("experts")


@pytest.fixture(autouse=True)
def on_host(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    OnHost.folder = RowsOnHost.folder = folder
    monkeypatch.setattr(packed_experts, "PackedProduct", OnHost)
    monkeypatch.setattr(packed_experts, "ExpertRows", RowsOnHost)
    monkeypatch.setattr(packed_experts, "expert_sources", lambda _: ())
    monkeypatch.setattr(PackedExperts, "_stream", 0)
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.device("cpu"))


def packed_model(name: str, kind: str | None) -> tuple[Plan, PackedWeights]:
    config, sms = MODELS[name]
    stored = {} if kind is None else alike(config, kind)
    held = {n: x if "router" in n else x.bfloat16() for n, x in random_weights(config).items()}
    parts, _ = quantised(held, stored)
    gpu = Gpu("sm_90a", sms, 227 * 1024)
    plan = make_plan(config, Dtype.BF16, gpu, formats=formats_of(stored))
    return plan, pack_weights(plan, dict(parts), CPU)


def choice_of(router: Router, tokens: int, seed: int = 0) -> Choice:
    """Some experts are chosen by most tokens, and some by none."""
    draw = torch.Generator().manual_seed(seed)
    liked = torch.linspace(0, 3, router.num_experts).exp() - 1
    chosen = torch.multinomial(liked.expand(tokens, -1), router.num_chosen, generator=draw)
    shares = torch.rand(tokens, router.num_chosen, generator=draw)
    return Choice(chosen.sort(-1).values, shares)


def wanted(plan: Plan, packed: PackedWeights, layer: int, x: Tensor, choice: Choice) -> Tensor:
    experts = UnpackedExperts(plan, packed)
    total = torch.zeros(x.shape, dtype=torch.float64)
    for expert in choice.experts.unique().tolist():
        gate_up, down = (m[0].double() for m in experts(layer, torch.tensor([expert])))
        gate, up = (x.double() @ gate_up.T).bfloat16().double().chunk(2, dim=1)
        given = (silu(gate) * up).bfloat16().double() @ down.T
        total += given * (choice.shares * (choice.experts == expert)).sum(-1, keepdim=True)
    return total


def activations(plan: Plan, tokens: int) -> Tensor:
    draw = torch.Generator().manual_seed(tokens)
    return torch.randn(tokens, plan.model.hidden_size, generator=draw).bfloat16()


CASES = [
    ("usual", None), ("half steps", None), ("few experts", None), ("many experts", None),
    ("usual", "int4"), ("half steps", "fp8-block"),
    pytest.param("half steps", "int4-zeros", marks=pytest.mark.slow),
    pytest.param("few experts", "int8", marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.few(3)
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_tokens_get_what_their_experts_give(name: str, kind: str | None) -> None:
    plan, packed = packed_model(name, kind)
    run = PackedExperts(plan, packed, TOKENS, None)
    assert any(k.operations["down"].matrix.ends_in_half for k in plan.image.kinds) == (
        name == "half steps" and kind is None
    )
    for layer, of_layer in enumerate(plan.model.layers):
        assert of_layer.router is not None
        for tokens in (TOKENS, 1):
            x, choice = activations(plan, tokens), choice_of(of_layer.router, tokens)
            out = torch.full_like(x, 7.0)
            run(layer, x, choice, out)
            theirs = wanted(plan, packed, layer, x, choice)
            assert (out.double() - theirs).norm() <= 1e-2 * theirs.norm()
            beside = activations(plan, tokens + 1)[1:].float()
            run(layer, x, choice, out, beside)
            assert (out.double() - theirs - beside).norm() <= 1e-2 * theirs.norm()


def test_bits_depend_on_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, packed = packed_model("usual", None)
    run = PackedExperts(plan, packed, TOKENS, None)
    x, choice = activations(plan, TOKENS), choice_of(USUAL, TOKENS)

    def given(rows: slice) -> Tensor:
        out = torch.empty(x[rows].shape, dtype=torch.float32)
        run(1, x[rows], Choice(choice.experts[rows], choice.shares[rows]), out)
        return out

    whole = given(slice(None))
    for rows in (slice(0, 1), slice(70, 77), slice(3, 140)):
        assert torch.equal(given(rows), whole[rows])
    monkeypatch.setattr(expert_form, "_LEAST_WIDE_SHARE", 1)
    assert piece_rows(USUAL, TOKENS) == 128
    assert torch.equal(given(slice(None)), whole)
    monkeypatch.setattr(expert_form, "_WIDEST_SHARES", range(1, 100))
    assert piece_rows(USUAL, TOKENS) == 160
    assert torch.equal(given(slice(None)), whole)


ROUTERS = {
    "softmax": Router(40, 5),
    "normalised": Router(128, 8, normalises=True),
    "corrected sigmoids": Router(
        70, 4, "sigmoid", is_corrected=True, normalises=True, least_sum=1e-20, scale=1.5
    ),
    "all of them": Router(4, 4, normalises=True),
}


def launches_of(router: Router) -> RowsOnHost:
    config = mixture_model(32, hidden_size=160, router=router)
    plan = make_plan(config, Dtype.BF16, Gpu("sm_90a", 7, 227 * 1024))
    return RowsOnHost(expert_form.expert_rows_source(plan, router), None)


def chosen_by_kernel(router: Router, logits: Tensor, correction: Tensor | None) -> Choice:
    shape = (len(logits), router.num_chosen)
    seen = Choice(torch.full(shape, -1), torch.full(shape, torch.nan))
    launches_of(router).choose(logits.contiguous(), correction, seen, 0)
    return seen


@pytest.mark.parametrize("name", ROUTERS)
def test_experts_are_chosen_as_the_reference_chooses_them(name: str) -> None:
    router, draw = ROUTERS[name], torch.Generator().manual_seed(0)
    logits = torch.randn(37, router.num_experts, generator=draw) * 3
    logits[5:9] = logits[5:9].round()  # many are equal
    logits[9] = 0.0
    corrected = torch.randn(router.num_experts, generator=draw) if router.is_corrected else None
    seen, theirs = chosen_by_kernel(router, logits, corrected), choose(router, logits, corrected)
    assert torch.equal(seen.experts, theirs.experts)
    torch.testing.assert_close(seen.shares, theirs.shares, rtol=1e-5, atol=1e-7)
    # Nobody reads behind the experts, whatever logits are.
    logits[3], logits[4, 1] = torch.nan, torch.inf
    wild = chosen_by_kernel(router, logits, corrected).experts
    assert all(len(set(row)) == router.num_chosen for row in wild.tolist())
    assert 0 <= int(wild.min()) <= int(wild.max()) < router.num_experts


@pytest.mark.parametrize("name", ["softmax", "normalised"])
def test_logits_of_routers_are_products_in_fp32(name: str) -> None:
    router, draw = ROUTERS[name], torch.Generator().manual_seed(1)
    x = torch.randn(37, 160, generator=draw).bfloat16()
    weights = torch.randn(router.num_experts, 160, generator=draw)
    launches = launches_of(router)
    logits = [torch.empty(tokens, router.num_experts) for tokens in (37, 5)]
    for own in logits:
        launches.route(x[: len(own)], weights, own, 0)
    torch.testing.assert_close(logits[0], x.float() @ weights.T, rtol=1e-4, atol=1e-4)
    assert torch.equal(logits[1], logits[0][:5])


@pytest.mark.parametrize(("experts", "k", "tokens"), [(16, 3, 150), (70, 5, 41), (4, 2, 1)])
@pytest.mark.parametrize("rows", [8, 64])
def test_rows_are_cut_into_pieces(experts: int, k: int, tokens: int, rows: int) -> None:
    router = Router(experts, k)
    config = mixture_model(32, hidden_size=64, router=router)
    plan = make_plan(config, Dtype.BF16, Gpu("sm_90a", 7, 227 * 1024))
    chosen = choice_of(router, tokens).experts
    slots, most = tokens * k, experts + tokens * k // rows
    number, pieces = torch.zeros(1, dtype=torch.int32), torch.zeros(most, 4, dtype=torch.int32)
    row_of, token_of = torch.empty(2, slots, dtype=torch.int32)
    launch = RowsOnHost(expert_form.expert_rows_source(plan, router), None)
    launch.cut(chosen, rows, number, pieces, row_of, token_of, 0)
    assert pieces[: int(number)].tolist() == list(pieces_of(chosen.flatten(), rows))
    order = chosen.flatten().argsort(stable=True)
    assert torch.equal(row_of[order], torch.arange(slots, dtype=torch.int32))
    assert torch.equal(token_of, (order // k).int())


def pieces_of(chosen: Tensor, rows: int) -> Iterator[list[int]]:
    first = 0
    for expert, count in enumerate(chosen.bincount().tolist()):
        for start in range(first, first + count, rows):
            yield [expert, start, min(start + rows, first + count), 0]
        first += count


def test_buffers_take_what_the_estimate_says() -> None:
    for name in MODELS:
        plan, packed = packed_model(name, None)
        assert PackedExperts(plan, packed, TOKENS, None).num_bytes == packed_experts_bytes(
            plan, TOKENS
        )


def test_no_pass_needs_more_pieces_than_there_is_room_for() -> None:
    router = Router(128, 8)
    sizes = [piece_rows(router, tokens) for tokens in (1, 128, 1024, 1536, 2048, 4096)]
    assert sizes == [64, 64, 64, 128, 160, 128]
    for tokens in (1, 128, 1535, 1536, 2048):
        rows, slots = piece_rows(router, tokens), tokens * router.num_chosen
        # Every expert's last piece has one row.
        full, rest = divmod(slots - min(slots, 128), rows)
        assert full + min(slots, 128) <= most_pieces(router, tokens)
        assert rest < rows


def test_where_experts_are_read_as_they_are_packed() -> None:
    config, sms = MODELS["usual"]
    hopper, ampere = Gpu("sm_90a", sms, 227 * 1024), TYPICAL["sm_80"]
    assert reads_packed_experts(make_plan(config, Dtype.BF16, hopper))
    assert not reads_packed_experts(make_plan(config, Dtype.BF16, ampere))
    odd = replace(config, hidden_size=72)
    assert not reads_packed_experts(make_plan(odd, Dtype.BF16, hopper))
    dense = make_plan(PUBLIC["llama-3.2-1b"], Dtype.BF16, TYPICAL["sm_90a"])
    assert not reads_packed_experts(dense)


def test_all_kernels_are_compiled_ahead() -> None:
    config, _ = MODELS["usual"]
    plan = make_plan(config, Dtype.BF16, TYPICAL["sm_90a"])
    # gate_up of both sizes has as many columns; each matrix comes in three sizes of pieces.
    assert len(expert_sources(plan)) == 3 + 2 * 3 + 1
    sources = {named.source for named in kernel_sources(plan)}
    assert sources.issuperset(expert_sources(plan))
    ampere = make_plan(config, Dtype.BF16, TYPICAL["sm_80"])
    assert not {named.source.kernel for named in kernel_sources(ampere)} & {
        source.kernel for source in expert_sources(plan)
    }
