#include <limits>

#include "kernels/device/parallel.h"
#include "kernels/device/stream.h"
#include "kernels/sampling/sample.h"
#include "kernels/sampling/sample_row.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/sampling/sample_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/simd/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvasir::kernels {
namespace HWY_NAMESPACE {
namespace {

bool AllFinite(const float* x, int64_t count) {
  // Adds up 0 times each number. The product is 0 if the number is finite,
  // otherwise NaN.
  const Vec zero = hn::Zero(kFloats);
  Vec lanes = zero;
  int64_t i = 0;
  for (; i + kVecLanes <= count; i += kVecLanes) {
    lanes = hn::MulAdd(LoadFloats(x + i), zero, lanes);
  }
  float rest = hn::AllTrue(kFloats, hn::Eq(lanes, zero)) ? 0.0f : 1.0f;
  for (; i < count; ++i) rest = rest + x[i] * 0.0f;
  return rest == 0.0f;
}

int64_t ArgMax(const float* x, int64_t count) {
  // Finds the largest number first, and then its first index.
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  Vec lanes = Broadcast(kLowest);
  int64_t i = 0;
  for (; i + kVecLanes <= count; i += kVecLanes) {
    lanes = Larger(LoadFloats(x + i), lanes);
  }
  HWY_ALIGN float rest[kVecLanes];
  hn::Store(lanes, kFloats, rest);
  float best = kLowest;
  for (const float value : rest) best = value > best ? value : best;
  for (; i < count; ++i) best = x[i] > best ? x[i] : best;
  if (best == kLowest) return -1;
  for (i = 0; i + kVecLanes <= count; i += kVecLanes) {
    if (!hn::AllFalse(kFloats, hn::Eq(LoadFloats(x + i), Broadcast(best)))) {
      break;
    }
  }
  while (x[i] != best) ++i;
  return i;
}

void ExpAll(const float* x, int64_t count, float max, float temperature,
            float* out) {
  const Vec max_vec = Broadcast(max);
  const Vec divisor = Broadcast(temperature);
  int64_t i = 0;
  for (; i + kVecLanes <= count; i += kVecLanes) {
    hn::StoreU(ExpVec(hn::Div(hn::Sub(LoadFloats(x + i), max_vec), divisor)),
               kFloats, out + i);
  }
  for (; i < count; ++i) out[i] = Exp((x[i] - max) / temperature);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvasir::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvasir::kernels {
namespace {
HWY_EXPORT(AllFinite);
HWY_EXPORT(ArgMax);
HWY_EXPORT(ExpAll);

bool AllFiniteSimd(const float* x, int64_t count) {
  return HWY_DYNAMIC_DISPATCH(AllFinite)(x, count);
}

int64_t ArgMaxSimd(const float* x, int64_t count) {
  return HWY_DYNAMIC_DISPATCH(ArgMax)(x, count);
}

void ExpAllSimd(const float* x, int64_t count, float max, float temperature,
                float* out) {
  HWY_DYNAMIC_DISPATCH(ExpAll)(x, count, max, temperature, out);
}
}  // namespace

void SampleSimd(const SampleArgs& params, void* scratch, CpuStream& stream) {
  const SampleLoops loops = {&AllFiniteSimd, &AddLogitBlockSimd, &ArgMaxSimd,
                             &ExpAllSimd};
  ForRows(stream, params.num_rows, params.vocab,
          [&](int64_t begin, int64_t end, int thread) {
            const auto memory =
                SampleScratch::Of(scratch, params.vocab, thread);
            for (int64_t i = begin; i < end; ++i) {
              SampleOneRow(params, i, memory, loops);
            }
          });
}

}  // namespace kvasir::kernels
#endif  // HWY_ONCE
