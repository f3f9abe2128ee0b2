// Lanes become one stream before the head: the mean of what each has normalised, or the norm of their sum.
#pragma once
#include "ops/hidden.cuh"

template <class M, bool kMeeting>
struct StreamOf {
  using Type = InStream<M>;
};
template <class M>
struct StreamOf<M, true> {
  using Type = OutStream<M>;
};

// Warp c serves query c. All lanes add all in the same order, each for its own rows of the vocabulary.
template <class M>
__device__ __forceinline__ void meet(Context<M>& cx) {
  using Rows = typename M::Residual;
  const u32 epoch = cx.round + 1, rows = Rows::num_units(cx.block) * 8, first = Rows::first_unit(cx.block) * 8;
  if (cx.warp >= cx.queries) return;
  if constexpr (!M::kSumBeforeNorm) {
    Scale<InStream<M>> scale;
    scale.load(cx, cx.next_in());
    scale.take(cx, cx.next_in());
  }
  const float* norm = cx.vectors(M::kFinalNorm) + first;
  float* residual = cx.shared.residual() + cx.warp * (Rows::kMaxUnits * 8);
#pragma unroll 1
  for (u32 r = cx.lane; r - cx.lane < rows; r += 32) {
    const bool valid = r < rows;
    float x = valid ? residual[r] : 0.0f;
    if (!M::kSumBeforeNorm && valid) x *= __ldg(norm + r) * cx.scale;
    publish(cx, M::kWsPublishedOut, 0, epoch, first + r, valid, x);
  }
  u8* now = stream_operand<OutStream<M>>(cx, epoch);
  float squares = 0.0f;
#pragma unroll 1
  for (u32 r = cx.lane; r - cx.lane < rows; r += 32) {
    const bool valid = r < rows;
    const float sum = received<M>(published_at<M>(cx.params.workspace, M::kWsPublishedOut, 0, cx.warp, first + r), epoch, valid, kNoLane);
    const float x = M::kSumBeforeNorm ? sum * (valid ? __ldg(norm + r) : 0.0f) * cx.scale : sum * (1.0f / M::kLanes);
    publish_pair(now, cx.warp, first + r, cx.lane, valid, x);
    squares += sum * sum;
  }
  if constexpr (M::kSumBeforeNorm) publish_squares<OutStream<M>>(cx, epoch, squares);
}
