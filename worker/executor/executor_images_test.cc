// Tests that a sequence that is moved to another replica as an image (bytes)
// continues there with the same tokens and log probabilities. Runs every plan.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "cache/images/page_image.h"
#include "cache/kv_cache.h"
#include "gmock/gmock.h"
#include "worker/offline/direct_runner.h"
#include "worker/testing/eviction_cases.h"
#include "worker/testing/family_plan_cases.h"
#include "worker/testing/plan_cases.h"

namespace kvasir::worker {
namespace {

using base::StatusIs;
using cache::PageGroupId;
using cache::SequenceId;
using ::testing::HasSubstr;

constexpr int64_t kWindow = 24;
constexpr int64_t kPrompt = 53;
constexpr int64_t kChunk = 20;

struct Outcome {
  int32_t token = -1;
  std::vector<float> numbers;
  friend bool operator==(const Outcome&, const Outcome&) = default;
};

// A rank and its cache, without a scheduler.
class Replica {
 public:
  Replica(const FamilyCase& each, int64_t pages, int64_t host_pages) {
    RankOptions options = TinyOptions();
    options.page_tokens = 16;
    options.deterministic = true;
    options.executor.max_model_len = 128;
    options.executor.max_batched_tokens = kChunk;
    options.kv_cache_bytes = pages << 10;
    options.host_pool_bytes = host_pages << 10;
    auto rank =
        MakePlannedRank(each.plan_case, options, nullptr, "BF16", each.shape);
    KVASIR_EXPECT_OK(rank.status());
    rank_ = *std::move(rank);
    cache_ = std::make_unique<cache::KvCache>(
        cache::MakeKvCacheConfig(rank_->layout(), rank_->pages(),
                                 rank_->cache_id(), rank_->host_pages()));
    format_ = cache::ImageFormatOf(rank_->layout(), rank_->cache_id(),
                                   rank_->executor().numerics_id());
  }

  // Runs a prompt, then samples `num_tokens` tokens greedily. Different values
  // of `text` give different prompts.
  std::vector<Outcome> Start(int64_t id, int32_t text, int64_t num_tokens) {
    tokens_.clear();
    for (int32_t i = 0; i < kPrompt; ++i) {
      tokens_.push_back(3 + text * i % 1009);
    }
    cache_->StartSequence(SequenceId(id), tokens_, kAlone);
    return Continue(id, num_tokens);
  }

  std::vector<Outcome> Continue(int64_t id, int64_t num_tokens) {
    std::vector<Outcome> outcomes;
    while (static_cast<int64_t>(outcomes.size()) < num_tokens)
      Step(id, &outcomes);
    return outcomes;
  }

  // Returns the sequence's image and removes the sequence from this replica.
  std::string Export(int64_t id) {
    std::optional<cache::SequenceImage> image = cache_->Export(SequenceId(id));
    EXPECT_TRUE(image.has_value());
    kvasir::v1::StepPlan plan = NewPlan();
    plan.add_released_sequences(static_cast<uint64_t>(id));
    KVASIR_EXPECT_OK(rank_->executor().Execute(plan).status());
    const auto payload = rank_->executor().ReadImage(*image);
    KVASIR_EXPECT_OK(payload.status());
    return cache::ImageHeader(format_, image->shape, *payload) + *payload;
  }

  // Adds the sequence of an image to this replica. `tokens` are tokens() of the
  // replica that exported it.
  absl::Status Import(int64_t id, const std::string& bytes,
                      std::vector<int32_t> tokens) {
    KVASIR_ASSIGN_OR_RETURN(const cache::ParsedImage parsed,
                            cache::ParseImage(bytes, format_));
    KVASIR_ASSIGN_OR_RETURN(cache::SequenceImage image,
                            cache_->TakeImagePages(parsed.shape, kAlone));
    KVASIR_RETURN_IF_ERROR(rank_->executor().WriteImage(image, parsed.payload));
    EXPECT_TRUE(cache_->Import(SequenceId(id), &image, tokens, kAlone));
    tokens_ = std::move(tokens);
    return cache_->CheckInvariants();
  }

  void Release(int64_t id) { cache_->Release(SequenceId(id)); }
  void ExpectEmpty() const {
    for (const cache::PageGroupStats& group : cache_->Stats().groups) {
      EXPECT_EQ(group.used_pages, 0);
      EXPECT_EQ(group.host_used_pages, 0);
    }
    KVASIR_EXPECT_OK(cache_->CheckInvariants());
  }
  std::vector<cache::PageId> Pages(int64_t id) const {
    return cache_->Pages(SequenceId(id), PageGroupId(0));
  }
  const std::vector<int32_t>& tokens() const { return tokens_; }
  ModelExecutor& executor() { return rank_->executor(); }
  cache::KvCache& cache() { return *cache_; }

 private:
  inline static const cache::StartOptions kAlone = {
      .reuse_prefix = false, .publish_prefix = false, .prompt_tokens = kPrompt};

  kvasir::v1::StepPlan NewPlan() {
    kvasir::v1::StepPlan plan;
    plan.set_step_id(++step_);
    cache_->TakePageCopies(plan.mutable_page_copies());
    cache_->TakeEvictions(plan.mutable_evictions());
    return plan;
  }

