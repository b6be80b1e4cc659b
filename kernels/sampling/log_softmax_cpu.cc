#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/device/parallel.h"
#include "kernels/device/stream.h"
#include "kernels/sampling/log_softmax.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/sampling/log_softmax_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/simd/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvasir::kernels {
namespace HWY_NAMESPACE {
namespace {

void AddBlock(const float* logits, int64_t count, LogSoftmaxState* state) {
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  HWY_ALIGN float rest[kLanes];
  Wide lanes = MakeWide([](int) { return Broadcast(kLowest); });
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int v = 0; v < kVecsPerWide; ++v) {
      lanes.part[v] =
          Larger(LoadFloats(logits + i + v * kVecLanes), lanes.part[v]);
    }
  }
  StoreWide(lanes, rest);
  for (int lane = 0; i < count; ++i, ++lane) {
    rest[lane] = logits[i] > rest[lane] ? logits[i] : rest[lane];
  }
  const float block_max = TreeMax(rest);
  if (block_max == kLowest) {
    state->sum = std::numeric_limits<float>::quiet_NaN();
    return;
  }

  const Vec max = Broadcast(block_max);
  lanes = MakeWide([](int) { return hn::Zero(kFloats); });
  for (i = 0; i + kLanes <= count; i += kLanes) {
    for (int v = 0; v < kVecsPerWide; ++v) {
      const Vec logit = LoadFloats(logits + i + v * kVecLanes);
      const Vec share =
          hn::MulAdd(logit, hn::Zero(kFloats), ExpVec(hn::Sub(logit, max)));
      lanes.part[v] = hn::Add(lanes.part[v], share);
    }
  }
  StoreWide(lanes, rest);
  for (int lane = 0; i < count; ++i, ++lane) {
    const float share = std::fma(logits[i], 0.0f, Exp(logits[i] - block_max));
    rest[lane] = rest[lane] + share;
  }
  MergeLogitBlock(block_max, TreeSum(rest), state);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvasir::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvasir::kernels {
namespace {
HWY_EXPORT(AddBlock);
}  // namespace

void AddLogitBlockSimd(const float* logits, int64_t count,
                       LogSoftmaxState* state) {
  HWY_DYNAMIC_DISPATCH(AddBlock)(logits, count, state);
}

void LogSoftmaxSimd(const LogSoftmaxArgs& params, CpuStream& stream) {
  ForRows(stream, params.num_rows, params.vocab_count,
          [&](int64_t begin, int64_t end, int /*thread*/) {
            LogSoftmaxRows(params, begin, end, &AddLogitBlockSimd);
          });
}

}  // namespace kvasir::kernels
#endif  // HWY_ONCE
