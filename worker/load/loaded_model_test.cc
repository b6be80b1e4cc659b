#include "worker/load/loaded_model.h"

#include "base/status_matchers.h"
#include "plan/resolved_plan.h"
#include "worker/program/attention_program.h"

namespace kvasir::cli {
namespace {

LoadRequest TinyRequest() {
  LoadRequest request;
  request.model.random_weights = true;
  request.model.shape = "kvasir-tiny";
  request.model.threads = 1;
  request.max_model_len = 64;
  request.max_batched_tokens = 32;
  return request;
}

// Pool size, weights and executor must use the plan that was resolved when the
// model was opened.
TEST(LoadedModelTest,
     LoadingAModelResolvesThePlanOnceAndMakesEachAttentionProgramOnce) {
  const LoadRequest request = TinyRequest();
  const int64_t resolved = plan::NumResolvedPlans();
  const int64_t programs = worker::NumAttentionPrograms();
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto model, LoadedModel::Load(request));
  EXPECT_EQ(plan::NumResolvedPlans(), resolved + 1);
  EXPECT_EQ(worker::NumAttentionPrograms(), programs + 1);
  EXPECT_EQ(&model->rank().plan(), model->source().plan.get());
}

// No test machine has memory for this model of 70B parameters. So the test
// fails if the weights are read or the cache is allocated.
TEST(LoadedModelTest,
     AModelThatFailsTheCallersCheckIsRefusedBeforeItsWeightsAreRead) {
  LoadRequest request = TinyRequest();
  request.model.shape = "llama-3-70b";
  request.check = [](const ModelSource& source) {
    return absl::InvalidArgumentError(source.name + " will not do");
  };
  bool packed = false;
  request.progress = [&packed](int64_t, int64_t) { packed = true; };
  EXPECT_THAT(LoadedModel::Load(request),
              base::StatusIs(absl::StatusCode::kInvalidArgument,
                             ::testing::HasSubstr("will not do")));
  EXPECT_FALSE(packed);
}

// Decode keeps attention weights for evictions. Regression test: a model was
// loaded although no memory was left for them.
TEST(LoadedModelTest, AttentionWeightsKeptForEvictionsMustFitBesideThePool) {
  LoadRequest request = TinyRequest();
  request.kv_cache_bytes = int64_t{1} << 60;
  request.model.eviction.method = "h2o";
  request.model.eviction.budget = "32";
  EXPECT_THAT(
      LoadedModel::Load(request),
      base::StatusIs(absl::StatusCode::kResourceExhausted,
                     ::testing::HasSubstr(
                         ", attention weights kept for evictions 8320; lower "
                         "--kv-cache-bytes to at most")));
  request.model.eviction.method = "streaming";
  EXPECT_THAT(
      LoadedModel::Load(request),
      base::StatusIs(absl::StatusCode::kResourceExhausted,
                     ::testing::Not(::testing::HasSubstr("evictions"))));
}

TEST(LoadedModelTest,
     TheDefaultHostPoolIsAQuarterOfAPoolThatCannotHoldAllSequences) {
  LoadRequest request = TinyRequest();
  request.model.page_tokens = 16;
  request.host_pool_bytes = std::nullopt;
  request.max_num_seqs = 3;
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto all, LoadedModel::Load(request));
  EXPECT_EQ(all->host_pool_bytes(), 0)
      << "all sequences fit into the pool, so none is ever preempted";
  request.kv_cache_bytes = all->kv_pool_bytes() / 3 * 2;
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto some, LoadedModel::Load(request));
  EXPECT_EQ(some->host_pool_bytes(), some->kv_pool_bytes() / 4);
  EXPECT_EQ(some->cache().Stats().groups[0].host_bytes,
            some->host_pool_bytes());
  request.host_pool_bytes = 0;
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto none, LoadedModel::Load(request));
  EXPECT_EQ(none->host_pool_bytes(), 0);
}

}  // namespace
}  // namespace kvasir::cli
