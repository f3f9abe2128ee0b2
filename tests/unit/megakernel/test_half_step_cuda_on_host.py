"""Activations of a last step that is half as long (`tile/activations.cuh`), compiled by g++."""

from pathlib import Path

import pytest

from soloist.megakernel.limits import MAX_QUERIES
from unit.megakernel.activations_on_host import run

MAIN = r"""
#include <cstdlib>
#include "tile/activations.cuh"

struct Op {
  struct Format { static constexpr Arithmetic kArithmetic = Arithmetic::kPlain; };
  static constexpr u32 kTiles = 1, kDepth = 3, kSteps = 3;
  static constexpr bool kPermuted = false, kPairsSteps = false, kEndsInHalf = true;
};
struct Context {
  u32 warp, lane, queries;
  struct { u32 converted() const { return 0; } } shared;
  const float* vectors(u64) const { return nullptr; }
};
constexpr u32 kHalf = kStepColumns / 2, kPadded = Op::kSteps * kStepColumns - kHalf;
static_assert(kPairs<Op> == (kRoomQueries == 1), "of one query both halves come by one load");
// Behind these columns lie those of another slot, which may not be there.
alignas(16) static u16 activations[2 * kPadded * kRoomQueries];

static void require(bool fine, u32 line) {
  if (!fine) std::printf("line %u\n", line), std::exit(1);
}
// The 8 columns from `first` on, or zeros.
static void look(const uint4& seen, u32 query, u32 first, bool any) {
  u16 halves[8];
  std::memcpy(halves, &seen, 16);
  for (u32 i = 0; i < 8; ++i) {
    const u32 k = first + i, place = (k / 32 * kRoomQueries + query) * 32 + k % 32;
    require(halves[i] == (any ? activations[place] : 0), __LINE__);
  }
}

int main() {
  for (u32 i = 0; i < kPadded * kRoomQueries; ++i) activations[i] = 1 + i % 65521;
  for (u32 i = kPadded * kRoomQueries; i < 2 * kPadded * kRoomQueries; ++i) activations[i] = 0xFFFF;
  const u32 queries = kRoomQueries == 1 ? 1 : 5;
  for (u32 warp = 0; warp < kConsumerWarps; ++warp)
    for (u32 lane = 0; lane < 32; ++lane) {
      const Context cx{warp, lane, queries};
      const GlobalOperand<Op> operand(reinterpret_cast<u8*>(activations), cx);
      const u32 query = kRoomQueries == 1 ? 0 : lane / 4, own = lane % 4 * 8;
      for (u32 step = 0; step < Op::kSteps; ++step)
        for (u32 part = 0; part < GlobalOperand<Op>::kLoads; ++part) {
          const uint4 seen = operand.load<false>(step, part);
          const u32 half = kPairs<Op> ? lane / 4 : part;  // of the warp's columns
          const bool active = kPairs<Op> ? lane / 4 < 2 : lane / 4 < queries;
          const u32 first = step * kStepColumns + own;
          if (step + 1 < Op::kSteps) look(seen, query, first + warp * 64 + half * 32, active);
          else look(seen, query, first + warp * 32, active && half == 0);
        }
    }
}
"""


@pytest.mark.parametrize("queries", [1, MAX_QUERIES])
def test_a_warp_has_half_as_many_columns_of_half_a_step(queries: int, tmp_path: Path) -> None:
    exchanged = (
        "inline uint4 load_exchanged(const u8* p) { uint4 v; std::memcpy(&v, p, 16); return v; }\n"
    )
    run(MAIN, queries, tmp_path, exchanged)
