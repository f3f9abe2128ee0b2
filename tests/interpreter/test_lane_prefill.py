"""A Laneformer's prompt through library products, then the kernel's arithmetic on its pages."""

from pathlib import Path

import pytest
import torch

from interpreter.lane_models import configured
from interpreter.models import Bench, prompt, reference_logits
from soloist.megakernel.packed_weights import PackedWeights
from soloist.parallel.lanes import LaneShare
from soloist.prefill.part import Part
from soloist.prefill.products import Matrices
from soloist.prefill.runner import Prefill
from soloist.weights.sharding import shard_all
from soloist.weights.unpacking import Unpacked

ATOL = 1e-4
CASES = [
    ("mean of lanes", True, 69), ("mean of lanes", False, 10), ("no early sum", True, 10),
    ("only attention talks", False, 7), ("vocabulary slices", False, 7),
    ("sum before norm", True, 7), ("tied", True, 7), ("tied", False, 7),
    ("scales per lane, vocabulary slices", False, 7),
]  # fmt: skip


@pytest.mark.few(4)
@pytest.mark.parametrize(("name", "kept", "end"), CASES)
def test_the_kernel_goes_on_where_a_prompt_ends(
    name: str, kept: bool, end: int, tmp_path: Path
) -> None:
    """`kept`: rows stay beside the packed weights."""
    config, plan, weights = configured(name, tmp_path, 1, blocks=2)
    ids = prompt(config, end + 5)
    wanted = reference_logits(config, weights, ids)
    bench = Bench(config, plan, weights)
    vectors = {k: v for k, v in weights.items() if k.endswith("norm")}
    packed = PackedWeights(bench.memory.image, bench.memory.vectors, weights["embedding"])
    matrices: Matrices = Unpacked(plan, packed)
    if kept:
        matrices = shard_all(plan.part_of(0), weights).__getitem__
    part = Part(LaneShare(config, 1, 0), matrices, vectors, bench.pool, most_tokens=64)
    prefill = Prefill([part])
    table = bench.memory.page_tables[0]
    for start, stop in ((0, 5), (5, end), (end, end + 1)):
        logits = prefill.run(ids[start:stop], start, table)
        torch.testing.assert_close(logits, wanted[stop - 1], rtol=0, atol=ATOL)
    for position in (end + 1, end + 3):
        queries = ids[position : position + 2]
        made, _ = bench.launch().round(queries, [0, 0], [position, position + 1])
        torch.testing.assert_close(made, wanted[position : position + 2], rtol=0, atol=ATOL)


def test_a_prompt_in_silent_chunks_can_be_cancelled(tmp_path: Path) -> None:
    config, plan, weights = configured("mean of lanes", tmp_path, 1, blocks=2)
    ids = prompt(config, 74)
    bench = Bench(config, plan, weights)
    vectors = {k: v for k, v in weights.items() if k.endswith("norm")}
    packed = PackedWeights(bench.memory.image, bench.memory.vectors, weights["embedding"])
    matrices = Unpacked(plan, packed)
    part = Part(LaneShare(config, 1, 0), matrices, vectors, bench.pool, most_tokens=64)
    prefill = Prefill([part])
    table = bench.memory.page_tables[1].tolist()
    wanted = reference_logits(config, weights, ids)[-1]
    logits = prefill.run_prompt(ids, table, 30, lambda: False)
    torch.testing.assert_close(logits, wanted, rtol=0, atol=ATOL)
    asked = iter([False, True])
    assert prefill.run_prompt(ids, table, 30, lambda: next(asked)) is None
