#include "cli/loaded_model.h"

#include "base/status_matchers.h"
#include "plan/resolved_plan.h"
#include "worker/program/attention_program.h"

namespace kvasir::cli {
namespace {

// Flags to executor: pool size, weights and pages take what was resolved when
// the model was opened.
TEST(LoadedModelTest, AStartResolvesThePlanAndMakesEachProgramOnce) {
  LoadRequest request;
  request.model.random_weights = true;
  request.model.shape = "kvasir-tiny";
  request.model.threads = 1;
  request.max_model_len = 64;
  request.max_batched_tokens = 32;
  const int64_t resolved = plan::NumResolvedPlans();
  const int64_t programs = worker::NumAttentionPrograms();
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto model, LoadedModel::Load(request));
  EXPECT_EQ(plan::NumResolvedPlans(), resolved + 1);
  EXPECT_EQ(worker::NumAttentionPrograms(), programs + 1);
  EXPECT_EQ(&model->rank().plan(), model->source().plan.get());
}

}  // namespace
}  // namespace kvasir::cli
