"""CUDA kernels for lanes against the torch definition, one by one and in whole prompts."""

from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from interpreter.lane_models import fields_of, random_weights
from interpreter.models import prompt, reference_logits
from plan.shapes import LANEFORMER
from soloist.errors import CudaMissing
from soloist.jit.bindings import nvrtc
from soloist.jit.compiler import compile_source, require_clean
from soloist.jit.source import Source
from soloist.kv.pool import PagePool
from soloist.megakernel.gpu import TYPICAL
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.families import read_config
from soloist.parallel.lanes import LaneShare, lanes_of_ranks
from soloist.parallel.peers import allow_access
from soloist.prefill.elementwise import (
    Elementwise,
    Heads,
    MakeElementwise,
    Reach,
    TorchElementwise,
)
from soloist.prefill.fused import FusedElementwise
from soloist.prefill.fused_lanes import FusedLanes
from soloist.prefill.header import header
from soloist.prefill.lane_elementwise import Due, LaneOperations, News, TorchLanes
from soloist.prefill.part import Part
from soloist.prefill.runner import Prefill
from soloist.weights.sharding import shard_all
from unit.model.configurations import written
from unit.prefill.test_fused import DTYPES, a_chunk, arch, close, near
from unit.prefill.test_lanes import CUTS, PAGES, logits_in_chunks, spread

KERNELS = {
    "kernels/prefill.cu": ("qkv_rope_store", "silu_mul"),
    "kernels/lane_prefill.cu": ("embed_lanes", "hear", "meet_at_head"),
}
OF_RANKS = {
    "kernels/prefill.cu": ("tell", "await"),
    "kernels/lane_prefill.cu": ("sum_lanes", "hear_and_sum"),
}


SHARED, OURS = KERNELS


@pytest.mark.parametrize(
    ("kernel", "like", "ranks", "dtype"),
    [
        *((OURS, name, 2, Dtype.FP16) for name in TYPICAL),
        *((OURS, "sm_90a", ranks, Dtype.BF16) for ranks in (1, 2, 8)),
        *((SHARED, name, 2, Dtype.FP16) for name in ("sm_80", "sm_90a")),
    ],
)
def test_kernels_compile_without_spills(like: str, ranks: int, dtype: Dtype, kernel: str) -> None:
    try:
        nvrtc()
    except CudaMissing as error:
        pytest.skip(f"no NVRTC: {error.message}")
    config = read_config(LANEFORMER)
    spec = header(lanes_of_ranks(config, ranks), dtype, ranks)
    cubin = compile_source(Source(kernel, spec), like)
    for entry in (*KERNELS[kernel], *OF_RANKS[kernel]):
        require_clean(cubin, entry, 0, 48 * 1024)


def a_model(name: str, folder: Path) -> ModelConfig:
    return read_config(written(folder, fields_of(name)))


def fused(folder: Path, ranks: int) -> MakeElementwise:
    return partial(FusedElementwise, arch=arch(), cache_root=folder, ranks=ranks)


def spread_fused(
    config: ModelConfig,
    ranks: int,
    folder: Path,
    dtype: torch.dtype,
    devices: list[torch.device],
) -> list[Part]:
    operations = fused(folder, ranks)
    return spread(config, ranks, FusedLanes, dtype, devices, operations=operations)


