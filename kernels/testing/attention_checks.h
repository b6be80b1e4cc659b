// Streams and checks that the tests of attention share.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <vector>

#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "kernels/testing/latent_cache_for_test.h"
#include "kernels/testing/op_test_util.h"

namespace kvasir::kernels {

// All cases of a program share these streams, because allocating their memory
// takes longer than most cases.
struct AttentionStreams {
  TestStream reference{1, CpuBackend::kReference, size_t{4} << 20};
  TestStream one{1, CpuBackend::kSimd, size_t{4} << 20};
  TestStream three{3, CpuBackend::kSimd, size_t{8} << 20};
  // There are more threads than units of work, so long contexts are split among
  // threads.
  TestStream many{16, CpuBackend::kSimd, size_t{32} << 20};
};
inline AttentionStreams& SharedStreams() {
  static AttentionStreams streams;
  return streams;
}

// Writes all tokens that the requests see into the cache.
inline void WriteAll(LatentCache& cache, const std::vector<LatentAsk>& asks) {
  for (const LatentAsk& ask : asks) {
    cache.Write(ask.sequence, 0, ask.start + ask.count);
  }
}

// Returns whether queries or weights are multiplied by codes. If so, the
// queries or weights are rounded to digits (code_digits.h), with errors of up
// to 2^-14 of the largest number that has the same scale.
inline bool MultipliesCodes(const PagedAttentionArgs& params) {
  bool multiplies = false;
  for (int64_t p = 0; p < params.num_key_parts; ++p) {
    const AttentionKeyPartArgs& part = params.keys[p];
    multiplies = multiplies || (part.rebuild == nullptr &&
                                part.latents.groups[0].num_runs > 0);
  }
  for (int64_t p = 0; p < params.num_value_parts; ++p) {
    const AttentionValuePartArgs& part = params.values[p];
    multiplies = multiplies ||
                 (part.lift == nullptr && part.latents.groups[0].num_runs > 0);
  }
  return multiplies;
}

// Returns how large the relative error of a head's output may be. If a score
// has a small error, the softmax weight of its slot has about the same relative
// error. So a multiple of score_deviation, which LatentCache::Expected
// computes, is added.
inline double Tolerance(const PagedAttentionArgs& params,
                        double without_codes = 5e-5,
                        double score_deviation = 0.0) {
  return MultipliesCodes(params)
             ? std::max(without_codes, 1e-3) + 4.0 * score_deviation
             : without_codes;
}

// Returns the output of the reference back end, after comparing it with the
// definition in float64.
inline std::vector<float> CheckedReference(LatentCache& cache,
                                           const std::vector<LatentAsk>& asks,
                                           double tolerance) {
  std::vector<double> expected;
  double score_deviation = 0.0;
  for (const LatentAsk& ask : asks) {
    double deviation = 0.0;
    const std::vector<double> rows = cache.Expected(ask, &deviation);
    score_deviation = std::max(score_deviation, deviation);
    expected.insert(expected.end(), rows.begin(), rows.end());
  }
  std::vector<float> truth = cache.Attend(SharedStreams().reference, asks);
  const PagedAttentionArgs params = cache.Params();
  EXPECT_LT(WorstError(params, expected, truth),
            Tolerance(params, tolerance, score_deviation));
  return truth;
}

// Expects that attention returns the bits of `truth` for every vector target on
// each of the streams.
inline void ExpectBits(LatentCache& cache, const std::vector<LatentAsk>& asks,
                       const std::vector<float>& truth,
                       std::initializer_list<TestStream*> streams) {
  ForEachSimdTarget([&] {
    for (TestStream* const stream : streams) {
      EXPECT_TRUE(SameBits(truth, cache.Attend(*stream, asks)));
    }
  });
}

// Calls attend(value) for each value, and expects that all calls return the
// same bits.
template <typename Value, typename Attend>
void ExpectSameBitsFor(std::initializer_list<Value> values,
                       const Attend& attend) {
  std::vector<float> first;
  for (const Value& value : values) {
    const std::vector<float> out = attend(value);
    if (first.empty()) first = out;
    EXPECT_TRUE(SameBits(first, out)) << value;
  }
}

inline absl::Status Attend(const PagedAttentionArgs& params) {
  TestStream test;
  return AttendOnDevice(test, params, test.workspace());
}
inline void ExpectRefusal(const PagedAttentionArgs& params, const char* text) {
  EXPECT_THAT(Attend(params), base::StatusIs(absl::StatusCode::kInvalidArgument,
                                             ::testing::HasSubstr(text)));
}

}  // namespace kvasir::kernels
