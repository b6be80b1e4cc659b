#include "worker/program/attention_flops.h"

#include "base/status_matchers.h"
#include "gtest/gtest.h"
#include "model/shapes/shape_config.h"
#include "worker/program/attention_program.h"
#include "worker/testing/plan_cases.h"

namespace kvasir::worker {
namespace {

// Counts the operations of all query heads on the latents that they read, per
// cached token.
int64_t Absorbed(const AttentionProgram& program, const PartProgram& part) {
  const RankHeads& heads = program.heads;
  int64_t flops = 0;
  for (int64_t h = 0; h < heads.query.count; ++h) {
    const auto kv = static_cast<size_t>(h * heads.kv.count / heads.query.count);
    const auto group = static_cast<size_t>(part.group_of_head[kv]);
    flops += 2 * part.latents[group].stored;
  }
  return flops;
}

// Counts the operations of the keys for a cached token, from the program that
// the engine runs.
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
    flops.attention += Absorbed(program, part);
  }
  return flops;
}

SideFlops OfValues(const AttentionProgram& program) {
  return {.attention = Absorbed(program, program.value)};
}

class AttentionFlopsTest : public ::testing::TestWithParam<PlanCase> {
 protected:
  void ExpectThePrograms(plan::TpShard shard, const RankHeads& heads) {
    KVASIR_ASSERT_OK_AND_ASSIGN(const model::DecoderSpec spec,
                                model::SpecOfShape(TinyShape()));
    const plan::ResolvedPlan plan =
        Resolved(PlanOf(GetParam(), spec), spec, shard);
    KVASIR_ASSERT_OK_AND_ASSIGN(
        const AttentionProgram program,
        MakeAttentionProgram(plan.attention_of(0), plan.shape, 0, heads));
    EXPECT_EQ(FlopsPerSlot(plan, 0, plan::Side::kKey), OfKeys(program));
    EXPECT_EQ(FlopsPerSlot(plan, 0, plan::Side::kValue), OfValues(program));
  }
};

TEST_P(AttentionFlopsTest, FlopsPerSlotEqualThoseOfTheAttentionProgram) {
  ExpectThePrograms({}, {.query = {0, 8}, .kv = {0, 4}});
}

TEST_P(AttentionFlopsTest, FlopsPerSlotCountOnlyTheHeadsOfTheRank) {
  ExpectThePrograms({.rank = 1, .size = 2}, {.query = {4, 4}, .kv = {2, 2}});
}

TEST_P(AttentionFlopsTest,
       FlopsPerSlotCountOnlyTheRanksQueryHeadsOfASharedKvHead) {
  ExpectThePrograms({.rank = 5, .size = 8}, {.query = {5, 1}, .kv = {2, 1}});
}

INSTANTIATE_TEST_SUITE_P(Methods, AttentionFlopsTest,
                         ::testing::ValuesIn(PlanCases()),
                         [](const auto& parameter) {
                           return parameter.param.name;
                         });

}  // namespace
}  // namespace kvasir::worker
