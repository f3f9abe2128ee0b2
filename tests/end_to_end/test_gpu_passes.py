"""Passes of settled widths on a GPU: the same bits, however a prompt is cut and launched.

Real widths, few layers: libraries choose their kernels by the sizes of products. Keys are gathered
and a library attends, as on all GPUs but Hopper's; of attention straight from pages
`test_gpu_page_attention.py` shows the same.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from plan.shapes import LANEFORMER, SHAPES, etude
from soloist.kv.pool import PagePool
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.families import read_config, tensors
from soloist.model.torch_types import TORCH_DTYPES
from soloist.parallel.lanes import lanes_of_ranks
from soloist.parallel.peers import allow_access
from soloist.parallel.share import Share, part_of, share_of
from soloist.prefill import chunk_attention
from soloist.prefill.fused import FusedElementwise
from soloist.prefill.fused_lanes import FusedLanes
from soloist.prefill.part import Part
from soloist.prefill.runner import Prefill
from soloist.prefill.settling import behaviours
from soloist.weights.random import random_weights
from soloist.weights.sharding import shard_all
from unit.prefill.models import vectors
from unit.prefill.test_fused import arch

CONTEXT, PAGES = 8192, 128
GPU = torch.device("cuda", 0)


def cut_shape(name: str) -> ModelConfig:
    """A few layers of it; 'windows' are a sliding family's, some of which do not end on a block."""
    if name == "etude":
        return replace(etude(), context_tokens=CONTEXT)
    files = {"windows": SHAPES["llama-3.2-1b"], "laneformer-2b": LANEFORMER, **SHAPES}
    config = read_config(files[name])
    layers = config.layers[:3] if config.lanes is None else config.layers[:5]
    if name == "windows":
        layers = tuple(
            replace(layer, attention=replace(layer.attention, window=window))
            for layer, window in zip(config.layers, (None, 700, 1024, 4096), strict=False)
        )
    return replace(config, context_tokens=CONTEXT, layers=layers)


def prefill(config: ModelConfig, dtype: Dtype, cache_root: Path) -> Prefill:
    weights = random_weights(tensors(config), dtype, GPU)
    a = config.layers[0].attention
    pool = PagePool(config.num_layers, a.num_kv_heads, a.head_dim, PAGES, TORCH_DTYPES[dtype], GPU)
    fused = partial(FusedElementwise, arch=arch(), cache_root=cache_root, pages=None)
    part = Part(Share(config, 1, 0), weights.__getitem__, vectors(weights), pool, fused)
    return Prefill([part])


@pytest.fixture(
    scope="module",
    params=[
        (name, dtype)
        for name in ("qwen3-1.7b", "laneformer-2b-as-llama", "windows", "etude")
        for dtype in (Dtype.BF16, Dtype.FP16)
    ],
    ids=lambda case: f"{case[0]}-{case[1].value}",
)
def settled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prefill]:
    """With the graphs of its widths, if any agree."""
    name, dtype = request.param
    run = prefill(cut_shape(name), dtype, tmp_path_factory.mktemp("cache"))
    run.settle_widths()
    if not run.widths:
        assert "H200" not in torch.cuda.get_device_name(0), "there some widths were seen to agree"
        pytest.skip("no widths agree here: prompts are read in the grid's chunks")
    run.capture([32, *run.widths])
    yield run
    del run
    torch.cuda.empty_cache()


def random_ids(config: ModelConfig, count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (count,), generator=generator)


def scattered(seed: int = 0) -> list[int]:
    pages = list(range(PAGES))
    random.Random(seed).shuffle(pages)
    return pages


def read(
    run: Prefill, ids: Tensor, cuts: list[int], *, by_graph: bool = True
) -> tuple[Tensor, list[Tensor]]:
    """Logits, and what lies in the pages of every rank, from pools that held something else."""
    parts = run.parts
    pages = scattered()
    try:
        for part in parts:
            part.pool.tensor.normal_()
            if not by_graph:
                vars(part)["has_graph"] = lambda _: False
        logits = None
        for start, stop in pairwise(cuts):
            logits = run.run(ids[start:stop], start, pages, want_logits=stop == len(ids))
        assert logits is not None
        whole = len(ids) // 64
        held = [part.pool.tensor[pages[:whole]].clone() for part in parts]
        return logits.clone(), held
    finally:
        for part in parts:
            vars(part).pop("has_graph", None)


def cut(count: int, first: int, most: int) -> list[int]:
    """A pass of `first` tokens, then passes of `most`."""
    return [0, *range(first, count, most), count]


