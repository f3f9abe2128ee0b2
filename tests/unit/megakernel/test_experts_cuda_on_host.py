"""Choices of experts and slots (`tile/expert_choice.cuh`, `tile/slots.cuh`), compiled by g++.

The 32 lanes of a warp are threads that meet at every exchange between lanes.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from interpreter.mixtures import MIXTURES, SMS
from interpreter.models import gpu
from soloist.megakernel.experts import Experts
from soloist.megakernel.header import Build, header
from soloist.megakernel.interpreter.experts import Chosen, chosen_by
from soloist.megakernel.limits import MAX_QUERIES
from soloist.megakernel.plan import make_plan
from soloist.model.config import Router
from soloist.model.dtype import Dtype
from unit.megakernel.test_sample_cuda_on_host import CUDA

# The 32 lanes of a warp are threads, which meet at every exchange between them.
MEETINGS = r"""
static std::barrier meet(32);
static u32 words[32];
static thread_local u32 own_lane;
// Calls `use` with what all lanes gave.
template <class Use> auto exchanged(u32 own, const Use& use) {
  words[own_lane] = own;
  meet.arrive_and_wait();
  const auto found = use(words);
  meet.arrive_and_wait();
  return found;
}
inline float __shfl_xor_sync(u32, float x, u32 by) {
  const auto other = [&](const u32* all) { return __uint_as_float(all[own_lane ^ by]); };
  return exchanged(__float_as_uint(x), other);
}
inline u32 __reduce_max_sync(u32, u32 x) {
  return exchanged(x, [](const u32* all) { return *std::max_element(all, all + 32); });
}
inline u32 __reduce_min_sync(u32, u32 x) {
  return exchanged(x, [](const u32* all) { return *std::min_element(all, all + 32); });
}
inline u32 __reduce_add_sync(u32, u32 x) {
  return exchanged(x, [](const u32* all) { return std::accumulate(all, all + 32, 0u); });
}
inline u32 __ballot_sync(u32, bool x) {
  return exchanged(x, [](const u32* all) {
    u32 bits = 0;
    for (u32 i = 0; i < 32; ++i) bits |= all[i] << i;
    return bits;
  });
}
"""
WARP = (
    r"""
#pragma once
#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <thread>
#include <vector>
#include "ptx/types.cuh"
#define __device__
#define __forceinline__ inline
#undef kInfinity
#define kInfinity INFINITY
inline u32 __float_as_uint(float x) { u32 bits; std::memcpy(&bits, &x, 4); return bits; }
inline float __uint_as_float(u32 x) { float value; std::memcpy(&value, &x, 4); return value; }
inline u32 __popc(u32 x) { return __builtin_popcount(x); }
inline u32 max(u32 a, u32 b) { return a < b ? b : a; }
inline u32 min(u32 a, u32 b) { return a < b ? a : b; }
inline float exp2_fast(float x) { return std::exp2(x); }
"""
    + MEETINGS
)

MAIN = r"""
#include "ptx/mma.cuh"
constexpr u32 kMostQueries = %(queries)s;
constexpr float kFactor = %(factor)sf;
struct L {
  static constexpr u32 kExperts = %(experts)s, kChosen = %(chosen)s;
  static constexpr bool kSigmoid = %(sigmoid)s, kCorrected = %(corrected)s, kNormalises = %(normalises)s;
  static constexpr float kLeastSum = %(least_sum)sf, kRouterScale = %(scale)sf;
};
struct M {
  static constexpr u32 kMostSlots = %(slots)s, kMostExperts = L::kExperts;
  static constexpr bool kGatesShared = %(gates)s;
};
#include "tile/slots.cuh"

static float logits[kMostQueries][L::kExperts], corrections[L::kExperts];
static ExpertSlots<M> slots;

