// Streams and checks that the tests of attention share.
#pragma once

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

// Returns the output of the reference back end, after comparing it with the
// definition in float64.
inline std::vector<float> CheckedReference(LatentCache& cache,
                                           const std::vector<LatentAsk>& asks,
                                           double tolerance) {
  std::vector<double> expected;
  for (const LatentAsk& ask : asks) {
    const std::vector<double> rows = cache.Expected(ask);
    expected.insert(expected.end(), rows.begin(), rows.end());
  }
  std::vector<float> truth = cache.Attend(SharedStreams().reference, asks);
  EXPECT_LT(WorstError(cache.Params(), expected, truth), tolerance);
  return truth;
}

// Expects the bits of `truth` for every vector target on each of the streams.
inline void ExpectBits(LatentCache& cache, const std::vector<LatentAsk>& asks,
                       const std::vector<float>& truth,
                       std::initializer_list<TestStream*> streams) {
  ForEachSimdTarget([&] {
    for (TestStream* const stream : streams) {
      EXPECT_TRUE(SameBits(truth, cache.Attend(*stream, asks)));
    }
  });
}

// Calls attend(value) for each value; all calls must return the same bits.
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
