"""Prompts of lanes on one rank and several, in whatever order these come to run."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from interpreter.lane_models import CASES, fields_of, random_weights
from interpreter.models import prompt, reference_logits
from plan.shapes import LANEFORMER
from soloist.kv.pool import PagePool
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.families import read_config, tensors
from soloist.parallel.lanes import LaneShare, lanes_of_ranks
from soloist.prefill import communicator, settling
from soloist.prefill.buffers import bytes_per_token
from soloist.prefill.elementwise import (
    Chunk,
    Elementwise,
    MakeElementwise,
    Reach,
    TorchElementwise,
    Vectors,
)
from soloist.prefill.lane_elementwise import Due, MakeLanes, News, TorchLanes
from soloist.prefill.part import Part
from soloist.prefill.products import Products
from soloist.prefill.residual_streams import ResidualStreams, residual_streams_of
from soloist.prefill.runner import Prefill
from soloist.prefill.widths import Widths
from soloist.weights.sharding import shard_all
from unit.model.configurations import written

CPU = torch.device("cpu")
MOST, PAGES = 64, [2, 0, 1]
ATOL = 1e-4
# Chunks of a prompt, as its tokens' borders.
CUTS = [0, 1, 13, 45, 50]
SILENT = {"silent but for the early sum", "silent"}


class LaneByLane(Products):
    """Multiplies so that libraries have no choice: they may take other ways for fewer lanes."""

    def multiply_by(self, x: Tensor, matrix: Tensor, out: Tensor) -> None:
        if out.ndim == 2:  # of the head
            out[0] = (matrix.float() * x[0].float()).sum(-1)
            return
        for given, own, made in zip(lanes_of(x, out), matrix, out, strict=True):
            torch.mm(given, own.mT, out=made)


def lanes_of(x: Tensor, out: Tensor) -> Tensor:
    """A factor with lanes first, as `out` has them."""
    return x if x.ndim == 3 else x.view(len(x), len(out), -1).transpose(0, 1)


def spread(
    config: ModelConfig,
    ranks: int,
    of_lanes: MakeLanes = TorchLanes,
    dtype: torch.dtype = torch.float32,
    devices: Sequence[torch.device] = (),
    multiply: type[Products] = Products,
    most: int = MOST,
    operations: MakeElementwise = TorchElementwise,
) -> list[Part]:
    """A part for each rank, not connected yet; on the CPU unless told otherwise."""
    a, parts = lanes_of_ranks(config, ranks).layers[0].attention, []
    whole = random_weights(config)
    for rank, device in enumerate(devices or [CPU] * ranks):
        share = LaneShare(config, ranks, rank)
        weights = {k: v.to(device) for k, v in shard_all(share, whole).items()}
        held = {k: v.to(dtype) for k, v in weights.items() if not k.endswith("norm")}
        vectors = {k: v for k, v in weights.items() if k.endswith("norm")}
        pool = PagePool(config.num_layers, a.num_kv_heads, a.head_dim, 3, dtype, device)
        part = Part(share, held.__getitem__, vectors, pool, operations, most, of_lanes)
        part.work.products.__class__ = multiply  # of the same matrices
        parts.append(part)
    return parts


def logits_in_chunks(run: Prefill, ids: Sequence[int]) -> list[Tensor]:
    """Of the last token of each chunk; every other chunk's are not asked for."""
    found = []
    for i, (start, stop) in enumerate(pairwise(CUTS)):
        logits = run.run(ids[start:stop], start, PAGES, want_logits=i % 2 == 0)
        assert (logits is None) == (i % 2 == 1)
        if logits is not None:
            found.append(logits.clone())
    return found


@pytest.fixture(scope="module", params=CASES)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ModelConfig, list[int], list[Tensor]]:
    """Its name's model, a prompt, the reference's logits."""
    config = read_config(written(tmp_path_factory.mktemp("lanes"), fields_of(request.param)))
    ids = prompt(config, CUTS[-1])
    wanted = reference_logits(config, random_weights(config), ids)
    return config, ids, [wanted[stop - 1] for stop in CUTS[1::2]]