def same(seen: tuple[Tensor, list[Tensor]], wanted: tuple[Tensor, list[Tensor]]) -> bool:
    return torch.equal(seen[0], wanted[0]) and all(
        torch.equal(a, b) for a, b in zip(seen[1], wanted[1], strict=True)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("count", [257, 300, 406, 1500, 2048, 4100])
def test_a_hit_at_any_block_has_the_bits_of_a_miss(settled: Prefill, count: int) -> None:
    ids, most = random_ids(settled.config, count), settled.widths[-1]
    cold = read(settled, ids, cut(count, min(most, count), most))
    assert cold[0].isfinite().all()
    for first in range(256, min(count, most + 1), 256):
        assert same(read(settled, ids, cut(count, first, most)), cold), first
    for width in (w for w in settled.widths if w % 256 == 0):
        assert same(read(settled, ids, cut(count, min(width, count), width)), cold), width


@pytest.mark.gpu
def test_a_graph_does_what_the_launches_do(settled: Prefill) -> None:
    for count in (20, 256, 257, 256 + 150, 1300, 4096 + 100):
        ids = random_ids(settled.config, count, seed=count)
        cuts = cut(count, min(512, count), 512)
        assert same(read(settled, ids, cuts, by_graph=False), read(settled, ids, cuts)), count


@pytest.mark.gpu
def test_recording_and_padding_store_nothing(settled: Prefill) -> None:
    pages = scattered()
    pool = settled.parts[0].pool
    pool.tensor.zero_()
    settled.run(random_ids(settled.config, 300), 512, pages)
    written = pool.tensor.flatten(1).any(1).nonzero().flatten().tolist()
    assert sorted(written) == sorted(pages[8:13])


@pytest.mark.gpu
def test_beyond_the_reach_of_graphs_bits_stay(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config, results = cut_shape("windows"), []
    ids = random_ids(config, 4000)
    for reach in (1024, CONTEXT):
        monkeypatch.setattr(chunk_attention, "REACH_TOKENS", reach)
        run = prefill(config, Dtype.BF16, tmp_path)
        run.settle_widths()
        if not run.widths:
            pytest.skip("no widths agree here")
        run.capture(run.widths)
        results.append(read(run, ids, cut(4000, 512, 512)))
    assert same(*results)


@pytest.mark.gpu
@pytest.mark.parametrize("split", [256, 1024])
def test_widths_whose_products_split_their_sums_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, split: int
) -> None:
    run = prefill(cut_shape("laneformer-2b-as-llama"), Dtype.BF16, tmp_path)
    part = run.parts[0]
    before, products = behaviours(part), part.work.products
    multiply = products.multiply

    def splitting(x: Tensor, name: str, out: Tensor, first: int = 0) -> None:
        multiply(x, name, out, first)
        if name.endswith("down") and len(x) in (split, 2 * split):
            matrix, half = products.matrix(name).mT, x.shape[1] // 2
            out.copy_((x[:, half:] @ matrix[half:]).float() + (x[:, :half] @ matrix[:half]).float())

    monkeypatch.setattr(products, "multiply", splitting)
    seen = behaviours(part)
    others = [w for w in before if w not in (split, 2 * split)]
    assert all(seen[split]["down"] != seen[w]["down"] for w in others)
    assert all((seen[a] == seen[b]) == (before[a] == before[b]) for a in others for b in others)
    run.settle_widths()
    unpadded = {w for w in run.widths if ("down", w) not in products.padded_rows}
    assert not unpadded & {split, 2 * split} or not unpadded & set(others)


def spread(
    config: ModelConfig, dtype: Dtype, devices: list[torch.device], cache_root: Path
) -> Prefill:
    """A rank on each of these devices, which may be the same; of lanes also one alone."""
    ranks, whole = len(devices), random_weights(tensors(config), dtype, GPU)
    parts: list[Part] = []
    for rank, device in enumerate(devices):
        share = part_of(config, ranks, rank)
        held = {name: part.to(device) for name, part in shard_all(share, whole).items()}
        own = share_of(config, ranks) if config.lanes is None else lanes_of_ranks(config, ranks)
        a = own.layers[0].attention
        pool = PagePool(
            config.num_layers, a.num_kv_heads, a.head_dim, PAGES, TORCH_DTYPES[dtype], device
        )
        given = held.__getitem__, vectors(held), pool
        fused = partial(
            FusedElementwise, arch=arch(), cache_root=cache_root, ranks=ranks, pages=None
        )
        parts.append(Part(share, *given, fused, lane_operations=FusedLanes))
    return Prefill(parts)


def ranks_agree(run: Prefill) -> None:
    run.settle_widths()
    if not run.widths:
        pytest.skip("no widths agree here")
    run.capture([32, *run.widths])
    for count in (700, 2300):
        ids, most = random_ids(run.config, count), run.widths[-1]
        cold = read(run, ids, cut(count, min(most, count), most))
        for first in (256, 512):
            assert same(read(run, ids, cut(count, first, most)), cold), (count, first)
        assert same(read(run, ids, cut(count, 256, 512), by_graph=False), cold)


# Cut into parts of a sum, and in lanes.
OVER_RANKS = [("laneformer-2b-as-llama", Dtype.BF16), ("laneformer-2b", Dtype.FP16)]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dtype"), OVER_RANKS)
def test_ranks_that_share_a_gpu(name: str, dtype: Dtype, tmp_path: Path) -> None:
    ranks_agree(spread(cut_shape(name), dtype, [GPU] * 2, tmp_path))


@pytest.mark.gpu
def test_lanes_on_one_rank(tmp_path: Path) -> None:
    ranks_agree(spread(cut_shape("laneformer-2b"), Dtype.FP16, [GPU], tmp_path))


@pytest.mark.gpus(2)
@pytest.mark.parametrize(("name", "dtype"), OVER_RANKS)
def test_ranks_and_their_graphs_for_later_passes(name: str, dtype: Dtype, tmp_path: Path) -> None:
    allow_access([0, 1])
    devices = [torch.device("cuda", i) for i in (0, 1)]
    ranks_agree(spread(cut_shape(name), dtype, devices, tmp_path))
