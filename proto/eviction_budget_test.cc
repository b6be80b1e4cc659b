#include "proto/eviction_budget.h"

#include "base/status_matchers.h"

namespace kvasir::proto {
namespace {

using base::StatusIs;
using ::testing::HasSubstr;

TEST(EvictionBudgetTest, ParsesANumberOfSlotsOrAShareOfThePrompt) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const EvictionBudget slots,
                              ParseEvictionBudget("256"));
  EXPECT_EQ(slots, (EvictionBudget{.tokens = 256}));
  KVASIR_ASSERT_OK_AND_ASSIGN(const EvictionBudget share,
                              ParseEvictionBudget("0.2"));
  EXPECT_EQ(share, (EvictionBudget{.ratio = 0.2}));
  KVASIR_ASSERT_OK_AND_ASSIGN(const EvictionBudget all,
                              ParseEvictionBudget("1"));
  EXPECT_EQ(all, (EvictionBudget{.ratio = 1}));
  for (const char* wrong : {"", "0", "-3", "1.5", "nan", "half", "0.2x"}) {
    EXPECT_THAT(ParseEvictionBudget(wrong),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("is not an eviction budget")))
        << wrong;
  }
}

TEST(EvictionBudgetTest, TheTextOfABudgetParsesBackToTheSameBudget) {
  for (const char* text : {"256", "0.2", "1"}) {
    KVASIR_ASSERT_OK_AND_ASSIGN(const EvictionBudget budget,
                                ParseEvictionBudget(text));
    EXPECT_EQ(EvictionBudgetText(budget), text);
  }
}

}  // namespace
}  // namespace kvasir::proto