static void run(u32 lane) {
  own_lane = lane;
  constexpr u32 kEach = ExpertChoice<L>::kEach;
  std::vector<ExpertChoice<L>> choices;
  for (u32 q = 0; q < kMostQueries; ++q) {
    float logit[kEach] = {}, correction[kEach] = {};
    for (u32 i = 0; i < kEach; ++i)
      if (32 * i + lane < L::kExperts) logit[i] = logits[q][32 * i + lane], correction[i] = corrections[32 * i + lane];
    if constexpr (kFactor == 0) {
      choices.emplace_back(logit, correction, lane);
    } else {  // logits are known up to a factor, then it is
      for (u32 i = 0; i < kEach; ++i) logit[i] /= kFactor;
      choices.emplace_back(logit, lane);
    }
    if constexpr (kMostQueries > 1) slots.note<L>(choices.back(), q, lane);
    else slots.fill<L>(choices.back(), lane);
  }
  meet.arrive_and_wait();
  if constexpr (kMostQueries == 1 && kFactor == 0) slots.fill_shares<L>(choices[0], lane);
  for (u32 q = 0; q < kMostQueries && kMostQueries > 1; ++q) slots.number<L>(choices[q], q, kMostQueries, lane);
  if constexpr (kFactor != 0)
    for (u32 q = 0; q < kMostQueries; ++q) {
      float logit[kEach] = {};
      for (u32 i = 0; i < kEach; ++i)
        if (32 * i + lane < L::kExperts) logit[i] = logits[q][32 * i + lane];
      choices[q].weigh(logit, lane);
      if constexpr (kMostQueries > 1) slots.number<L, true>(choices[q], q, kMostQueries, lane);
      else slots.fill_shares<L>(choices[q], lane);
    }
}

