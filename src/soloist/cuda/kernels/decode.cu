// The persistent decode kernel: one block per SM, many tokens per launch.
#include "ops/round.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 1) decode(const __grid_constant__ Params params) {
  __shared__ __align__(8) u64 barriers[kNumBarriers<Model>];
  __shared__ Where progress;
  run_launch<Model>(AnyWarp{}, params, barriers, progress, [](auto) {});
}
