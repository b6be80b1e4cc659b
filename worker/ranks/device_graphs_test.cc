// Compares steps that are captured and replayed as graphs with the same steps
// run op by op. Runs on a GPU in the test program of kernels/cuda, and
// elsewhere on the emulated device.
#include <memory>
#include <string>
#include <vector>

#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "kernels/emulation/testing/test_device.h"
#include "plan/presets.h"
#include "worker/executor/model_executor.h"
#include "worker/testing/graph_steps.h"

namespace kvasir::worker {
namespace {

struct Ran {
  std::vector<std::string> results;
  ExecutorTotals totals;
};

Ran RunSteps(const std::string& plan, bool graphs, bool deterministic) {
  auto rank = MakeGraphRank(
      {.plan = plan,
       .graphs = graphs,
       .deterministic = deterministic,
       .make_device = [] { return kernels::emulation::MakeTestDevice({}); }});
  KVASIR_EXPECT_OK(rank);
  if (!rank.ok()) return {};
  auto results = RunGraphSteps(**rank);
  KVASIR_EXPECT_OK(results);
  return {results.ok() ? *results : std::vector<std::string>(),
          (*rank)->executor().totals()};
}

class DeviceGraphsTest : public ::testing::TestWithParam<std::string> {};

TEST_P(DeviceGraphsTest, AReplayedStepHasTheSameBitsAsAStepRunOpByOp) {
  const bool deterministic = GetParam() != plan::kDensePreset;
  const Ran want = RunSteps(GetParam(), false, deterministic);
  const Ran have = RunSteps(GetParam(), true, deterministic);
  EXPECT_EQ(want.totals.captured_steps, 0);
  EXPECT_EQ(want.totals.replayed_steps, 0);
  EXPECT_EQ(have.totals.captured_steps, kGraphCaptures);
  EXPECT_EQ(have.totals.replayed_steps, kGraphReplays);
  ASSERT_GT(want.results.size(), 10u);
  EXPECT_EQ(have.results, want.results);
  EXPECT_EQ(have.totals.reconstruction_flops, want.totals.reconstruction_flops);
  EXPECT_EQ(have.totals.static_codes, want.totals.static_codes);
  EXPECT_EQ(have.totals.clamped_codes, want.totals.clamped_codes);
}

INSTANTIATE_TEST_SUITE_P(Plans, DeviceGraphsTest,
                         ::testing::Values(plan::kDensePreset,
                                           plan::kRotatedPreset, "rap-50-4bit"),
                         [](const auto& test) {
                           std::string name = test.param;
                           std::erase(name, '-');
                           return name;
                         });

}  // namespace
}  // namespace kvasir::worker