  void Step(int64_t id, std::vector<Outcome>* outcomes) {
    const SequenceId sequence(id);
    const int64_t start = cache_->logical_tokens(sequence);
    const auto length = static_cast<int64_t>(tokens_.size());
    const bool prompt = start < kPrompt;
    if (cache_->eviction_due(sequence)) cache_->Evict(sequence);
    const int64_t count =
        std::min({prompt ? kPrompt - start : length - start, kChunk,
                  cache_->next_eviction(sequence).value_or(length) - start});
    ASSERT_TRUE(cache_->Reserve(sequence, count));
    kvasir::v1::StepPlan plan = NewPlan();
    kvasir::v1::SequenceStep* const step = plan.add_sequences();
    step->set_sequence_id(static_cast<uint64_t>(id));
    cache_->TakeDeltas(sequence, step);
    const auto ids = absl::MakeConstSpan(tokens_).subspan(
        static_cast<size_t>(start), static_cast<size_t>(count));
    step->mutable_token_ids()->Add(ids.begin(), ids.end());
    step->set_num_tokens(static_cast<uint32_t>(count));
    step->set_logical_start(static_cast<uint64_t>(start));
    step->set_prompt(prompt);
    const bool samples = start + count == length;
    if (samples) {
      *step->mutable_sample() = GreedySample();
      step->mutable_sample()->set_num_logprobs(5);
      step->mutable_sample()->set_position(static_cast<uint64_t>(length));
    }
    KVASIR_ASSERT_OK_AND_ASSIGN(const kvasir::v1::StepResult result,
                                rank_->executor().Execute(plan));
    cache_->Commit(sequence, ids);
    if (!samples) return;
    const kvasir::v1::SequenceResult& sequence_result = result.sequences(0);
    Outcome& next = outcomes->emplace_back();
    next.token = sequence_result.token_id();
    next.numbers.push_back(sequence_result.logprob());
    for (const auto& top : sequence_result.top())
      next.numbers.push_back(top.logprob());
    tokens_.push_back(next.token);
  }

  std::unique_ptr<Rank> rank_;
  std::unique_ptr<cache::KvCache> cache_;
  cache::ImageFormat format_;
  std::vector<int32_t> tokens_;  // ids of the running sequence
  uint64_t step_ = 0;
};

class ExecutorImagesTest : public ::testing::TestWithParam<FamilyCase> {};

TEST_P(ExecutorImagesTest, ASequenceContinuesOnAnotherWorkerWithTheSameBits) {
  Replica whole(GetParam(), 512, 0);
  const std::vector<Outcome> want = whole.Start(1, 41, 24);

  Replica first(GetParam(), 512, 512);
  std::vector<Outcome> outcomes = first.Start(1, 41, 10);
  const std::vector<cache::PageId> pages = first.Pages(1);
  const std::string image = first.Export(1);
  first.ExpectEmpty();

  Replica second(GetParam(), 700, 600);
  // Sequence 5 takes pages, so that the imported sequence gets other pages than
  // on the first replica.
  second.Start(5, 43, 2);
  KVASIR_ASSERT_OK(second.Import(6, image, first.tokens()));
  EXPECT_NE(second.Pages(6), pages);
  const std::vector<Outcome> rest = second.Continue(6, 14);
  outcomes.insert(outcomes.end(), rest.begin(), rest.end());
  EXPECT_EQ(outcomes, want);
  second.Release(5);
  second.Release(6);
  second.ExpectEmpty();
}

std::vector<FamilyCase> Cases() {
  std::vector<FamilyCase> cases = FamilyCases(kWindow);
  for (const PlanCase& plan_case : PlanCases()) {
    cases.push_back({TinyShape(), plan_case});
  }
  for (FamilyCase& each : EvictionCases()) {
    each.plan_case.name = absl::StrCat("Evicting", each.plan_case.name);
    cases.push_back(std::move(each));
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Plans, ExecutorImagesTest,
                         ::testing::ValuesIn(Cases()),
                         [](const auto& param_info) {
                           return param_info.param.plan_case.name;
                         });

FamilyCase Dense(const std::string& dtype) {
  const std::string codec = absl::StrCat(R"({"dtype":")", dtype, R"("})");
  return {TinyShape(),
          {dtype, plan_cases::Full("POST_ROPE", codec),
           plan_cases::Full("NO_ROPE", codec)}};
}

TEST(ImageBytesTest, ASequenceImageOfAnotherPlanIsRefusedAndTakesNoPages) {
  Replica floats(Dense("F32"), 512, 512);
  Replica halves(Dense("F16"), 512, 512);
  floats.Start(1, 41, 1);
  EXPECT_THAT(
      halves.Import(2, floats.Export(1), floats.tokens()),
      StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("cache_id")));
  halves.ExpectEmpty();
}

TEST(ImageBytesTest, ASequenceImageOfTheWrongSizeIsRefused) {
  Replica replica(Dense("BF16"), 512, 512);
  const cache::ImageShape shape = {.logical_tokens = 3,
                                   .groups = {{3, 0, 1, 0}}};
  KVASIR_ASSERT_OK_AND_ASSIGN(const cache::SequenceImage image,
                              replica.cache().TakeImagePages(shape, {}));
  EXPECT_THAT(
      replica.executor().WriteImage(image, "abc"),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("image has 3 bytes of pages, but must have ")));
}

TEST(ImageBytesTest, CopySpeedIsMeasuredOnlyBeforeTheFirstStep) {
  Replica replica(Dense("BF16"), 512, 512);
  KVASIR_ASSERT_OK_AND_ASSIGN(const double rate,
                              replica.executor().MeasureCopyBytesPerSecond());
  EXPECT_GT(rate, 0);
  replica.Start(1, 41, 1);
  EXPECT_THAT(replica.executor().MeasureCopyBytesPerSecond(),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("before the first step")));
  replica.Release(1);
  Replica none(Dense("BF16"), 512, 0);
  KVASIR_ASSERT_OK_AND_ASSIGN(const double nothing,
                              none.executor().MeasureCopyBytesPerSecond());
  EXPECT_EQ(nothing, 0);
}

}  // namespace
}  // namespace kvasir::worker
