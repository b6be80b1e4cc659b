#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/device/stream.h"
#include "kernels/sampling/log_softmax.h"
#include "kernels/simd/scalar_math.h"

namespace kvasir::kernels {

void AddLogitBlock(const float* logits, int64_t count, LogSoftmaxState* state) {
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  float lanes[kLanes];
  std::fill_n(lanes, kLanes, kLowest);
  for (int64_t i = 0; i < count; ++i) {
    float& lane = lanes[i % kLanes];
    lane = logits[i] > lane ? logits[i] : lane;
  }
  const float block_max = TreeMax(lanes);
  if (block_max == kLowest) {
    state->sum = std::numeric_limits<float>::quiet_NaN();
    return;
  }
  std::fill_n(lanes, kLanes, 0.0f);
  for (int64_t i = 0; i < count; ++i) {
    const float share = std::fma(logits[i], 0.0f, Exp(logits[i] - block_max));
    lanes[i % kLanes] = lanes[i % kLanes] + share;
  }
  MergeLogitBlock(block_max, TreeSum(lanes), state);
}

void LogSoftmaxReference(const LogSoftmaxArgs& params, CpuStream&) {
  LogSoftmaxRows(params, 0, params.num_rows, &AddLogitBlock);
}

}  // namespace kvasir::kernels
