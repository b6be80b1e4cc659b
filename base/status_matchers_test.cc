#include "base/status_matchers.h"

#include <string>

namespace kvasir::base {
namespace {

using ::testing::HasSubstr;

TEST(StatusMatchersTest, AFailurePrintsItsExpressionAndStatus) {
  EXPECT_TRUE(IsOk("Load()", absl::OkStatus()));
  EXPECT_TRUE(IsOk("Load()", absl::StatusOr<int>(1)));
  const absl::StatusOr<int> missing = absl::NotFoundError("no file");
  EXPECT_FALSE(IsOk("Load()", missing));
  EXPECT_THAT(std::string(IsOk("Load()", missing.status()).message()),
              ::testing::AllOf(HasSubstr("Load()"), HasSubstr("NOT_FOUND"),
                               HasSubstr("no file")));
}

}  // namespace
}  // namespace kvasir::base
