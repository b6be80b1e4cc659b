#include "compress/artifact/new_file.h"

#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <iterator>

#include "base/status_matchers.h"
#include "compress/testing/folder_fixture.h"

namespace kvasir::compress {
namespace {

namespace fs = std::filesystem;

using ::kvasir::base::StatusIs;
using ::testing::HasSubstr;

std::span<const std::byte> BytesOf(const std::string& text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

class NewFileTest : public FolderTest {
 protected:
  void SetUp() override { path_ = folder_ / "x"; }

  fs::path path_;
};

TEST_F(NewFileTest, ANewFileReplacesTheOldOneOnlyWhenItIsFinished) {
  KVASIR_ASSERT_OK(WriteFileAtomically(path_, "old"));
  {
    KVASIR_ASSERT_OK_AND_ASSIGN(const auto file, NewFile::Create(path_));
    KVASIR_ASSERT_OK(file->Append(BytesOf("1234")));
    KVASIR_ASSERT_OK(file->Append(BytesOf("56")));
    KVASIR_ASSERT_OK(file->Rewrite(1, BytesOf("xy")));
    EXPECT_EQ(ReadFile(path_), "old");
    KVASIR_ASSERT_OK(file->Finish());
    EXPECT_EQ(ReadFile(path_), "1xy456");
  }
  KVASIR_ASSERT_OK(NewFile::Create(path_).status());
  EXPECT_EQ(ReadFile(path_), "1xy456");
  EXPECT_FALSE(fs::exists(folder_ / "x.partial"));
}

TEST_F(NewFileTest, ASecondWriterIsRefusedUntilTheFirstFinishesTheFile) {
  KVASIR_ASSERT_OK_AND_ASSIGN(auto first, NewFile::Create(path_));
  KVASIR_ASSERT_OK(first->Append(BytesOf("first")));
  EXPECT_THAT(NewFile::Create(path_),
              StatusIs(absl::StatusCode::kUnavailable,
                       HasSubstr("x.partial is being written by another run")));
  KVASIR_ASSERT_OK(first->Finish());
  EXPECT_EQ(ReadFile(path_), "first");
  // A second writer can use the name although the first writer object still
  // exists.
  KVASIR_ASSERT_OK(WriteFileAtomically(path_, "second"));
  EXPECT_EQ(ReadFile(path_), "second");
}

TEST_F(NewFileTest, APartialFileThatAKilledWriterLeftIsOverwritten) {
  std::ofstream(folder_ / "x.partial") << "much more than comes now";
  KVASIR_ASSERT_OK(WriteFileAtomically(path_, "little"));
  EXPECT_EQ(ReadFile(path_), "little");
}

TEST_F(NewFileTest, CheckingWhetherAPathIsWritableDoesNotDisturbAWriter) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto file, NewFile::Create(path_));
  KVASIR_ASSERT_OK(file->Append(BytesOf("whole")));
  KVASIR_EXPECT_OK(CheckWritable(path_));
  EXPECT_EQ(ReadFile(folder_ / "x.partial"), "whole");
  KVASIR_ASSERT_OK(file->Finish());
  KVASIR_EXPECT_OK(CheckWritable(path_));
  EXPECT_EQ(ReadFile(path_), "whole");
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), {}), 1);
}

TEST_F(NewFileTest, CheckWritableFailsIfNoFileCanBeCreated) {
  EXPECT_THAT(CheckWritable(folder_),
              StatusIs(absl::StatusCode::kUnavailable,
                       HasSubstr("cannot write " + folder_.string() + ": ")));
  EXPECT_THAT(CheckWritable(folder_ / "none" / "x"),
              StatusIs(absl::StatusCode::kUnavailable,
                       HasSubstr("none/x: No such file")));
}

// A limit on the file size makes a write fail as it would on a full disk.
TEST_F(NewFileTest, AFullDiskLeavesTheOldFileAndNoPartialFile) {
  KVASIR_ASSERT_OK(WriteFileAtomically(path_, "old"));
  rlimit before;
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small = {.rlim_cur = 100, .rlim_max = before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const absl::Status status = WriteFileAtomically(path_, std::string(200, 'n'));
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kUnavailable,
                               HasSubstr("x.partial at byte 100: ")));
  EXPECT_EQ(ReadFile(path_), "old");
  EXPECT_FALSE(fs::exists(folder_ / "x.partial"));
}

}  // namespace
}  // namespace kvasir::compress
