// Converts the scores of rows over a block of slots into weights (online
// softmax). For inclusion by *_cpu.cc.
#if defined(KVASIR_KERNELS_SOFTMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVASIR_KERNELS_SOFTMAX_INL_H_
#undef KVASIR_KERNELS_SOFTMAX_INL_H_
#else
#define KVASIR_KERNELS_SOFTMAX_INL_H_
#endif

#include <cmath>
#include <cstdint>
#include <limits>

#include "hwy/highway.h"
#include "kernels/attention/grid/attention_rows.h"
#include "kernels/attention/params/paged_attention.h"
#include "kernels/simd/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvasir::kernels {
namespace HWY_NAMESPACE {

// The maximum of an empty set of scores.
inline constexpr float kNothing = -std::numeric_limits<float>::infinity();

struct SoftmaxArgs {
  float* scores;  // [rows, 64]; replaced by weights
  // [rows]: each row's maximum score. On entry it covers the previous blocks,
  // on return also this block.
  float* max;
  float* sum;
  float scale;
  float cap;  // cap of scores (SoftCap); 0: none
  // the slots that these rows see, counted from the start of the block
  VisibleRange visible;
};

// Replaces the scores of slots outside `visible` by minus infinity. Lane i has
// the score of slot `slot` + i.
HWY_INLINE Vec HideOthers(VisibleRange visible, int64_t slot, Vec scores) {
  const Vec begin = Broadcast(static_cast<float>(visible.begin));
  const Vec end = Broadcast(static_cast<float>(visible.end));
  const Vec slots = hn::Iota(kFloats, static_cast<float>(slot));
  return hn::IfThenElse(hn::And(hn::Ge(slots, begin), hn::Lt(slots, end)),
                        scores, Broadcast(kNothing));
}

// Computes the softmax of rows [first, first + kRows). The rows are interleaved
// to hide the latency of instructions.
template <int kRows, typename Rescale>
HWY_INLINE void SoftmaxTile(const SoftmaxArgs& args, int64_t first,
                            const Rescale& rescale) {
  constexpr int kVecs = static_cast<int>(kAttentionBlockSlots) / kVecLanes;
  float* const scores = args.scores + first * kAttentionBlockSlots;
  float* const row_max = args.max + first;
  float* const row_sum = args.sum + first;
  const auto at = [&](int r, int v) {
    return scores + r * kAttentionBlockSlots + v * kVecLanes;
  };
  Vec scale = Broadcast(args.scale);
  const bool capped = args.cap > 0.0f;
  if (capped || args.visible.end - args.visible.begin < kAttentionBlockSlots) {
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVecs; ++v) {
        Vec scaled = hn::Mul(LoadFloats(at(r, v)), scale);
        if (capped) scaled = SoftCapVec(scaled, args.cap);
        hn::StoreU(HideOthers(args.visible, v * kVecLanes, scaled), kFloats,
                   at(r, v));
      }
    }
    scale = Broadcast(1.0f);
  }
  Wide lanes[kRows];
  for (int r = 0; r < kRows; ++r) {
    lanes[r] = MakeWide([](int) { return Broadcast(kNothing); });
    for (int v = 0; v < kVecs; ++v) {
      Vec& lane = lanes[r].part[v % kVecsPerWide];
      lane = Larger(hn::Mul(LoadFloats(at(r, v)), scale), lane);
    }
  }
  float max[kRows];
  ReduceWides(lanes, LargerStep(), max);
  for (int r = 0; r < kRows; ++r) {
    max[r] = row_max[r] > max[r] ? row_max[r] : max[r];
    const Vec max_vec = Broadcast(max[r]);
    lanes[r] = MakeWide([](int) { return hn::Zero(kFloats); });
    for (int v = 0; v < kVecs; ++v) {
      const Vec weight =
          ExpOfCapped(hn::Sub(hn::Mul(LoadFloats(at(r, v)), scale), max_vec));
      hn::StoreU(weight, kFloats, at(r, v));
      Vec& lane = lanes[r].part[v % kVecsPerWide];
      lane = hn::Add(lane, weight);
    }
  }
  float sum[kRows];
  ReduceWides(lanes, AddStep(), sum);
  for (int r = 0; r < kRows; ++r) {
    // In most blocks the maximum does not change, so the sums need no
    // rescaling.
    const float down = row_max[r] - max[r];
    row_max[r] = max[r];
    if (down == 0.0f) {
      row_sum[r] = row_sum[r] + sum[r];
      continue;
    }
    const float factor = hn::GetLane(ExpVec(Broadcast(down)));
    row_sum[r] = std::fma(row_sum[r], factor, sum[r]);
    rescale(first + r, factor);
  }
}

// Computes the weights of a block. Calls rescale(row, factor) for each row
// whose maximum has changed: the caller must multiply the row's earlier sums by
// the factor.
template <typename Rescale>
void Softmax(const SoftmaxArgs& args, RowRange rows, const Rescale& rescale) {
  int64_t r = rows.begin;
  for (; r + 4 <= rows.end; r += 4) SoftmaxTile<4>(args, r, rescale);
  for (; r < rows.end; ++r) SoftmaxTile<1>(args, r, rescale);
}

}  // namespace HWY_NAMESPACE
}  // namespace kvasir::kernels
HWY_AFTER_NAMESPACE();

#endif  // KVASIR_KERNELS_SOFTMAX_INL_H_
