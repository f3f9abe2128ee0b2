"""Experts that stream by a guess (`ops/guess.cuh`), compiled by g++: what comes, in which order.

32 threads are the producer's lanes and meet at every exchange between lanes. Another is the
consumers, which walk tiles as `for_each_tile` in `ops/experts.cuh` does. A slot holds where its
bytes came from.
"""

import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from interpreter.mixtures import MIXTURES, SMS, guessing
from interpreter.models import gpu
from soloist.megakernel.plan import make_plan
from soloist.model.config import Mixture
from soloist.model.dtype import Dtype
from unit.megakernel.test_experts_cuda_on_host import MEETINGS
from unit.megakernel.test_produce_cuda_on_host import LITTLE_SHARED_BYTES, MAIN, ONE_LANE, program

WARP = (
    ONE_LANE.partition("template <class T> T __shfl_sync")[0]
    + r"""
#include <barrier>
#include <thread>
"""
    + MEETINGS
    + r"""
template <class T> T __shfl_sync(u32, T x, u32 from) {
  return exchanged(x, [&](const u32* all) { return static_cast<T>(all[from % 32]); });
}
template <class T> T __shfl_up_sync(u32, T x, u32 by) {
  const auto other = [&](const u32* all) {
    return own_lane < by ? x : static_cast<T>(all[own_lane - by]);
  };
  return exchanged(x, other);
}
inline bool __any_sync(u32 all, bool x) { return __ballot_sync(all, x) != 0; }
inline bool __all_sync(u32 all, bool x) { return __ballot_sync(all, x) == ~0u; }
inline void __syncwarp() { exchanged(0, [](const u32*) { return 0; }); }
inline u32 __clz(u32 x) { return x ? __builtin_clz(x) : 32; }
"""
    + "inline u32 __popc" + ONE_LANE.partition("inline u32 __popc")[2]
)  # fmt: skip

_HEAD, _, _ = MAIN.partition("// block, rounds, chosen experts")
GUESSED = (
    _HEAD
    + r"""
#include <random>
static std::mt19937 draw(1);
static float random_number() { return std::normal_distribution<float>()(draw); }
static u8 workspace[Model::kWsGuessedLogits + Model::kWsGuessedLogitsBytes];

// The best of logits, as bits and in ascending order.
template <class L>
static void choose(const float* logits) {
  std::vector<u32> order(L::kExperts);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](u32 a, u32 b) { return logits[a] > logits[b]; });
  order.resize(L::kChosen);
  std::sort(order.begin(), order.end());
  slots.count = L::kChosen;
  std::memset(slots.chosen, 0, sizeof slots.chosen);
  for (u32 s = 0; s < L::kChosen; ++s) {
    slots.expert[s] = order[s];
    slots.chosen[0][order[s] / 32] |= 1u << order[s] % 32;
  }
}

// block, rounds, how far the choice is from the guess, whether it waits for the guess's tiles
int main(int, char** given) {
  const u32 block = std::atoi(given[1]), rounds = std::atoi(given[2]);
  const float noise = std::atof(given[3]);
  const bool waits = std::atoi(given[4]);
  static Launch launch{};
  static i32 pages[kMaxQueries] = {5, 4, 3, 2, 1, 0, 7, 6};
  launch.rounds = rounds;
  Params params{};
  params.image = reinterpret_cast<const u8*>(u64{1} << 40);
  params.experts = reinterpret_cast<const u8*>(u64{2} << 40);
  params.pool = reinterpret_cast<u16*>(u64{3} << 40);
  params.launch = &launch, params.page_tables = pages, params.page_table_stride = 1;
  params.workspace = workspace;
  std::memset(workspace, 0xFF, sizeof workspace);
  control.queries = 1, control.rounds = rounds;
  const u32 full = 0, empty = Model::kRingSlots * 8;
  const u32 round = empty + Model::kRingSlots * 8, chosen = round + 8;
  const Slots of_ring{0, full, empty};
  static volatile Where where{};
  std::vector<std::thread> lanes;
  for (u32 lane = 0; lane < 32; ++lane)
    lanes.emplace_back([&, lane] {
      blockIdx.x = block, own_lane = lane;
      produce<Model>(params, &control, &where, of_ring, round, chosen, lane);
    });
  blockIdx.x = block;
  Consumer ring{0, full, empty, Model::kRingSlots};
  u32 guesses = 0;
  for (u32 n = 0; n < rounds; ++n) {
    for (u32 layer = 0; layer < Model::kLayers; ++layer)
      Model::of_layer(layer, [&](auto kind) {
        using L = decltype(kind);
        if constexpr (!L::kGuesses) {
          for (u32 phase = 0; phase < kLayerPhases; ++phase)
            if (phase == kPagesPhase) take_pages(ring, params, layer);
            else ring.take(part_of_phase<Model>(params.image, layer, phase));
        } else {
          const u32 epoch = n * Model::kLayers + layer + 1;
          float logits[L::kExperts];
          float* guessed = guessed_logits<Model>(params, epoch);
          float* later = guessed_logits<Model>(params, epoch + 2);
          for (u32 e = 0; e < L::kExperts; ++e) {
            later[e] = random_number();  // left from layers before, and clean once a layer begins
            guessed[e] = bits_to<float>(~0u);
          }
          pass(chosen + 16);  // ChoiceBarriers::begun
          for (u32 e = 0; e < L::kExperts; ++e) logits[e] = guessed[e] = random_number();
          for (u32 phase = 0; phase < kGateUpPhase; ++phase)
            if (phase == kPagesPhase) take_pages(ring, params, layer);
            else ring.take(part_of_phase<Model>(params.image, layer, phase));
          if constexpr (L::kHasSharedMlp)
            ring.take(shared_part_of_phase<Model>(params.image, layer, kGateUpPhase));
          using Tiles = GuessedTiles<L>;
          const Tiles tiles(block);
          // All that may come by the guess.
          const u32 most = min(tiles.count * Tiles::kTileSlots, Model::kGuessSlots);
          while (waits && where.copies - ring.taken < most) std::this_thread::yield();
          for (float& x : logits) x += noise * random_number();
          choose<L>(logits);
          if (noise == 0 && waits)  // the likeliest comes first
            for (u32 place = 1; place < L::kChosen; ++place) {
              const auto& expert = expert_guess<Model>(fixed).expert;
              if (logits[expert[place - 1]] >= logits[expert[place]]) continue;
              std::printf("order"), std::exit(1);
            }
          pass(chosen);
          mbarrier_wait(chosen + 8, guesses++ & 1);
          const auto& guess = expert_guess<Model>(fixed);
          const u32 issued = guess.issued, wrong = guess.wrong;
          if (issued > most || (waits && issued < most)) std::printf("issued"), std::exit(1);
          std::printf("guess %u %u %u\n", n, layer, issued);
          for (u32 t = 0; t < 2 * tiles.count; ++t) {
            const bool again = t >= tiles.count;
            const u32 i = again ? t - tiles.count : t, place = tiles.place(i);
            const u32 before = i * Tiles::kTileSlots;
            const bool came = before < issued, is_right = came && !(wrong >> place & 1);
            if (again == is_right) {
              if (came && !again)
                for (u32 s = before; s < min(issued, before + Tiles::kTileSlots); ++s) ring.skip();
              continue;
            }
            const u32 expert = guess.expert[place];
            const u8* tile = params.experts + L::experts(layer) + u64{expert} * L::kExpertBytes +
                             tiles.unit(i) * L::kTileBytes;
            for (u32 at = 0; at < L::kTileBytes; at += Tiles::kSlotBytes)
              ring.take(tile + at, min(Tiles::kSlotBytes, u32(L::kTileBytes) - at));
            std::printf("tile %u %u %u %u\n", n, layer, expert, tiles.unit(i));
          }
          for (u32 s = 0; s < slots.count; ++s)
            std::printf("chosen %u %u %u\n", n, layer, slots.expert[s]);
          for (u32 phase = kGateUpPhase + 1; phase < kLayerPhases; ++phase) {
            if constexpr (L::kHasSharedMlp)
              ring.take(shared_part_of_phase<Model>(params.image, layer, phase));
            for (u32 i = 0; i < num_expert_parts<Model>(slots, layer, phase); ++i)
              ring.take(expert_part<Model>(params, slots, layer, phase, i));
          }
        }
      });
    ring.take(part_of<Model, Model::Head>(params.image, 0));
    control.stop = n + 1 == rounds;
    pass(round);
  }
  for (std::thread& lane : lanes) lane.join();
}
"""
)


