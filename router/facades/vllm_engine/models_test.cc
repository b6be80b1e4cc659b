#include "router/facades/vllm_engine/models.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "router/facades/calls/only_model.h"

namespace kvasir::router {
namespace {

using base::StatusIs;
using ::testing::HasSubstr;

class ModelsOnly final : public RequestRouter {
 public:
  absl::StatusOr<std::shared_ptr<RequestHandle>> Submit(
      CanonicalRequest, std::shared_ptr<RequestSink>) override {
    return absl::UnimplementedError("serves nothing");
  }
  void LogRefused(CanonicalRequest, const absl::Status&) override {}
  std::vector<ModelStatus> Models() const override { return models; }
  absl::StatusOr<ModelStatus> Model(const std::string&) const override {
    return models.front();
  }
  RouterHealth Health() const override { return health; }

  std::vector<ModelStatus> models;
  RouterHealth health{RouterState::kStarting, false, "0 of 1 replicas ready"};
};

ModelStatus Served(const std::string& name, const std::string& weights_id) {
  ModelStatus model;
  model.name = name;
  model.info.emplace();
  model.info->set_weights_id(weights_id);
  model.info->set_page_tokens(64);
  return model;
}

TEST(VllmEngineModelsTest, SeveralServedNamesOfTheSameWeightsCountAsOneModel) {
  ModelsOnly router;
  router.models = {Served("a", "w1"), Served("b", "w1")};
  const auto model = OnlyModel(router);
  KVASIR_ASSERT_OK(model);
  EXPECT_EQ(model->name, "a");
}

TEST(VllmEngineModelsTest, ARouterThatServesDifferentModelsIsRefused) {
  ModelsOnly router;
  router.models = {Served("a", "w1"), Served("b", "w2")};
  EXPECT_THAT(OnlyModel(router).status(),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("'a' and 'b' are different models")));
}

TEST(VllmEngineModelsTest, DescriptionsAreUnavailableBeforeAWorkerIsReached) {
  ModelsOnly router;
  EXPECT_THAT(OnlyModel(router).status(),
              StatusIs(absl::StatusCode::kUnavailable,
                       HasSubstr("0 of 1 replicas ready")));
  ModelStatus unreached;
  unreached.name = "a";
  EXPECT_THAT(VllmModelInfoOf(unreached, true).status(),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("'a'")));
  const auto health = VllmHealthOf(router);
  EXPECT_FALSE(health.healthy());
  EXPECT_EQ(health.message(), "0 of 1 replicas ready");
}

// If a path were reported, a gateway would try to load it and ignore its
// own flags.
TEST(VllmEngineModelsTest, WithoutAServedTokenizerNoTokenizerPathIsReported) {
  EXPECT_EQ(VllmModelInfoOf(Served("a", "w"), false)->tokenizer_path(), "");
  EXPECT_EQ(VllmModelInfoOf(Served("a", "w"), true)->tokenizer_path(),
            "/nonexistent/a");
}

TEST(VllmEngineModelsTest,
     TheLoadOfAModelIsReportedInVllmsFieldsAndLimitedToInt32) {
  ModelStatus model = Served("a", "w");
  model.load = {.running = 3,
                .waiting = 2,
                .max_num_seqs = 4,
                .used_tokens = 64,
                .total_tokens = uint64_t{1} << 40};
  const auto load = VllmLoadOf(model);
  EXPECT_EQ(load.num_running_reqs(), 3);
  EXPECT_EQ(load.num_waiting_reqs(), 2);
  EXPECT_EQ(load.num_total_reqs(), 5);
  EXPECT_EQ(load.utilization(), 0.75);
  EXPECT_EQ(load.max_running_requests(), 4);
  EXPECT_EQ(load.max_total_num_tokens(), 2147483647) << "the largest int32";
  EXPECT_GT(load.token_usage(), 0.0);
  EXPECT_EQ(VllmServerInfoOf(model).active_requests(), 5);
  EXPECT_EQ(VllmServerInfoOf(model).block_size(), 64);
}

}  // namespace
}  // namespace kvasir::router
