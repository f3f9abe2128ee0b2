"""Prompts of lanes on one rank and several, in whatever order these come to run."""

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from interpreter.lane_models import CASES, fields_of, random_weights
from interpreter.models import prompt, reference_logits
from plan.shapes import LANEFORMER
from soloist.megakernel.lanes import LaneShare, lanes_of_ranks
from soloist.megakernel.sharding import shard_all
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.families import read_config, tensors
from soloist.model.memory import KernelMemory, estimate, modules_under_way
from soloist.prefill import lanes
from soloist.prefill.elementwise import Chunk, Reach, Vectors
from soloist.prefill.lane_elementwise import Due, News, TorchLanes
from soloist.prefill.lanes import LanePrefill
from soloist.prefill.pages import PagePool
from soloist.prefill.prompts import PromptRunner
from soloist.prefill.ranks import RanksPrefill
from soloist.prefill.runner import MakeElementwise
from soloist.prefill.widths import Widths
from unit.model.configurations import written

CPU = torch.device("cpu")
MOST, PAGES = 64, [2, 0, 1]
ATOL = 1e-4
# Chunks of a prompt, as its tokens' borders.
CUTS = [0, 1, 13, 45, 50]
SILENT = {"silent but for the early sum", "silent"}


class LaneByLane(LanePrefill):
    """Multiplies so that libraries have no choice: they may take other ways for fewer lanes."""

    def _multiply_lanes(self, x: Tensor, name: str, out: Tensor) -> None:
        matrices = self._matrices(name)
        for lane, own in enumerate(matrices):
            given = x if x.ndim == 3 else self._by_lane(x)
            made = out if out.ndim == 3 else self._by_lane(out)
            torch.mm(given[lane], own.mT, out=made[lane])

    @staticmethod
    def _multiply_by(x: Tensor, matrix: Tensor, out: Tensor) -> None:
        out[0] = (matrix.float() * x[0].float()).sum(-1)


def spread(
    config: ModelConfig,
    ranks: int,
    elementwise: MakeElementwise | None = None,
    dtype: torch.dtype = torch.float32,
    devices: Sequence[torch.device] = (),
    make: type[LanePrefill] = LanePrefill,
    most: int = MOST,
) -> list[LanePrefill]:
    """A part for each rank, not connected yet; on the CPU unless told otherwise."""
    a, parts = lanes_of_ranks(config, ranks).layers[0].attention, []
    whole = random_weights(config)
    for rank, device in enumerate(devices or [CPU] * ranks):
        share = LaneShare(config, ranks, rank)
        weights = {k: v.to(device) for k, v in shard_all(share, whole).items()}
        held = {k: v.to(dtype) for k, v in weights.items() if not k.endswith("norm")}
        vectors = {k: v for k, v in weights.items() if k.endswith("norm")}
        pool = PagePool(config.num_layers, a.num_kv_heads, a.head_dim, 3, dtype, device)
        made = {} if elementwise is None else {"elementwise": elementwise}
        parts.append(make(share, held.__getitem__, vectors, pool, most_tokens=most, **made))
    return parts


def runner(parts: list[LanePrefill]) -> PromptRunner:
    return parts[0] if len(parts) == 1 else RanksPrefill(parts)


def logits_in_chunks(run: PromptRunner, ids: Sequence[int]) -> list[Tensor]:
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
        made = logits_in_chunks(runner(spread(config, ranks)), ids)
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
        parts = spread(config, ranks, dtype=dtype, make=LaneByLane)
        logits = logits_in_chunks(runner(parts), ids)
        found.append([*logits, torch.cat([part.pool.tensor for part in parts], 2)])
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


class Alone(TorchLanes):
    """Kernels of one rank have nobody to tell or to wait for."""

    def tell(self, reach: Reach) -> None:
        raise AssertionError(reach)

    meet = tell

    def sum_lanes(self, reach: Reach, due: Due) -> None:
        raise AssertionError(reach, due)


def test_one_rank_waits_for_nobody(case) -> None:
    config, ids, wanted = case
    made = logits_in_chunks(runner(spread(config, 1, Alone)), ids)
    torch.testing.assert_close(made[-1], wanted[-1], rtol=0, atol=ATOL)


# Widths -------------------------------------------------------------------------------------------


class Exact(LanePrefill):
    """Sums in 64 bits, so that a row's bits do not depend on how many there are."""

    split_at = 0  # rows at which sums over columns are rounded in halves

    def _multiply_lanes(self, x: Tensor, name: str, out: Tensor) -> None:
        given = (x if x.ndim == 3 else self._by_lane(x)).double()
        made, matrix = (
            out if out.ndim == 3 else self._by_lane(out),
            self._matrices(name).mT.double(),
        )
        half = given.shape[-1] // 2 if given.shape[1] == self.split_at else 0
        parts = [given[..., :half] @ matrix[:, :half], given[..., half:] @ matrix[:, half:]]
        made.copy_(parts[0].to(out.dtype) + parts[1].to(out.dtype))


