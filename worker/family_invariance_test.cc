// Batch invariance of compressed models of other families, and with a window.
#include <cmath>
#include <vector>

#include "base/status_matchers.h"
#include "worker/family_plan_cases.h"
#include "worker/invariance_scenario.h"

namespace kvasir::worker {
namespace {

// Shorter than most prompts, and not a multiple of a page.
constexpr int64_t kWindow = 24;

class FamilyInvarianceTest : public ::testing::TestWithParam<FamilyCase> {
 protected:
  static std::vector<Sample> Run(const Conditions& conditions) {
    std::vector<Request> requests = MixedRequests();
    requests.resize(8);
    Worker worker(conditions, 0, &GetParam().plan_case, GetParam().shape);
    return worker.Run(requests);
  }
};

TEST_P(FamilyInvarianceTest, ChunksThreadsPagesAndPoolChangeNothing) {
  const std::vector<Sample> alone = Run({.one_at_a_time = true});
  for (const Sample& sample : alone) {
    for (const float number : sample.numbers) {
      ASSERT_TRUE(std::isfinite(number));
    }
  }
  EXPECT_EQ(Run({.threads = 2,
                 .page_tokens = 32,
                 .max_num_seqs = 7,
                 .max_batched_tokens = 7}),
            alone);
  EXPECT_EQ(Run({.pages = 10}), alone);
}

INSTANTIATE_TEST_SUITE_P(Families, FamilyInvarianceTest,
                         ::testing::ValuesIn(FamilyCases(kWindow)),
                         [](const auto& param_info) {
                           return param_info.param.plan_case.name;
                         });

}  // namespace
}  // namespace kvasir::worker
