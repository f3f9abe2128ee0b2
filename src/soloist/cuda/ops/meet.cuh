// Lanes become one stream before the head: the mean of what each has normalised, or the norm of their sum.
#pragma once
#include "ops/hidden.cuh"

template <bool kMeeting>
struct StreamOf {
  using Type = InStream;
};
template <>
struct StreamOf<true> {
  using Type = OutStream;
};

// Warp c serves column c. All lanes add all in the same order, each for its own rows of the vocabulary.
__device__ __forceinline__ void meet(Context& cx) {
  const u32 epoch = cx.round + 1, rows = num_units<Down>(cx.block) * 8, first = first_unit<Down>(cx.block) * 8;
  if (cx.warp >= cx.columns) return;
  if constexpr (!kSumBeforeNorm) {
    Scale<InStream> scale;
    scale.load(cx, cx.next_in());
    scale.take(cx, cx.next_in());
  }
  const float* norm = cx.layer_vectors(kLayers) + first;
  float* residual = cx.shared.residual() + cx.warp * (Down::kMaxUnits * 8);
#pragma unroll 1
  for (u32 r = cx.lane; r - cx.lane < rows; r += 32) {
    const bool valid = r < rows;
    float x = valid ? residual[r] : 0.0f;
    if (!kSumBeforeNorm && valid) x *= __ldg(norm + r) * cx.scale;
    tell(cx, kWsToldOut, 0, epoch, first + r, valid, x);
  }
  u8* now = stream_operand<OutStream>(cx, epoch);
  float squares = 0.0f;
#pragma unroll 1
  for (u32 r = cx.lane; r - cx.lane < rows; r += 32) {
    const bool valid = r < rows;
    const float sum = heard(told(cx.params.workspace, kWsToldOut, 0, cx.warp, first + r), epoch, valid, kNoLane);
    const float x = kSumBeforeNorm ? sum * (valid ? __ldg(norm + r) : 0.0f) * cx.scale : sum * (1.0f / kLanes);
    publish_pair(now, cx.warp, first + r, cx.lane, valid, x);
    squares += sum * sum;
  }
  if constexpr (kSumBeforeNorm) publish_squares<OutStream>(cx, epoch, squares);
}