@pytest.mark.parametrize("ranks", [1, 2])
def test_passes_of_settled_widths_are_the_references(case, ranks: int) -> None:
    """Padding and gathered keys change nothing, wherever a prompt is cut."""
    config, ids, wanted = case
    if ranks not in ranks_of(config):
        return
    parts = spread(config, ranks, most=256)
    for part in parts:
        part.take_widths(Widths((256,)))
    run = runner(parts)
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
    for matrix_name, first in part._products():
        assert first == 0
        matrix = part._matrices(matrix_name)
        x = torch.randn(256, matrix.shape[2])
        wanted = torch.cat([x @ own.T for own in matrix], 1)
        torch.testing.assert_close(part._multiply_as_a_pass(matrix_name, 0, x), wanted)


@pytest.mark.parametrize("ranks", [1, 2])
def test_widths_whose_products_split_their_sums_are_refused(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LanePrefill, "tries_widths", True)
    monkeypatch.setattr(LanePrefill, "agrees_on", lambda *_: True)
    config = read_config(written(tmp_path, fields_of("mean of lanes")))
    for split_at, left in (
        (0, (256, 384, 512, 768)),
        (384, (256, 512, 768)),
        (256, (384, 512, 768)),
    ):
        monkeypatch.setattr(Exact, "split_at", split_at)
        run = runner(spread(config, ranks, dtype=torch.bfloat16, make=Exact, most=768))
        run.settle_widths()
        assert run.widths == left, "no product of lanes can be padded"


@pytest.mark.parametrize(("ranks", "cuts"), [(1, [1]), (2, [1, 2, 4])])
def test_where_a_recorded_pass_is_cut(ranks: int, cuts: list[int], tmp_path: Path) -> None:
    """After the first layer; on several ranks after 2, 4 and so on, too, never behind the last."""
    config = read_config(written(tmp_path, fields_of("seven layers")))
    part, layers = spread(config, ranks, make=LaneByLane)[0], []
    part._layer = lambda layer, *_, **__: iter([layers.append(layer)])
    part._reaches = [Reach([], [])]
    seen = [
        len(layers)
        for _ in part._parts(part.placed([1, 2], 0, PAGES, want_logits=True), want_logits=True)
    ]
    assert seen == cuts
    assert layers == list(range(7))


# Orders -------------------------------------------------------------------------------------------


class Counting(TorchLanes):
    """Counts what the rank has told; whoever waits finds that all have told as often."""

    def __init__(self, config: ModelConfig, vectors: Vectors, pool: PagePool) -> None:
        super().__init__(config, vectors, pool)
        self.told = 0
        self.all: list[Counting] = [self]
        self.waiting: tuple[Reach, Due] | None = None

    @property
    def may_go_on(self) -> bool:
        return min(other.told for other in self.all) >= self.told

    def tell(self, reach: Reach) -> None:  # noqa: ARG002 - of the interface
        self.told += 1

    def meet(self, reach: Reach) -> None:  # noqa: ARG002 - of the interface
        assert self.may_go_on, "the driver waits for it"

    def sum_lanes(self, reach: Reach, due: Due) -> None:
        assert self.may_go_on, "the driver waits for it"
        super().sum_lanes(reach, due)
        self.told += 1

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


def in_order(parts: list[LanePrefill], ids: Sequence[int], order: Order) -> list[Tensor]:
    """As `logits_in_chunks`; `order` chooses which rank that may go on does, until it waits next.

    Nobody waits for the end of a pass before the next one.
    """
    kernels = [part._elementwise for part in parts]
    for part, kernel in zip(parts, kernels, strict=True):
        assert isinstance(kernel, Counting)
        kernel.all = kernels
        part.connect(parts)

    def whole(part: LanePrefill, found: list[Tensor]) -> Iterator[None]:
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
            kernels[rank].go_on()
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
    alone = logits_in_chunks(runner(spread(config, 1, make=LaneByLane)), ids)
    for order in orders(seed=ranks):
        made = in_order(spread(config, ranks, Counting, make=LaneByLane), ids, order)
        assert all(torch.equal(seen, right) for seen, right in zip(made, alone, strict=True))


@pytest.mark.parametrize("name", ["delay 1", "no early sum", "seven layers"])
def test_rings_have_no_place_too_many(name: str, tmp_path: Path, monkeypatch) -> None:
    """With one fewer a rank that is ahead overwrites what somebody still needs."""
    config = read_config(written(tmp_path, fields_of(name)))
    ids = prompt(config, CUTS[-1])
    alone = logits_in_chunks(runner(spread(config, 1, make=LaneByLane)), ids)
    monkeypatch.setattr(lanes, "modules_under_way", lambda c: modules_under_way(c) - 1)
    seen = [
        in_order(spread(config, 2, Counting, make=LaneByLane), ids, order)
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
    part = LanePrefill(share, vectors.__getitem__, vectors, pool, most_tokens=tokens)
    kernel = KernelMemory(image_bytes=0, workspace_bytes=0, page_tokens=64, chunk_tokens=tokens)
    few, many = (
        estimate(held, tensors(held), Dtype.FP16, n, n, kernel).scratch_bytes for n in (64, tokens)
    )
    each_more = 3 * 2 * a.num_kv_heads * a.head_dim * 2 + 2 * a.head_dim * 4  # of context
    counted = (many - few) / (tokens - 64) - each_more
    attended = a.num_query_heads * a.head_dim * 2
    if ranks == 1:  # which sums while it adds, and needs no buffer for it
        counted -= modules_under_way(config) * config.hidden_size * 4
    assert part.num_bytes / tokens + attended == pytest.approx(counted, rel=0.02)
