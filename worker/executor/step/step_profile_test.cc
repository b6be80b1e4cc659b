#include "worker/executor/step/step_profile.h"

#include <chrono>
#include <set>
#include <string>
#include <thread>

#include "gtest/gtest.h"
#include "kernels/device/device.h"

namespace kvasir::worker {
namespace {

void Spend(int milliseconds) {
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}

TEST(StepProfileTest, TimeOfANestedStepPartIsNotCountedForTheEnclosingPart) {
  base::ThreadPool pool(1);
  kernels::CpuDevice device(&pool);
  const auto stream = device.MakeStream();
  CpuStepProfile profile;
  profile.Start();
  Spend(2);
  {
    const StepPartScope mlp(&profile, *stream, StepPart::kMlp);
    Spend(4);
    {
      const StepPartScope sum(&profile, *stream, StepPart::kSum);
      Spend(8);
    }
    Spend(4);
  }
  const CpuStepProfile::Seconds seconds = profile.Stop();
  EXPECT_GE(SecondsOf(seconds, StepPart::kRest), 0.002);
  EXPECT_GE(SecondsOf(seconds, StepPart::kMlp), 0.008);
  EXPECT_GE(SecondsOf(seconds, StepPart::kSum), 0.008);
  EXPECT_EQ(SecondsOf(seconds, StepPart::kAttention), 0.0);
}

TEST(StepProfileTest, StartingAProfileDiscardsTimesMeasuredBefore) {
  base::ThreadPool pool(1);
  kernels::CpuDevice device(&pool);
  const auto stream = device.MakeStream();
  CpuStepProfile profile;
  { const StepPartScope part(&profile, *stream, StepPart::kHead); }
  profile.Start();
  EXPECT_EQ(SecondsOf(profile.Stop(), StepPart::kHead), 0.0);
}

TEST(StepProfileTest, EveryStepPartHasItsOwnName) {
  std::set<std::string> names;
  for (size_t part = 0; part < kNumStepParts; ++part) {
    names.insert(StepPartName(static_cast<StepPart>(part)));
  }
  EXPECT_EQ(names.size(), kNumStepParts);
}

}  // namespace
}  // namespace kvasir::worker
