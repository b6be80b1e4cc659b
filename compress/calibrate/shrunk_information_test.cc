#include "compress/calibrate/shrunk_information.h"

#include "gtest/gtest.h"

namespace kvasir::compress {
namespace {

at::Tensor Ramp() { return at::arange(1, 4, at::kDouble); }

TEST(ShrunkTest, ShrinkageAddsAShareOfTheMeanEigenvalueToEachEigenvalue) {
  const at::Tensor information = at::diag(Ramp());  // its trace is 6
  const at::Tensor want = at::diag(Ramp() + 0.5 * 2.0);
  EXPECT_TRUE(at::allclose(Shrunk(information, 0.5), want));
  // Shrunk must not change its input.
  EXPECT_TRUE(at::equal(information, at::diag(Ramp())));
}

TEST(ShrunkTest, ShrinkageMakesAnInformationMatrixOfRankOneInvertible) {
  const at::Tensor information = at::outer(Ramp(), Ramp());  // its trace is 14
  const at::Tensor shrunk = Shrunk(information.to(at::kFloat));
  EXPECT_EQ(shrunk.scalar_type(), at::kDouble);
  const at::Tensor values = at::linalg_eigvalsh(shrunk);
  const double least = 0.02 * 14.0 / 3.0;
  EXPECT_NEAR(values[0].item<double>(), least, 1e-9);
  EXPECT_NEAR(values[1].item<double>(), least, 1e-9);
  EXPECT_NEAR(values[2].item<double>(), 14.0 + least, 1e-9);
}

}  // namespace
}  // namespace kvasir::compress
