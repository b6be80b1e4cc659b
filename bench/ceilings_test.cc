#include "bench/ceilings.h"

#include <gmock/gmock.h>

#include "base/status_matchers.h"

namespace kvasir::kernels {
namespace {

using ::testing::HasSubstr;

// Results of any machine, even a busy one, lie within these bounds. A result
// outside them is an error of the measurement, such as a loop that was
// optimized away or a wrong unit.
TEST(CeilingsTest, MeasuredBandwidthAndComputeLimitsArePlausible) {
  base::ThreadPool pool(2);
  KVASIR_ASSERT_OK_AND_ASSIGN(
      auto probe, ReadBandwidthProbe::Create(&pool, int64_t{32} << 20));
  EXPECT_EQ(int64_t{32} << 20, probe->footprint_bytes());
  EXPECT_GT(probe->BytesPerSecond(), 1e6);
  EXPECT_LT(probe->BytesPerSecond(), 1e13);
  const double flops = MeasureFlops(&pool, 5);
  EXPECT_GT(flops, 1e6);
  EXPECT_LT(flops, 1e13);
}

TEST(CeilingsTest, MeasuringBandwidthOverZeroBytesIsRefused) {
  base::ThreadPool pool(1);
  EXPECT_THAT(ReadBandwidthProbe::Create(&pool, 0),
              base::StatusIs(absl::StatusCode::kInvalidArgument,
                             HasSubstr("at least 1 byte, not 0")));
}

}  // namespace
}  // namespace kvasir::kernels
