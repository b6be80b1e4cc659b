// Streams and checks that tests of attention share.
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
  // There are more threads than units, so threads take splits of long contexts.
  TestStream many{16, CpuBackend::kSimd, size_t{32} << 20};
};
inline AttentionStreams& SharedStreams() {
  static AttentionStreams streams;
  return streams;
}

// Writes the tokens that the requests see.
inline void WriteAll(LatentCache& cache, const std::vector<LatentAsk>& asks) {
  for (const LatentAsk& ask : asks) {
    cache.Write(ask.sequence, 0, ask.start + ask.count);
  }
}

// Returns the reference's output, after comparing it with the definition.
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

// Expects every vector target to give the bits of `truth` on all of the
// streams.
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
