"""Prompts on several ranks: the reference's logits, everybody's own keys and values."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from soloist.kv.pool import PagePool
from soloist.model.config import ModelConfig
from soloist.parallel.peers import allow_access
from soloist.parallel.share import Share, share_of
from soloist.prefill import settling
from soloist.prefill.elementwise import MakeElementwise, OwnRows
from soloist.prefill.part import Part
from soloist.prefill.runner import Prefill
from soloist.prefill.widths import Widths
from soloist.weights.sharding import shard_all
from unit.prefill.models import MODELS, matrices, random_weights, vectors
from unit.prefill.test_fused import fused, near
from unit.prefill.test_runner import SCATTERED, TOKENS, prefill, prompt, reference_logits

CPU = torch.device("cpu")
UNEVEN = [0, 1, 30, 65, 66, 190, TOKENS]


def spread(
    config: ModelConfig,
    ranks: int,
    dtype: torch.dtype = torch.float32,
    elementwise: MakeElementwise | None = None,
    devices: list[torch.device] | None = None,
) -> Prefill:
    parts = []
    for rank in range(ranks):
        device = CPU if devices is None else devices[rank]
        share = Share(config, ranks, rank)
        weights = {k: v.to(device) for k, v in shard_all(share, random_weights(config)).items()}
        a = share_of(config, ranks).layers[0].attention
        pool = PagePool(config.num_layers, a.num_kv_heads, a.head_dim, 6, dtype, device)
        made = {} if elementwise is None else {"operations": elementwise}
        held = matrices(weights, dtype)
        parts.append(Part(share, held.__getitem__, vectors(weights), pool, most_tokens=256, **made))
    return Prefill(parts)


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest) -> tuple[ModelConfig, Tensor]:
    config = MODELS[request.param]
    return config, reference_logits(config, prompt(config))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_logits_are_the_references(case: tuple[ModelConfig, Tensor], ranks: int) -> None:
    config, wanted = case
    run, ids = spread(config, ranks), prompt(config)
    for start, stop in pairwise(UNEVEN):
        logits = run.run(ids[start:stop], start, SCATTERED)
        torch.testing.assert_close(logits, wanted[stop - 1], rtol=0, atol=3e-5)


def test_a_prompt_in_silent_chunks(case: tuple[ModelConfig, Tensor]) -> None:
    config, wanted = case
    logits = spread(config, 2).run_prompt(prompt(config), SCATTERED, 70, lambda: False)
    torch.testing.assert_close(logits, wanted[-1], rtol=0, atol=3e-5)


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("name", ["gqa-tied", "biases", "head-128"])
def test_every_rank_has_its_heads_pages(name: str, ranks: int) -> None:
    config = MODELS[name]
    whole, run = prefill(config), spread(config, ranks)
    for one in (whole, run):
        one.run(prompt(config), 0, SCATTERED)
    for rank in run.parts:
        for place, head in enumerate(rank.share.kv_heads):
            own = rank.pool.tensor[:, :, place]
            if head is None:
                assert not own.any()
            else:
                wanted = whole.parts[0].pool.tensor[:, :, head]
                torch.testing.assert_close(own, wanted, rtol=0, atol=1e-5)


def test_all_ranks_multiply_the_same_bits() -> None:
    run = spread(MODELS["qwen3"], 4, torch.bfloat16)
    run.run(prompt(MODELS["qwen3"]), 0, SCATTERED)
    first, *others = (rank.work.buffers.normed[:TOKENS] for rank in run.parts)
    assert first.any(), "there is something to compare"
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("of_last", [{256: 0, 512: 1, 768: 1}, {256: 0, 512: 0, 768: None}])
def test_all_ranks_have_the_widths_on_which_all_agree(
    monkeypatch: pytest.MonkeyPatch, of_last: dict[int, int | None]
) -> None:
    run = spread(MODELS["qwen3"], 4)
    monkeypatch.setattr(settling, "tries_widths", lambda _: True)
    run.settle_widths()
    assert run.widths == (), "a chunk of 256 tokens has one width"

    def behaviours(rank: Part) -> settling.Behaviours:
        told = of_last if rank is run.parts[-1] else {256: 0, 512: 0, 768: 0}
        return {width: {"attention_output": number} for width, number in told.items()}

    monkeypatch.setattr(settling, "behaviours", behaviours)
    monkeypatch.setattr(
        settling, "attention_is_invariant_at", lambda rank, _: rank is not run.parts[2]
    )
    run.settle_widths()
    assert run.widths == (), "one rank's attention does not agree"
    monkeypatch.setattr(settling, "attention_is_invariant_at", lambda *_: True)
    run.settle_widths()
    widths = (256, 512, 768) if of_last[768] else (256, 512)
    padded = {("attention_output", 256): 512} if of_last[768] else {}
    assert {rank.widths for rank in run.parts} == {widths}
    assert all(rank.work.products.padded_rows == padded for rank in run.parts)
    assert (run.widths, run.most_tokens) == (widths, widths[-1])


def test_ranks_read_in_passes_of_settled_widths(case: tuple[ModelConfig, Tensor]) -> None:
    config, wanted = case
    run, ids = spread(config, 2), prompt(config)
    for rank in run.parts:
        rank.take_widths(Widths((256,)))
    for cuts in ([0, 150, TOKENS], [0, TOKENS]):
        for start, stop in pairwise(cuts):
            logits = run.run(ids[start:stop], start, SCATTERED)
            torch.testing.assert_close(logits, wanted[stop - 1], rtol=0, atol=3e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("name", ["gqa-tied", "biases", "qwen3", "windows", "head-128"])
def test_prompts_on_ranks_that_share_a_gpu(
    name: str, ranks: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    config = MODELS[name]
    ids = prompt(config)
    wanted = reference_logits(config, ids)

    def elementwise(*args: object) -> object:
        return fused(tmp_path)(*args, ranks=ranks)

    run = spread(config, ranks, dtype, elementwise, [torch.device("cuda", 0)] * ranks)
    for _ in range(2):
        for start, stop in pairwise(UNEVEN):
            near(run.run(ids[start:stop], start, SCATTERED), wanted[stop - 1], dtype)


@pytest.mark.gpus(2)
@pytest.mark.parametrize("name", ["biases", "qwen3"])
def test_prompts_on_two_gpus_and_their_graphs(name: str, tmp_path: Path) -> None:
    config, ids = MODELS[name], prompt(MODELS[name])
    wanted = reference_logits(config, ids)
    allow_access([0, 1])

    def elementwise(*args: object) -> object:
        return fused(tmp_path)(*args, ranks=2)

    run = spread(config, 2, torch.bfloat16, elementwise, [torch.device("cuda", i) for i in (0, 1)])
    for captured in (False, True):
        if captured:
            run.capture([32, 128, 256])
            assert all(len(rank.graphs.by_rows) == 3 for rank in run.parts)
        for _ in range(3):
            for cuts in (UNEVEN, [0, 100, TOKENS], [0, TOKENS]):
                for start, stop in pairwise(cuts):
                    logits = run.run(ids[start:stop], start, SCATTERED)
                    near(logits, wanted[stop - 1], torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("has_parts", [True, False])
def test_a_sum_over_ranks_is_the_definitions(has_parts: bool, tmp_path: Path) -> None:
    config, ranks, rows = MODELS["biases"], 4, 37

    def elementwise(*args: object) -> object:
        return fused(tmp_path)(*args, ranks=ranks)

    gpu = [torch.device("cuda", 0)] * ranks
    torch.manual_seed(0)
    residual, parts = torch.randn(rows, 32), torch.randn(ranks, rows, 32)
    results = []
    for run in (spread(config, ranks, torch.bfloat16, elementwise, gpu),
                spread(config, ranks, torch.bfloat16, None, gpu)):  # fmt: skip
        for last in (None, 5, 36):
            last_row = None if last is None else torch.tensor([last], device="cuda").int()
            for rank, part in zip(run.parts, parts, strict=True):
                rank.work.buffers.delta[:rows] = part.cuda()
                rank.work.last.delta[:] = part[:1].cuda()
                rank.work.buffers.normed.zero_()
                rank.work.last.normed.zero_()
            e = [rank.work.operations for rank in run.parts]
            reaches = [
                r.communicator.reach if last is None else r.communicator.last_reach
                for r in run.parts
            ]
            for i in range(ranks):
                e[i].start()
                e[i].tell(reaches[i])
            for i in range(ranks):
                own = range(rows * i // ranks, rows * (i + 1) // ranks)
                mine = residual[own.start : own.stop].cuda()
                weights = e[i].layers[0]
                e[i].sum_norm(
                    reaches[i], OwnRows(own, mine, last_row), weights.down_bias, weights.mlp_norm,
                    has_parts=has_parts,
                )  # fmt: skip
                results.append(mine)
            for i in range(ranks):
                e[i].meet(reaches[i])
            results += [r.work.buffers.normed[:rows].clone() for r in run.parts]
            results += [r.work.last.normed.clone() for r in run.parts]
    half = len(results) // 2
    for seen, wanted in zip(results[:half], results[half:], strict=True):
        torch.testing.assert_close(seen, wanted, rtol=2**-7, atol=1e-4)