int main() {
  if (std::fread(logits, sizeof logits, 1, stdin) != 1 || std::fread(corrections, sizeof corrections, 1, stdin) != 1) return 1;
  std::vector<std::thread> lanes;
  for (u32 lane = 0; lane < 32; ++lane) lanes.emplace_back(run, lane);
  for (auto& lane : lanes) lane.join();
  std::printf("[");
  for (u32 s = 0; s < slots.count; ++s) {
    std::printf("%%s[%%u, %%u", s ? ", " : "", slots.expert[s], slots.queries[s]);
    for (u32 q = 0; q < kMostQueries; ++q) std::printf(", %%.9g", slots.queries[s] >> q & 1 ? slots.share[s][q] : 0.0f);
    std::printf("]");
  }
  std::printf("]");
}
"""  # noqa: E501 - C++

ROUTERS = {
    "softmax": Router(16, 4, normalises=True),
    "many": Router(128, 8, normalises=True),
    "odd": Router(40, 5),
    "corrected": Router(
        160, 8, "sigmoid", is_corrected=True, normalises=True, least_sum=1e-20, scale=2.5
    ),
    "most": Router(512, 10),
}


def compiled(text: dict[str, str], folder: Path) -> Path:
    compiler = shutil.which("g++")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs g++ on Linux to compile the kernel's code for the host")
    for name, content in text.items():
        place = folder / name
        place.parent.mkdir(exist_ok=True)
        place.write_text(content, encoding="utf-8")
    program, options = folder / "program", ["-std=c++20", "-O1", "-w", "-pthread", f"-I{folder}"]
    made = subprocess.run(
        [compiler, *options, folder / "main.cpp", "-o", program],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    return program


def source(name: str) -> str:
    return (CUDA / name).read_text(encoding="utf-8")


def run(
    router: Router, logits: Tensor, correction: Tensor, folder: Path, factor: float = 0.0
) -> list[list[float]]:
    """Of each slot the expert, bits of its queries, and the share of each query.

    `factor`: first logits over it choose, then shares follow; 0 for both at once.
    """
    experts, chosen, queries = router.num_experts, router.num_chosen, len(logits)
    values = {
        "queries": queries, "experts": experts, "chosen": chosen,
        "sigmoid": str(router.scores == "sigmoid").lower(),
        "corrected": str(router.is_corrected).lower(),
        "normalises": str(router.normalises).lower(),
        "least_sum": float(router.least_sum), "scale": float(router.scale),
        "slots": min(experts, queries * chosen), "gates": "true", "factor": float(factor),
    }  # fmt: skip
    text = {
        "ptx/mma.cuh": WARP,
        "ptx/types.cuh": source("ptx/types.cuh"),
        "tile/expert_choice.cuh": source("tile/expert_choice.cuh"),
        "tile/slots.cuh": source("tile/slots.cuh"),
        "main.cpp": MAIN % values,
    }
    given = logits.numpy().tobytes() + correction.numpy().tobytes()
    done = subprocess.run(
        [compiled(text, folder)], input=given, capture_output=True, check=True, timeout=60
    )
    slots: list[list[float]] = json.loads(
        done.stdout.decode().replace("-", "").replace("nan", "NaN")
    )
    return slots


@pytest.mark.parametrize("name", ROUTERS)
def test_slots_are_those_of_the_interpreter(name: str, tmp_path: Path) -> None:
    """Of random logits and of ones that are equal or infinite."""
    router, generator = ROUTERS[name], torch.Generator().manual_seed(5)
    logits = torch.randn(MAX_QUERIES, router.num_experts, generator=generator)
    logits[1] = logits[1].round()
    logits[2] = 0
    logits[3, ::3] = -torch.inf
    correction = torch.zeros(router.num_experts)
    if router.is_corrected:
        correction = torch.randint(0, 2, correction.shape, generator=generator).float()
    seen = run(router, logits, correction, tmp_path)
    wanted = Chosen(tuple(chosen_by(router, own, correction) for own in logits))
    assert [int(slot[0]) for slot in seen] == wanted.slots
    for expert, bits, *shares in seen:
        queries = wanted.queries(int(expert))
        assert int(bits) == sum(1 << query for query in queries)
        for query in queries:
            assert shares[query] == pytest.approx(wanted.shares[query][int(expert)], rel=2e-6)


@pytest.mark.parametrize("name", ["softmax", "many", "odd"])
def test_logits_choose_up_to_a_factor(name: str, tmp_path: Path) -> None:
    """As they do when the norm of the residual is known; shares follow."""
    router, generator = ROUTERS[name], torch.Generator().manual_seed(7)
    logits = torch.randn(MAX_QUERIES, router.num_experts, generator=generator)
    logits[1] = logits[1].round()
    correction = torch.zeros(router.num_experts)
    seen = run(router, logits, correction, tmp_path, factor=0.25)
    wanted = Chosen(tuple(chosen_by(router, own, correction) for own in logits))
    assert [int(slot[0]) for slot in seen] == wanted.slots
    for expert, bits, *shares in seen:
        queries = wanted.queries(int(expert))
        assert int(bits) == sum(1 << query for query in queries)
        for query in queries:
            assert shares[query] == pytest.approx(wanted.shares[query][int(expert)], rel=2e-6)


@pytest.mark.parametrize("factor", [0.0, 0.25])
@pytest.mark.parametrize("name", ROUTERS)
def test_the_slots_of_one_query_are_those_among_several(
    name: str, factor: float, tmp_path: Path
) -> None:
    """A build for one query fills them by a way of its own."""
    router, generator = ROUTERS[name], torch.Generator().manual_seed(8)
    if router.is_corrected and factor:
        pytest.skip("corrected scores are not in the order of logits")
    correction = torch.zeros(router.num_experts)
    logits = torch.randn(1, router.num_experts, generator=generator)
    several = run(router, logits.repeat(2, 1), correction, tmp_path, factor)
    alone = run(router, logits, correction, tmp_path, factor)
    assert alone == [[expert, 1, share] for expert, _, share, _ in several]


def test_what_is_no_number_comes_last_and_chooses_experts_that_there_are(tmp_path: Path) -> None:
    """So that no address is wrong, whatever a model computes."""
    router = ROUTERS["corrected"]
    logits = torch.randn(MAX_QUERIES, 160, generator=torch.Generator().manual_seed(6))
    logits[0, :157] = torch.nan
    logits[1] = torch.nan
    seen = run(router, logits, torch.zeros(160), tmp_path)
    chosen = [[int(slot[0]) for slot in seen if int(slot[1]) >> query & 1] for query in range(8)]
    assert chosen[0] == [0, 1, 2, 3, 4, 157, 158, 159]
    assert chosen[1] == list(range(8))
    assert all(len(own) == 8 for own in chosen)


RULES = r"""
#include <cstdio>
#define __device__
#define __forceinline__ inline
using u32 = unsigned;
struct L {
%s
};
int main() {
  for (u32 block = 0; block <= %d; ++block) {
    std::printf("%%u", L::first_router_row(block));
    for (u32 slots = 1; slots <= %d; ++slots) std::printf(" %%u", L::first_tile(block, slots));
    std::printf("\n");
  }
}
"""


@pytest.mark.parametrize("name", MIXTURES)
def test_blocks_own_what_the_plan_says(name: str, tmp_path: Path) -> None:
    plan = make_plan(MIXTURES[name], Dtype.BF16, gpu(SMS))
    found = [kind.experts for kind in plan.image.kinds if kind.experts]
    experts: Experts = found[0]
    lines, most = experts.cuda(), experts.most_slots(MAX_QUERIES)
    written = header(plan, Build())
    assert all(line in written for line in lines)
    rules = RULES % ("\n".join(lines), plan.blocks, most)
    done = subprocess.run(
        [compiled({"main.cpp": rules}, tmp_path)], capture_output=True, text=True, check=True
    )
    for block, line in enumerate(done.stdout.splitlines()):
        row, *tiles = map(int, line.split())
        assert tiles == [experts.first_tile(block, slots) for slots in range(1, most + 1)]
        if block < plan.blocks:
            assert row == experts.router_rows(block).start
