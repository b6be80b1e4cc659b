#include "worker/weights/smoothing.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace kvasir::worker {
namespace {

// Returns the exponent of the factor for dimensions `a` and `b`, which are a
// RoPE pair. For a dimension that does not rotate, a == b.
int Exponent(absl::Span<const float> q_norm, absl::Span<const float> k_norm,
             size_t a, size_t b) {
  constexpr int kMost = 12;
  const double query = std::hypot(q_norm[a], q_norm[b]);
  const double key = std::hypot(k_norm[a], k_norm[b]);
  if (query == 0 || key == 0) return 0;
  const double best = 0.5 * (std::log2(key) - std::log2(query));
  return std::clamp(static_cast<int>(std::lround(best)), -kMost, kMost);
}

}  // namespace

void SmoothQkNorms(plan::RopePairing pairing, int64_t rotary_dim,
                   absl::Span<float> q_norm, absl::Span<float> k_norm) {
  KVASIR_CHECK(q_norm.size() == k_norm.size());
  const auto rotated = static_cast<size_t>(rotary_dim);
  const auto smooth = [&](size_t a, size_t b) {
    const int exponent = Exponent(q_norm, k_norm, a, b);
    for (const size_t dim : {a, b}) {
      q_norm[dim] = std::ldexp(q_norm[dim], exponent);
      k_norm[dim] = std::ldexp(k_norm[dim], -exponent);
      if (a == b) break;
    }
  };
  for (size_t pair = 0; pair < rotated / 2; ++pair) {
    if (pairing == plan::RopePairing::kHalfSplit) {
      smooth(pair, pair + rotated / 2);
    } else {
      smooth(2 * pair, 2 * pair + 1);
    }
  }
  for (size_t dim = rotated; dim < k_norm.size(); ++dim) smooth(dim, dim);
}

}  // namespace kvasir::worker
