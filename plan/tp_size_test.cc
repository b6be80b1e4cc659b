#include "plan/tp_size.h"

#include "base/status_matchers.h"

namespace kvasir::plan {
namespace {

using base::StatusIs;

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr TpDealt kLlama8b = {
    .num_kv_heads = 8, .num_heads = 32, .num_features = 14336};
constexpr TpDealt kSmol = {
    .num_kv_heads = 3, .num_heads = 9, .num_features = 1536};

TEST(TpSizeTest, ATpSizeAboveTheNumberOfKvHeadsMustBeAMultipleOfIt) {
  EXPECT_THAT(FittingTpSizes(kLlama8b), ElementsAre(1, 2, 4, 8, 16, 32));
  // 9 divides the 9 query heads and is a multiple of the 3 KV heads, but it
  // does not divide the 1536 features.
  EXPECT_THAT(FittingTpSizes(kSmol), ElementsAre(1, 3));
  EXPECT_THAT(
      FittingTpSizes({.num_kv_heads = 6, .num_heads = 12, .num_features = 24}),
      ElementsAre(1, 2, 3, 6, 12));
}

TEST(TpSizeTest,
     TheErrorForAnImpossibleTpSizeNamesTheModelsSizesAndThePossibleTpSizes) {
  EXPECT_THAT(CheckTpSize(kSmol, 2),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("3 KV heads, 9 query heads and 1536 MLP "
                                       "features cannot be divided among 2"),
                             HasSubstr("possible numbers of ranks: 1 or 3"))));
  for (const int64_t size : {-1, 0, 3, 5, 64}) {
    EXPECT_THAT(
        CheckTpSize(kLlama8b, size),
        StatusIs(absl::StatusCode::kInvalidArgument,
                 HasSubstr("possible numbers of ranks: 1, 2, 4, 8, 16 or 32")))
        << size;
  }
  for (const int64_t size : FittingTpSizes(kLlama8b)) {
    KVASIR_EXPECT_OK(CheckTpSize(kLlama8b, size));
  }
}

}  // namespace
}  // namespace kvasir::plan
