"""What stays out of copies of a matrix with padding (`tile/padding.cuh`), compiled by g++."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from interpreter.mixtures import SMS, wide_experts
from interpreter.models import gpu
from interpreter.quantised import alike, formats_of, random_parts
from soloist.megakernel.layer_kind import Operation
from soloist.megakernel.limits import CONSUMER_WARPS
from soloist.megakernel.plan import Plan, make_plan
from soloist.model.dtype import Dtype
from soloist.weights.packing import pack
from unit.megakernel.test_sample_cuda_on_host import CUDA

STAGE = r"""
#pragma once
#include <cstdio>
#define __device__
#define __forceinline__ inline
using u8 = unsigned char;
using u32 = unsigned;
using u64 = unsigned long long;
constexpr u32 kStagingLanes = 1, kConsumerWarps = 8, kStepColumns = 512;
inline void mbarrier_expect(u32, u32 bytes) { std::printf("[[%u", bytes); }
inline void copy_expected(u32 shared, const u8* global, u32 bytes, u32, u64) {
  std::printf("], [%u, %llu, %u", shared, reinterpret_cast<u64>(global), bytes);
}
"""

MAIN = r"""
#include "tile/padding.cuh"

struct Op {
  static constexpr u32 kSteps = %(steps)d, kColumns = %(columns)d, kHalfTileBytes = %(tile)d / 2;
  static constexpr u32 kHalfTileValueBytes = %(values)d / 2;
  static constexpr bool kPairsSteps = %(pairs)s, kSkipsPadding = true;
};
int main() {
  stage_without_padding<Op>(0, nullptr, 0, 0);
  std::printf("], [");
  for (u32 s = 0; s < Op::kSteps; ++s) std::printf("%%s%%u", s ? ", " : "", warps_with_columns<Op>(s));
  std::printf("]]");
}
"""  # noqa: E501 - C++


def copies(operation: Operation, folder: Path) -> list[list[int]]:
    """Bytes in all; of each copy where to, where from and how many; warps by step."""
    compiler = shutil.which("g++")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs g++ on Linux to compile the kernel's code for the host")
    matrix = operation.matrix
    main = MAIN % {
        "steps": matrix.steps, "columns": matrix.columns,
        "tile": 2 * matrix.format.half_tile_bytes,
        "values": 2 * matrix.format.half_tile_values_bytes,
        "pairs": str(matrix.pairs_steps).lower(),
    }  # fmt: skip
    padding = (CUDA / "tile/padding.cuh").read_text(encoding="utf-8")
    for name, text in {
        "ptx/stage.cuh": STAGE, "spec.cuh": "", "tile/padding.cuh": padding, "main.cpp": main,
    }.items():  # fmt: skip
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    program = folder / "program"
    options = ["-std=c++20", "-O1", "-w", f"-I{folder}"]
    subprocess.run([compiler, *options, folder / "main.cpp", "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=True)
    found: list[list[int]] = json.loads(done.stdout)
    return found


def down_of(neurons: int, kind: str) -> tuple[Plan, Operation]:
    """Of experts with so many neurons; every block has a tile of it."""
    config = replace(wide_experts(neurons), hidden_size=112)
    plan = make_plan(config, Dtype.BF16, gpu(SMS), formats=formats_of(alike(config, kind)))
    return plan, plan.image.kinds[0].operations["down"]


@pytest.mark.parametrize("neurons", [200, 768])
@pytest.mark.parametrize(
    "kind", ["fp8", "fp8-block", "int8", "int8-zeros", "int4", "int4-zeros", "int4-offsets"]
)
def test_all_but_the_padding_of_whole_warps_is_copied(
    kind: str, neurons: int, tmp_path: Path
) -> None:
    """What differs between packed matrices of other values comes along, each byte once."""
    plan, operation = down_of(neurons, kind)
    matrix = operation.matrix
    assert matrix.skips_padding
    to = matrix.format.meaning
    assert to is not None
    packed = torch.stack(
        [
            pack(plan, operation, random_parts(matrix.rows, matrix.columns, to, seed)).flatten()
            for seed in range(12)
        ]
    ).view(12, matrix.blocks, -1)
    matters = (packed != packed[0]).any(dim=0).any(dim=0)
    (total,), *pieces, warps = copies(operation, tmp_path)
    copied = torch.zeros(len(matters), dtype=torch.int64)
    for to_place, from_place, count in pieces:
        assert to_place == from_place
        assert to_place % 16 == 0
        assert count % 16 == 0
        copied[to_place : to_place + count] += 1
    assert copied.max() == 1
    assert copied.sum() == total
    assert not (matters & (copied == 0)).any(), "weights stay out"
    values = 2 * matrix.format.half_tile_values_bytes
    left_out = sum(CONSUMER_WARPS - own for own in warps) * values // CONSUMER_WARPS
    assert 0 < left_out == len(matters) - total


def test_whole_warps_of_padding_are_asked_for() -> None:
    """Less than a warp's columns come along, and what fills its steps is no padding."""
    for neurons in (480, 512, 1024):
        assert not down_of(neurons, "fp8")[1].matrix.skips_padding
    assert not down_of(1280, "fp8")[1].matrix.skips_padding, "three steps"
