#include "worker/program/attention_flops.h"

#include "base/status_matchers.h"
#include "gtest/gtest.h"
#include "worker/program/attention_program.h"
#include "worker/testing/plan_cases.h"

namespace kvasir::worker {
namespace {

// What the engine does for a cached token, by the program that it runs.
SideFlops OfKeys(const AttentionProgram& program) {
  SideFlops flops;
  for (const KeyProgram& part : program.key) {
    for (const double head : RebuildFlops(part)) {
      flops.reconstruction += static_cast<int64_t>(head);
    }
    if (part.rebuild.has_value()) {
      flops.attention += 2 * program.heads.query.count * part.rebuild->dims;
      continue;
    }
    for (const int64_t width : part.query.width) flops.attention += 2 * width;
  }
  return flops;
}

SideFlops OfValues(const AttentionProgram& program) {
  return {.attention = 2 * program.value.attended_columns};
}

class AttentionFlopsTest : public ::testing::TestWithParam<PlanCase> {
 protected:
  void ExpectThePrograms(base::TpShard shard, const RankHeads& heads) {
    KVASIR_ASSERT_OK_AND_ASSIGN(const model::DecoderSpec spec,
                                model::SpecOfShape(TinyShape()));
    const kvasir::v1::KvPlan plan = PlanOf(GetParam(), spec);
    KVASIR_ASSERT_OK_AND_ASSIGN(
        const cache::PageLayout layout,
        cache::PageLayout::Create(plan, CacheShapeOf(spec),
                                  {.page_tokens = 16, .shard = shard}));
    KVASIR_ASSERT_OK_AND_ASSIGN(
        const AttentionProgram program,
        MakeAttentionProgram(spec, 0, plan.layers(0), heads));
    EXPECT_EQ(
        FlopsPerSlot(spec, 0, cache::Side::kKey, plan.layers(0).key(), layout),
        OfKeys(program));
    EXPECT_EQ(FlopsPerSlot(spec, 0, cache::Side::kValue, plan.layers(0).value(),
                           layout),
              OfValues(program));
  }
};

TEST_P(AttentionFlopsTest, AreTheProgramsThatRun) {
  ExpectThePrograms({}, {.query = {0, 8}, .kv = {0, 4}});
}

TEST_P(AttentionFlopsTest, AreTheRanksOwn) {
  ExpectThePrograms({.rank = 1, .size = 2}, {.query = {4, 4}, .kv = {2, 2}});
}

TEST_P(AttentionFlopsTest, AreThoseOfItsQueryHeadsWhereAKvHeadIsShared) {
  ExpectThePrograms({.rank = 5, .size = 8}, {.query = {5, 1}, .kv = {2, 1}});
}

INSTANTIATE_TEST_SUITE_P(Methods, AttentionFlopsTest,
                         ::testing::ValuesIn(PlanCases()),
                         [](const auto& parameter) {
                           return parameter.param.name;
                         });

}  // namespace
}  // namespace kvasir::worker
