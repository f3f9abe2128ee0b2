"""What lanes gather for a permuted matrix (`tile/activations.cuh`), compiled by g++."""

from pathlib import Path

import pytest

from soloist.megakernel.limits import MAX_QUERIES
from unit.megakernel.activations_on_host import run

MAIN = r"""
#include "tile/activations.cuh"

struct Op {
  struct Format { static constexpr Arithmetic kArithmetic = Arithmetic::kIntegers; };
  static constexpr u32 kTiles = 1, kDepth = 1, kSteps = kColumns / kStepColumns, kTable = 4;
  static constexpr bool kPermuted = true, kPairsSteps = false, kEndsInHalf = false;
};
struct Context {
  u32 warp, lane, queries;
  const float* all;
  struct { u32 converted() const { return 0; } } shared;
  const float* vectors(u64 at) const { return all + at; }
};
alignas(16) static float vectors[8 + kColumns / 2];
alignas(16) static u16 activations[kColumns * kRoomQueries];
static u16* const table = reinterpret_cast<u16*>(vectors + 8);

static u16* value(u32 query, u32 k) {
  return activations + (k / 32 * kRoomQueries + query) * 32 + k % 32;
}
static GlobalOperand<Op> operand_of(u32 warp, u32 lane, u32 queries) {
  return {reinterpret_cast<u8*>(activations), Context{warp, lane, queries, vectors}, 4};
}
static void require(bool fine, u32 line) {
  if (!fine) std::printf("line %u\n", line), std::exit(1);
}
// All 8 are as the table says, or none while a word of one of them is missing.
static void look(const uint4& seen, u32 query, u32 first) {
  u16 halves[8];
  std::memcpy(halves, &seen, 16);
  bool missing = false;
  for (u32 i = 0; i < 8; ++i) {
    u32 word;
    std::memcpy(&word, value(query, table[first + i] & ~1u), 4);
    missing |= word == kSentinel;
  }
  for (u32 i = 0; i < 8; ++i) {
    const u16 wanted = *value(query, table[first + i]);
    require(halves[i] == (missing ? 0xFFFF : wanted), __LINE__);
  }
}
static void look_at_all(u32 queries) {
  for (u32 warp = 0; warp < kConsumerWarps; ++warp)
    for (u32 lane = 0; lane < 32; ++lane) {
      const GlobalOperand<Op> operand = operand_of(warp, lane, queries);
      for (u32 step = 0; step < Op::kSteps; ++step) {
        const u32 first = step * kStepColumns + warp * 64;
        if constexpr (kConverts<Op>) {
          look(operand.gathered.load(step * kStepColumns), 0, first + lane % 8 * 8);
          continue;
        }
        for (u32 part = 0; part < 2; ++part) {
          const uint4 seen = operand.load<true>(step, part);
          if (lane / 4 < queries) look(seen, lane / 4, first + part * 32 + lane % 4 * 8);
          else require(!seen.x && !seen.y && !seen.z && !seen.w, __LINE__);
        }
      }
    }
}

int main() {
  for (u32 k = 0; k < kColumns; ++k) table[k] = k * 601 % kColumns;  // 601 has no divisor in common
  for (u32 q = 0; q < kRoomQueries; ++q)
    for (u32 k = 0; k < kColumns; ++k) *value(q, k) = k * kRoomQueries + q;
  look_at_all(kRoomQueries);
  if (kRoomQueries > 1) look_at_all(3);
  const u32 missing[] = {0, 31, 700};
  for (u32 k : missing) *reinterpret_cast<u32*>(value(0, k & ~1u)) = kSentinel;
  look_at_all(kRoomQueries);
  // Halves that are no numbers come from two words, and together are none that is missing.
  for (u32 k = 0; k < kColumns; ++k) *value(0, k) = k % 2 ? 0xFFFF : 0x1234;
  for (u32 k = 0; k < kColumns; ++k) table[k] = (2 * k + 1) % kColumns;
  require(operand_of(0, 0, 1).gathered.load(0).x == 0x7fffffffu, __LINE__);
}
"""


@pytest.mark.parametrize("queries", [1, MAX_QUERIES])
def test_lanes_gather_what_the_table_names(queries: int, tmp_path: Path) -> None:
    run(MAIN, queries, tmp_path)