def pair(
    config: ModelConfig, ranks: int, dtype: torch.dtype, folder: Path
) -> list[tuple[Elementwise, LaneOperations]]:
    """Of the last rank: kernels, and the definition."""
    share, one = LaneShare(config, ranks, ranks - 1), lanes_of_ranks(config, ranks)
    weights = {k: v.cuda() for k, v in shard_all(share, random_weights(config)).items()}
    vectors = {k: v for k, v in weights.items() if k.endswith("norm")}
    a = one.layers[0].attention
    made = []
    for make, of_lanes in (
        (fused(folder, ranks), FusedLanes),
        (TorchElementwise, TorchLanes),
    ):
        pool = PagePool(one.num_layers, a.num_kv_heads, a.head_dim, 6, dtype, torch.device("cuda"))
        e = make(one, vectors, pool)
        made.append((e, of_lanes(e)))
    return made


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("name", ["scales per lane", "wide"])
@pytest.mark.parametrize(
    ("position", "num_tokens", "rows"), [(0, 37, 64), (45, 70, 70), (63, 1, 1), (0, 200, 600)]
)
def test_operations(
    name: str,
    ranks: int,
    dtype: torch.dtype,
    position: int,
    num_tokens: int,
    rows: int,
    tmp_path: Path,
) -> None:
    config = a_model(name, tmp_path)
    lanes, hidden = 8 // ranks, config.hidden_size
    a, chunk = config.layers[0].attention, a_chunk(position, num_tokens, rows)
    torch.manual_seed(0)
    table = torch.randn(61, hidden, device="cuda").to(dtype)
    own, past = (torch.randn(lanes, rows, hidden, device="cuda").to(dtype) for _ in range(2))
    sums = torch.randn(rows, hidden, device="cuda")
    product = torch.randn(lanes, rows, a.qkv_rows // 8, device="cuda").to(dtype)
    ffn = config.layers[0].mlp.intermediate_size // 8
    gate_up = torch.randn(lanes, rows, 2 * ffn, device="cuda").to(dtype)
    news = {
        "start": News(),
        "scaled": News(own=own, own_scale=8**0.5),
        "early": News(sums=sums),
        "late": News(own=own, sums=sums, past=past),
    }
    if ranks == 1:
        news |= {"late here": News(own=own, summed=past, past=past), "early here": News(summed=own)}
    results: list[dict[str, Tensor]] = []
    for e, of_lanes in pair(config, ranks, dtype, tmp_path):
        e.start()
        seen: dict[str, Tensor] = {}
        results.append(seen)
        seen["embedded"] = torch.empty(lanes, rows, hidden, device="cuda")
        of_lanes.embed_lanes(table, chunk, seen["embedded"])
        for label, heard in news.items():
            streams = seen["embedded"].clone()
            out, exact = torch.empty_like(own), torch.empty_like(streams)
            of_lanes.hear(streams, heard, e.layers[0].mlp_norm, out, exact)
            seen |= {f"{label} streams": streams, f"{label} out": out, f"{label} exact": exact}
        for layer in range(2):
            heads = [
                torch.empty(rows, n // ranks, a.head_dim, device="cuda", dtype=dtype)
                for n in (a.num_query_heads, a.num_kv_heads, a.num_kv_heads)
            ]
            e.qkv_rope_store(product, layer, chunk, Heads(*heads))
            seen |= {f"heads {i} {layer}": x for i, x in enumerate(heads)}
        seen["activated"] = torch.empty(lanes, rows, ffn, device="cuda", dtype=dtype)
        e.silu_mul(gate_up, None, seen["activated"])
        seen["pool"] = e.pool.tensor
    for what, wanted in results[1].items():
        if (
            wanted.dtype is torch.float32
        ):  # a product and a sum may be rounded once instead of twice
            torch.testing.assert_close(results[0][what], wanted, rtol=1e-5, atol=2e-6)
        else:
            close(results[0][what], wanted)


@pytest.mark.gpu
def test_sums_over_lanes_have_the_same_bits_on_any_number_of_ranks(tmp_path: Path) -> None:
    config, rows = a_model("mean of lanes", tmp_path), 37
    hidden, generator = config.hidden_size, torch.Generator().manual_seed(0)
    given = torch.randn(8, rows, hidden, generator=generator).to("cuda", torch.bfloat16)
    streams = torch.randn(8, rows, hidden, generator=generator).cuda()
    first = _heard(config, given, streams, 1, tmp_path)
    for ranks in (2, 4, 8):
        made = _heard(config, given, streams, ranks, tmp_path)
        assert all(torch.equal(x, y) for x, y in zip(made, first, strict=True))


def _heard(
    config: ModelConfig, given: Tensor, streams: Tensor, ranks: int, folder: Path
) -> list[Tensor]:
    """Streams of all lanes and their norms, once they have heard of sums that ranks made."""
    rows, hidden = given.shape[1:]
    here = [torch.device("cuda", torch.cuda.current_device())] * ranks
    parts = spread_fused(config, ranks, folder, torch.bfloat16, here)
    kernels = [part.work.operations for part in parts]
    of_lanes = [part.communicator._lanes for part in parts]
    own = [x.contiguous() for x in given.chunk(ranks)]
    sums = [torch.zeros(rows, hidden, device="cuda") for _ in range(ranks)]
    reach, found = Reach(own, sums), [streams.clone(), torch.empty_like(given)]
    if ranks > 1:
        Prefill(parts)
        for e in kernels:
            e.start()
            e.tell(reach)
        for rank, e in enumerate(of_lanes):
            share = range(rows * rank // ranks, rows * (rank + 1) // ranks)
            e.sum_lanes(reach, Due(has_parts=True, own=share, tokens=rows))
        for e in kernels:
            e.meet(reach)
    for rank, e in enumerate(kernels):
        e.start()
        stream, norm = (x.chunk(ranks)[rank] for x in found)
        is_alone = ranks == 1
        news = News(
            own[rank], 1.0, None if is_alone else sums[rank], own[rank] if is_alone else None,
            own[rank],
        )  # fmt: skip
        of_lanes[rank].hear(stream, news, e.layers[0].mlp_norm, norm)
    return found


GPU_CASES = [
    "mean of lanes", "delay 1", "delay beyond the last layer", "no early sum",
    "silent but for the early sum", "only MLPs talk", "vocabulary slices", "sum before norm",
    "scales per lane", "wide",
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("name", GPU_CASES)
def test_prompts_on_ranks_that_share_a_gpu(
    name: str, ranks: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    config = a_model(name, tmp_path)
    ids = prompt(config, CUTS[-1])
    wanted = reference_logits(config, random_weights(config), ids)
    here = [torch.device("cuda", torch.cuda.current_device())] * ranks
    run = Prefill(spread_fused(config, ranks, tmp_path, dtype, here))
    for _ in range(2):
        for seen, stop in zip(logits_in_chunks(run, ids), CUTS[1::2], strict=True):
            near(seen, wanted[stop - 1], dtype)


def stored(run: Prefill) -> Tensor:
    return torch.cat([part.pool.tensor.cpu() for part in run.parts], 2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mean of lanes", "vocabulary slices", "sum before norm"])
def test_captured_graphs_do_what_the_launches_do(name: str, tmp_path: Path) -> None:
    config = a_model(name, tmp_path)
    ids = prompt(config, CUTS[-1])
    wanted = reference_logits(config, random_weights(config), ids)
    here = [torch.device("cuda", torch.cuda.current_device())]
    launched, captured = (
        Prefill(spread_fused(config, 1, tmp_path, torch.bfloat16, here)) for _ in range(2)
    )
    captured.capture([16, 32, 64])
    assert len(captured.parts[0].graphs.by_rows) == 3
    assert not stored(captured).any(), "capturing stores nothing"
    for stop in (16, 1, 17, 32, 40, 50):
        near(captured.run(ids[:stop], 0, PAGES), wanted[stop - 1], torch.bfloat16)
        launched.run(ids[:stop], 0, PAGES)
        assert torch.equal(stored(captured) != 0, stored(launched) != 0), "padding is not stored"
    near(captured.run(ids[:20], 0, PAGES), wanted[19], torch.bfloat16)
    near(captured.run(ids[20:], 20, PAGES), wanted[-1], torch.bfloat16)


@pytest.mark.gpus(2)
@pytest.mark.parametrize("name", ["mean of lanes", "no early sum", "vocabulary slices"])
def test_prompts_on_two_gpus_and_their_graphs(name: str, tmp_path: Path) -> None:
    config = a_model(name, tmp_path)
    ids = prompt(config, CUTS[-1])
    wanted = reference_logits(config, random_weights(config), ids)
    allow_access([0, 1])
    devices = [torch.device("cuda", n) for n in range(2)]
    parts = spread_fused(config, 2, tmp_path, torch.bfloat16, devices)
    run = Prefill(parts)
    for captured in (False, True):
        if captured:
            run.capture([16, 32, 64])
            assert all(len(part.graphs.by_rows) == 3 for part in parts)
        for _ in range(5):
            for cuts in (CUTS, [0, 30, 50], [0, 50]):
                for start, stop in pairwise(cuts):
                    logits = run.run(ids[start:stop], start, PAGES)
                    near(logits, wanted[stop - 1], torch.bfloat16)
