// Compares the results of every primitive on the GPU with those on the
// emulator. (primitives_test.cc compares each of them with plain code.) Builds
// without a GPU run this test in kernels_cuda_emulated_test, with the emulator
// in place of the GPU.
#include <gmock/gmock.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <ios>

#include "kernels/cuda/testing/run_primitives.h"
#include "kernels/emulation/emulated_device.h"
#include "kernels/emulation/testing/primitive_kernels.h"
#include "kernels/emulation/testing/test_device.h"
#include "kernels/op_table/op_table.h"

namespace kvasir::kernels {
namespace {

using emulation::EmulatedDevice;

void ExpectAlike(const PrimitiveRun& want, const PrimitiveRun& got) {
  SCOPED_TRACE(want.name);
  ASSERT_EQ(got.name, want.name);
  ASSERT_EQ(got.words.size(), want.words.size());
  if (want.tolerance == 0.0f) {
    const auto differ =
        std::mismatch(got.words.begin(), got.words.end(), want.words.begin());
    EXPECT_EQ(differ.first, got.words.end())
        << "word " << differ.first - got.words.begin() << ": " << std::hex
        << *differ.first << ", want " << *differ.second;
    return;
  }
  for (size_t i = 0; i < want.words.size(); ++i) {
    const auto number = std::bit_cast<float>(want.words[i]);
    EXPECT_NEAR(std::bit_cast<float>(got.words[i]), number,
                want.tolerance * (1.0f + std::abs(number)))
        << i;
  }
}

TEST(GpuPrimitivesTest, EachPrimitiveGivesTheSameResultAsTheEmulator) {
  const bool bulk_copies = emulation::HasBulkCopies();
  EmulatedDevice emulator({}, emulated::Ops());
  const auto want = emulated::RunPrimitives(emulator, bulk_copies);
  const auto device = emulation::MakeTestDevice({});
  const auto got =
      KVASIR_PRIMITIVES_TARGET::RunPrimitives(*device, bulk_copies);
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) ExpectAlike(want[i], got[i]);
}

}  // namespace
}  // namespace kvasir::kernels
