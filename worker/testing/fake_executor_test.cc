// Tests the fake executor's checks of evictions, on which scheduler tests rely.
#include "worker/testing/fake_executor.h"

#include "base/status_matchers.h"

namespace kvasir::worker {
namespace {

using ::kvasir::base::StatusIs;
using kvasir::v1::SlotEviction;
using kvasir::v1::StepPlan;
using ::testing::HasSubstr;

class FakeEvictionTest : public ::testing::Test {
 protected:
  // Runs 10 tokens of sequence 1, in pages 0, 1 and 2 of both page groups. Only
  // group 0 evicts.
  void SetUp() override {
    StepPlan plan = Step(10, 0, 0);
    for (uint32_t group : {0U, 1U}) {
      auto* delta = plan.mutable_sequences(0)->add_block_tables();
      delta->set_page_group(group);
      delta->set_reset(true);
      for (int32_t page : {0, 1, 2}) delta->add_appended_pages(page);
    }
    KVASIR_ASSERT_OK(executor_.Execute(plan).status());
  }

  StepPlan Step(uint32_t tokens, uint64_t start, uint64_t physical_start) {
    StepPlan plan;
    plan.set_step_id(executor_.steps() + 1);
    auto* step = plan.add_sequences();
    step->set_sequence_id(1);
    step->set_num_tokens(tokens);
    for (uint32_t t = 0; t < tokens; ++t) step->add_token_ids(7);
    step->set_logical_start(start);
    step->add_physical_starts(physical_start);
    step->add_physical_starts(start);
    return plan;
  }

  // A valid eviction, which keeps 6 of 10 slots.
  static SlotEviction Sound() {
    SlotEviction eviction;
    eviction.set_sequence_id(1);
    for (int32_t page : {0, 1, 2}) eviction.add_pages(page);
    eviction.set_num_slots(10);
    eviction.set_kept_slots(6);
    eviction.set_logical_tokens(10);
    return eviction;
  }

  void ExpectRefused(const SlotEviction& eviction, const char* why) {
    StepPlan plan = Step(1, 10, eviction.kept_slots());
    *plan.add_evictions() = eviction;
    EXPECT_THAT(executor_.Execute(plan).status(),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(why)));
  }

  FakeExecutor executor_{
      {.groups = {{.num_pages = 8,
                   .eviction = {.budget_tokens = 6, .every_tokens = 2}},
                  {.num_pages = 8}}}};
};

TEST_F(FakeEvictionTest, TokensAfterAnEvictionMustFollowTheKeptSlots) {
  StepPlan plan = Step(1, 10, 6);
  *plan.add_evictions() = Sound();
  KVASIR_EXPECT_OK(executor_.Execute(plan).status());
  EXPECT_THAT(
      executor_.Execute(Step(1, 11, 11)).status(),
      StatusIs(
          absl::StatusCode::kInvalidArgument,
          HasSubstr("physical start in page group 0 is 11, but must be 7")));
}

TEST_F(FakeEvictionTest, AnEvictionInAPageGroupThatDoesNotEvictIsRefused) {
  SlotEviction eviction = Sound();
  eviction.set_page_group(1);
  ExpectRefused(eviction, "evicts from page group 1");
}

TEST_F(FakeEvictionTest, AnEvictionThatKeepsAllSlotsIsRefused) {
  SlotEviction eviction = Sound();
  eviction.set_kept_slots(10);
  ExpectRefused(eviction, "keeps 10 of 10 slots");
}

TEST_F(FakeEvictionTest,
       AnEvictionOfPagesOtherThanThoseInTheSequencesPageTableIsRefused) {
  SlotEviction eviction = Sound();
  eviction.set_pages(1, 3);
  ExpectRefused(eviction, "its table holds 10 slots after 10 tokens");
}

TEST_F(FakeEvictionTest, AnEvictionWithMorePagesThanItsSlotsNeedIsRefused) {
  SlotEviction eviction = Sound();
  eviction.add_pages(3);
  ExpectRefused(eviction, "evicts from 4 pages, but its slots need 3");
}

TEST_F(FakeEvictionTest, SlotsOfASequenceThatHasEndedMayBeEvicted) {
  SlotEviction eviction = Sound();
  eviction.set_sequence_id(9);
  StepPlan plan = Step(1, 10, 10);
  plan.clear_sequences();
  plan.add_released_sequences(1);
  *plan.add_evictions() = eviction;
  KVASIR_EXPECT_OK(executor_.Execute(plan).status());
}

TEST_F(FakeEvictionTest, AnEvictionAfterMorePageCopiesThanThePlanHasIsRefused) {
  SlotEviction eviction = Sound();
  eviction.set_after_page_copies(1);
  ExpectRefused(
      eviction,
      "its eviction comes after 1 page copies, must come after 0 to 0");
}

}  // namespace
}  // namespace kvasir::worker
