#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/device/stream.h"
#include "kernels/sampling/sample.h"
#include "kernels/sampling/sample_row.h"
#include "kernels/simd/scalar_math.h"

namespace kvasir::kernels {
namespace {

bool AllFinite(const float* x, int64_t count) {
  return std::all_of(x, x + count, [](float v) { return std::isfinite(v); });
}

int64_t ArgMax(const float* x, int64_t count) {
  float best = -std::numeric_limits<float>::infinity();
  int64_t index = -1;
  for (int64_t i = 0; i < count; ++i) {
    if (x[i] > best) {
      best = x[i];
      index = i;
    }
  }
  return index;
}

void ExpAll(const float* x, int64_t count, float max, float temperature,
            float* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = Exp((x[i] - max) / temperature);
}

}  // namespace

void SampleReference(const SampleArgs& params, void* scratch, CpuStream&) {
  const SampleLoops loops = {&AllFinite, &AddLogitBlock, &ArgMax, &ExpAll};
  for (int64_t i = 0; i < params.num_rows; ++i) {
    SampleOneRow(params, i, SampleScratch::Of(scratch, params.vocab, 0), loops);
  }
}

void CountTokensReference(const CountTokensArgs& params, CpuStream&) {
  for (int64_t r = 0; r < params.num_rows; ++r) {
    const TokenHistoryArgs& row = params.rows[r];
    if (row.clear) std::fill_n(row.counts, params.vocab, 0);
    for (int64_t i = 0; i < row.num_ids; ++i) {
      const int64_t id = row.ids[i];
      if (id >= 0 && id < params.vocab) ++row.counts[id];
    }
  }
}

}  // namespace kvasir::kernels