def ranks_of(config: ModelConfig) -> list[int]:
    """On how many ranks the model runs; lanes that never hear each other only on one."""
    assert config.lanes is not None
    is_silent = not (config.lanes.early_sum or config.lanes.mlp_comm or config.lanes.attention_comm)
    return [1] if is_silent and config.lanes.head == "vocab_parallel" else [1, 2, 8]


def test_any_number_of_ranks_gives_the_references_logits(case) -> None:
    config, ids, wanted = case
    for ranks in ranks_of(config):
        made = logits_in_chunks(Prefill(spread(config, ranks)), ids)
        for seen, right in zip(made, wanted, strict=True):
            torch.testing.assert_close(seen, right, rtol=0, atol=ATOL)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name", ["mean of lanes", "vocabulary slices", "sum before norm", "no early sum"]
)
def test_bits_do_not_depend_on_the_ranks(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Neither of logits nor of keys and values in any layer."""
    config = read_config(written(tmp_path, fields_of(name)))
    ids, found = prompt(config, CUTS[-1]), []
    for ranks in (1, 2, 4, 8):
        parts = spread(config, ranks, dtype=dtype, multiply=LaneByLane)
        logits = logits_in_chunks(Prefill(parts), ids)
        found.append([*logits, torch.cat([part.pool.tensor for part in parts], 2)])
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


class Alone(TorchElementwise):
    """Kernels of one rank have nobody to tell or to wait for."""

    def tell(self, reach: Reach) -> None:
        raise AssertionError(reach)

    meet = tell


class AloneLanes(TorchLanes):
    """The same."""

    def sum_lanes(self, reach: Reach, due: Due) -> None:
        raise AssertionError(reach, due)


def test_one_rank_waits_for_nobody(case) -> None:
    config, ids, wanted = case
    made = logits_in_chunks(Prefill(spread(config, 1, AloneLanes, operations=Alone)), ids)
    torch.testing.assert_close(made[-1], wanted[-1], rtol=0, atol=ATOL)


# Widths -------------------------------------------------------------------------------------------


class Exact(Products):
    """Sums in 64 bits, so that a row's bits do not depend on how many there are."""

    split_at = 0  # rows at which sums over queries are rounded in halves

    def multiply_by(self, x: Tensor, matrix: Tensor, out: Tensor) -> None:
        given, matrix = lanes_of(x, out).double(), matrix.mT.double()
        half = given.shape[-1] // 2 if given.shape[1] == self.split_at else 0
        parts = [given[..., :half] @ matrix[:, :half], given[..., half:] @ matrix[:, half:]]
        out.copy_(parts[0].to(out.dtype) + parts[1].to(out.dtype))


@pytest.mark.parametrize("ranks", [1, 2])
def test_passes_of_settled_widths_are_the_references(case, ranks: int) -> None:
    """Padding and gathered keys change nothing, wherever a prompt is cut."""
    config, ids, wanted = case
    if ranks not in ranks_of(config):
        return
    parts = spread(config, ranks, most=256)
    for part in parts:
        part.take_widths(Widths((256,)))
    run = Prefill(parts)
    for _ in range(2):  # the second time over pages that hold something else
        made = logits_in_chunks(run, ids)
        for seen, right in zip(made, wanted, strict=True):
            torch.testing.assert_close(seen, right, rtol=0, atol=ATOL)
        for part in parts:
            part.pool.tensor.normal_()


@pytest.mark.parametrize("name", ["mean of lanes", "vocabulary slices"])
def test_what_is_compared_is_what_passes_multiply(name: str, tmp_path: Path) -> None:
    config = read_config(written(tmp_path, fields_of(name)))
    part = spread(config, 2, most=256)[1]
    for matrix_name, first in settling.products_of(part):
        assert first == 0
        matrix = part.work.products.matrix(matrix_name)
        x = torch.randn(256, matrix.shape[2])
        wanted = torch.stack([x @ own.T for own in matrix])
        if matrix_name.endswith("gate_up"):
            gate, up = wanted.chunk(2, -1)
            wanted = torch.nn.functional.silu(gate) * up
        made = settling.multiply_as_a_pass(part, matrix_name, 0, x)
        torch.testing.assert_close(made, wanted.transpose(0, 1).flatten(1))


@pytest.mark.parametrize("ranks", [1, 2])
def test_widths_whose_products_split_their_sums_are_refused(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settling, "tries_widths", lambda _: True)
    monkeypatch.setattr(settling, "attention_is_invariant_at", lambda *_: True)
    config = read_config(written(tmp_path, fields_of("mean of lanes")))
    for split_at, left in (
        (0, (128, 192, 256, 384, 512, 768)),
        (384, (128, 192, 256, 512, 768)),
        (256, (128, 192, 384, 512, 768)),
        (192, (128, 256, 384, 512, 768)),
    ):
        monkeypatch.setattr(Exact, "split_at", split_at)
        run = Prefill(spread(config, ranks, dtype=torch.bfloat16, multiply=Exact, most=768))
        run.settle_widths()
        assert run.widths == left, "no product of lanes can be padded"


@pytest.mark.parametrize(("ranks", "cuts"), [(1, [1]), (2, [1, 2, 4])])
def test_where_a_recorded_pass_is_cut(ranks: int, cuts: list[int], tmp_path: Path) -> None:
    """After the first layer; on several ranks after 2, 4 and so on, too, never behind the last."""
    config = read_config(written(tmp_path, fields_of("seven layers")))
    part, layers = spread(config, ranks, multiply=LaneByLane)[0], []
    part.model_pass._layer = lambda layer, *_, **__: iter([layers.append(layer)])
    part.communicator.begin = lambda *_: None
    chunk = part.placed([1, 2], 0, PAGES, want_logits=True)
    seen = [len(layers) for _ in part.graph_parts(chunk)]
    assert seen == cuts
    assert layers == list(range(7))


# Orders -------------------------------------------------------------------------------------------


class Counting(TorchElementwise):
    """Counts what the rank has told; whoever waits finds that all have told as often."""

    def __init__(self, config: ModelConfig, vectors: Vectors, pool: PagePool) -> None:
        super().__init__(config, vectors, pool)
        self.told = 0
        self.all: list[Counting] = [self]

    @property
    def may_go_on(self) -> bool:
        return min(other.told for other in self.all) >= self.told

    def tell(self, reach: Reach) -> None:  # noqa: ARG002 - of the interface
        self.told += 1

    def meet(self, reach: Reach) -> None:  # noqa: ARG002 - of the interface
        assert self.may_go_on, "the driver waits for it"


class CountingLanes(TorchLanes):
    """Counts sums as well, which tell everybody."""

    base: Counting

    def __init__(self, base: Elementwise) -> None:
        super().__init__(base)
        self.waiting: tuple[Reach, Due] | None = None

    def sum_lanes(self, reach: Reach, due: Due) -> None:
        assert self.base.may_go_on, "the driver waits for it"
        super().sum_lanes(reach, due)
        self.base.told += 1

    def hear_and_sum(
        self, streams: Tensor, news: News, weight: Tensor, out: Tensor, reach: Reach, due: Due
    ) -> None:
        self.hear(streams, news, weight, out)  # at once, and the sums as late as may be
        self.waiting = (reach, due)

    def go_on(self) -> None:
        if self.waiting is not None:
            self.sum_lanes(*self.waiting)
            self.waiting = None


Order = Callable[[list[int]], int]


def in_order(parts: list[Part], ids: Sequence[int], order: Order) -> list[Tensor]:
    """As `logits_in_chunks`; `order` chooses which rank that may go on does, until it waits next.

    Nobody waits for the end of a pass before the next one.
    """
    kernels = [part.work.operations for part in parts]
    of_lanes = [part.communicator._lanes for part in parts]
    for part, kernel in zip(parts, kernels, strict=True):
        assert isinstance(kernel, Counting)
        kernel.all = kernels
        part.connect(parts)

    def whole(part: Part, found: list[Tensor]) -> Iterator[None]:
        for i, (start, stop) in enumerate(pairwise(CUTS)):
            wants = i % 2 == 0
            chunk: Chunk = part.placed(ids[start:stop], start, PAGES, want_logits=wants)
            yield from part.stages(chunk, want_logits=wants)
            if wants:
                found.append(part.logits.clone())

    found: list[list[Tensor]] = [[] for _ in parts]
    running = {rank: whole(part, found[rank]) for rank, part in enumerate(parts)}
    with torch.inference_mode():
        while running:
            ready = [rank for rank in running if kernels[rank].may_go_on]
            assert ready, "ranks wait for each other"
            rank = order(ready)
            of_lanes[rank].go_on()
            if next(running[rank], "over") == "over":
                del running[rank]
    return [torch.cat(parts_of) for parts_of in zip(*found, strict=True)]


def orders(seed: int) -> list[Order]:
    """At random; one rank as far ahead as it may, and one as far behind."""
    choose = random.Random(seed)
    return [
        choose.choice,
        min,
        max,
        lambda ready: 1 if 1 in ready else choose.choice(ready),
        lambda ready: choose.choice([r for r in ready if r != 1] or ready),
    ]


ORDERED = [name for name in CASES if name not in SILENT and "wide" not in name]


@pytest.mark.parametrize(
    ("name", "ranks"),
    [*((name, 2) for name in ORDERED), ("seven layers", 4), ("delay 1", 4), ("mean of lanes", 8)],
)
def test_bits_do_not_depend_on_who_is_ahead(name: str, ranks: int, tmp_path: Path) -> None:
    config = read_config(written(tmp_path, fields_of(name)))
    ids = prompt(config, CUTS[-1])
    alone = logits_in_chunks(Prefill(spread(config, 1, multiply=LaneByLane)), ids)
    for order in orders(seed=ranks):
        made = in_order(
            spread(config, ranks, CountingLanes, multiply=LaneByLane, operations=Counting),
            ids,
            order,
        )
        assert all(torch.equal(seen, right) for seen, right in zip(made, alone, strict=True))


@pytest.mark.parametrize("name", ["delay 1", "no early sum", "seven layers"])
def test_rings_have_no_place_too_many(name: str, tmp_path: Path, monkeypatch) -> None:
    """With one fewer a rank that is ahead overwrites what somebody still needs."""
    config = read_config(written(tmp_path, fields_of(name)))
    ids = prompt(config, CUTS[-1])
    alone = logits_in_chunks(Prefill(spread(config, 1, multiply=LaneByLane)), ids)

    def fewer(config: ModelConfig) -> ResidualStreams:
        streams = residual_streams_of(config)
        return replace(streams, ring_modules=streams.ring_modules - 1)

    monkeypatch.setattr(communicator, "residual_streams_of", fewer)
    seen = [
        in_order(
            spread(config, 2, CountingLanes, multiply=LaneByLane, operations=Counting), ids, order
        )
        for order in orders(seed=0)
    ]
    assert not all(torch.equal(a, b) for made in seen for a, b in zip(made, alone, strict=True))


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_buffers_are_what_the_estimate_counts(ranks: int) -> None:
    """And attention's result, which has no buffer, but for one token and what all models have."""
    config = read_config(LANEFORMER)
    held, share = lanes_of_ranks(config, ranks), LaneShare(config, ranks, 0)
    a, meta, tokens = held.layers[0].attention, torch.device("meta"), 2048
    pool = PagePool(held.num_layers, a.num_kv_heads, a.head_dim, 32, torch.float16, meta)
    vectors = {
        spec.name: torch.ones(spec.shape) for spec in tensors(config) if spec.name.endswith("norm")
    }
    part = Part(share, vectors.__getitem__, vectors, pool, most_tokens=tokens)
    counted = bytes_per_token(held, Dtype.FP16)
    attended = a.num_query_heads * a.head_dim * 2
    if ranks == 1:  # which sums while it adds, and needs no buffer for it
        counted -= residual_streams_of(config).ring_modules * config.hidden_size * 4
    assert part.num_bytes / tokens + attended == pytest.approx(counted, rel=0.02)