@pytest.mark.parametrize("shared_bytes", [gpu(SMS).shared_bytes, LITTLE_SHARED_BYTES])
@pytest.mark.parametrize(
    ("noise", "waits"), [(0.0, 1), (0.5, 1), (100.0, 1), (0.5, 0)],
    ids=["right", "mostly right", "mostly wrong", "chosen at once"],
)  # fmt: skip
@pytest.mark.parametrize("name", ["some layers dense", "shared, gated"])
def test_chosen_tiles_come_whatever_was_guessed(
    name: str, noise: float, waits: int, shared_bytes: int, tmp_path: Path
) -> None:
    """Each tile of a chosen expert to one block; of right guesses most come before the choice."""
    small = replace(gpu(SMS), shared_bytes=shared_bytes)
    plan = make_plan(MIXTURES[name], Dtype.BF16, small).with_room_for(1, samples=False)
    with guessing(guess=True):
        made = program(plan, 1, tmp_path, warp=WARP, main=GUESSED)
    tiles: Counter[tuple[int, ...]] = Counter()
    chosen: set[tuple[int, ...]] = set()
    issued = 0
    for block in range(plan.blocks):
        given = [str(made), str(block), "2", str(noise), str(waits)]
        done = subprocess.run(given, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout
        for line in done.stdout.splitlines():
            what, *numbers = line.split()
            if what == "tile":
                tiles[tuple(map(int, numbers))] += 1
            elif what == "chosen":
                chosen.add(tuple(map(int, numbers)))
            else:
                issued += int(numbers[2])
    layers = plan.model.layers
    wanted = {
        (n, layer, expert, tile)
        for n, layer, expert in chosen
        if (experts := plan.image.layer(layer).experts)
        for tile in range(experts.gate_up.units)
    }
    assert set(tiles) == wanted
    assert set(tiles.values()) == {1}
    assert len({where[:2] for where in chosen}) == 2 * sum(
        isinstance(x.mlp, Mixture) for x in layers
    )
    assert issued > 0 or not waits
