#include "base/read_file.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "base/temp_folder.h"
#include "gtest/gtest.h"

namespace kvasir::base {
namespace {

class ReadFileTest : public ::testing::Test {
 protected:
  const TempFolder folder_;
  const std::string path_ = folder_.File("file");
};

TEST_F(ReadFileTest, ReadsAFileUpToItsLimit) {
  for (const size_t bytes : {size_t{0}, size_t{1}, size_t{16 << 10},
                             size_t{(16 << 10) + 1}, size_t{100'000}}) {
    const std::string text(bytes, 'x');
    folder_.Write("file", text);
    KVASIR_EXPECT_OK(ReadFile(path_, bytes).status());
    EXPECT_EQ(*ReadFile(path_, bytes), text);
    EXPECT_EQ(*ReadFile(path_, 1 << 20), text);
    if (bytes == 0) continue;
    EXPECT_THAT(ReadFile(path_, bytes - 1).status(),
                StatusIs(absl::StatusCode::kOutOfRange,
                         absl::StrCat("has more than ", bytes - 1, " bytes")));
  }
}

TEST_F(ReadFileTest, AReadErrorStatesTheSystemsCause) {
  EXPECT_THAT(
      ReadFile(path_ + ".none", 10).status(),
      StatusIs(absl::StatusCode::kNotFound, "No such file or directory"));
  // A folder can be opened like a file but not read.
  EXPECT_THAT(
      ReadFile(folder_.path(), 10).status(),
      StatusIs(absl::StatusCode::kFailedPrecondition, "Is a directory"));
}

}  // namespace
}  // namespace kvasir::base
