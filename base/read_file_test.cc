#include "base/read_file.h"

#include <sys/stat.h>
#include <unistd.h>

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
                         absl::StrCat("the file has more than ", bytes - 1,
                                      " bytes, the limit")));
  }
}

TEST_F(ReadFileTest, TheErrorForAFailedReadStatesTheCauseThatTheSystemGives) {
  EXPECT_THAT(
      ReadFile(path_ + ".none", 10).status(),
      StatusIs(absl::StatusCode::kNotFound, "No such file or directory"));
}

TEST_F(ReadFileTest, ReadFileOrPipeReturnsTheContentsOfAPipe) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  ASSERT_EQ(::write(ends[1], "token", 5), 5);
  ::close(ends[1]);
  const std::string path = absl::StrCat("/dev/fd/", ends[0]);
  const auto text = ReadFileOrPipe(path, 10);
  ::close(ends[0]);
  KVASIR_ASSERT_OK(text);
  EXPECT_EQ(*text, "token");
}

// Regression test: opening a FIFO once waited for ever for a writer.
TEST_F(ReadFileTest, RefusesAnythingButARegularFileWithoutReadingIt) {
  ASSERT_EQ(::mkfifo(path_.c_str(), 0600), 0);
  for (const std::string& path :
       {path_, folder_.path(), std::string("/dev/zero")}) {
    EXPECT_THAT(ReadFile(path, 10).status(),
                StatusIs(absl::StatusCode::kFailedPrecondition,
                         "this is not a regular file"))
        << path;
  }
}

}  // namespace
}  // namespace kvasir::base
