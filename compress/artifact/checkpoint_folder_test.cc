#include "compress/artifact/checkpoint_folder.h"

#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <fstream>
#include <string>
#include <vector>

#include "base/status_matchers.h"
#include "compress/testing/folder_fixture.h"

namespace {

// The errno values with which the functions below fail. If a value is 0, the
// function makes the real system call.
int g_exchange_errno = 0;
int g_sync_errno = 0;

}  // namespace

// These functions replace those of the C library. They produce errors that a
// test cannot cause otherwise.
extern "C" int renameat2(int from_folder, const char* from, int to_folder,
                         const char* to, unsigned int flags) noexcept {
  if (g_exchange_errno == 0) {
    return static_cast<int>(
        ::syscall(SYS_renameat2, from_folder, from, to_folder, to, flags));
  }
  errno = g_exchange_errno;
  return -1;
}

extern "C" int fsync(int descriptor) {
  if (g_sync_errno == 0) {
    return static_cast<int>(::syscall(SYS_fsync, descriptor));
  }
  errno = g_sync_errno;
  return -1;
}

namespace kvasir::compress {
namespace {

namespace fs = std::filesystem;

using ::kvasir::base::StatusIs;
using ::testing::HasSubstr;

constexpr char kMarker[] = "kvasir-compress.unfinished";

class NewFolderTest : public FolderTest {
 protected:
  void SetUp() override {
    out_ = folder_ / "out";
    partial_ = folder_ / "out.partial";
    replaced_ = folder_ / "out.partial.replaced";
  }
  void TearDown() override {
    g_exchange_errno = 0;
    g_sync_errno = 0;
  }

  static void Put(const fs::path& path) {
    fs::create_directories(path.parent_path());
    std::ofstream(path) << "x";
  }
  // Writes the files of a checkpoint, and a file `name` by which the test
  // recognizes this checkpoint.
  static void PutCheckpoint(const fs::path& folder, const std::string& name) {
    for (const std::string& file :
         {std::string("config.json"), std::string("model.safetensors"), name}) {
      Put(folder / file);
    }
  }
  static void FillAndKeep(NewFolder& folder) {
    PutCheckpoint(folder.path(), "new");
    KVASIR_ASSERT_OK(folder.Keep());
  }
  std::vector<std::string> Left() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder_)) {
      names.push_back(entry.path().filename());
    }
    std::sort(names.begin(), names.end());
    return names;
  }
  // Expects that a complete run with --overwrite replaces the old folder and
  // removes all leftovers.
  void ExpectReplaced() {
    KVASIR_ASSERT_OK_AND_ASSIGN(const auto folder,
                                NewFolder::Create(out_, /*overwrite=*/true));
    FillAndKeep(*folder);
    EXPECT_EQ(Left(), std::vector<std::string>{"out"});
    EXPECT_TRUE(fs::exists(out_ / "new"));
    EXPECT_FALSE(fs::exists(out_ / "old"));
    EXPECT_FALSE(fs::exists(out_ / kMarker));
  }

  // Expects that a run that would replace an old checkpoint fails with `reason`
  // and leaves the checkpoint as it was.
  void ExpectNotReplaced(const std::string& reason) {
    PutCheckpoint(out_, "old");
    KVASIR_ASSERT_OK_AND_ASSIGN(auto folder,
                                NewFolder::Create(out_, /*overwrite=*/true));
    PutCheckpoint(folder->path(), "new");
    EXPECT_THAT(folder->Keep(),
                StatusIs(absl::StatusCode::kUnavailable, HasSubstr(reason)));
    folder.reset();
    EXPECT_EQ(Left(), std::vector<std::string>{"out"});
    EXPECT_TRUE(fs::exists(out_ / "old"));
    EXPECT_FALSE(fs::exists(out_ / "new"));
  }

  fs::path out_, partial_, replaced_;
};

TEST_F(NewFolderTest,
       IfFoldersCannotBeExchangedAtomicallyTheOldFolderIsRenamedFirst) {
  for (const int reason : {EINVAL, ENOSYS, ENOTSUP}) {
    g_exchange_errno = reason;
    fs::remove_all(out_);
    PutCheckpoint(out_, "old");
    ExpectReplaced();
  }
}

TEST_F(NewFolderTest, AFailedExchangeOfFoldersLeavesTheOldFolderInPlace) {
  g_exchange_errno = EIO;
  ExpectNotReplaced("cannot rename ");
}

TEST_F(NewFolderTest, ANewFolderThatCannotBeSyncedDoesNotReplaceTheOldFolder) {
  g_sync_errno = EIO;
  ExpectNotReplaced("to the disk: ");
  // A file system that does not support syncing must not cause an error.
  g_sync_errno = EINVAL;
  ExpectReplaced();
}

TEST_F(NewFolderTest, TwoRunsCannotWriteTheSameFolder) {
  KVASIR_ASSERT_OK_AND_ASSIGN(auto first,
                              NewFolder::Create(out_, /*overwrite=*/true));
  Put(first->path() / "weights");
  EXPECT_THAT(NewFolder::Create(out_, /*overwrite=*/true),
              StatusIs(absl::StatusCode::kUnavailable,
                       HasSubstr("is being written by another run")));
  EXPECT_TRUE(fs::exists(first->path() / "weights"));
  first.reset();
  EXPECT_TRUE(Left().empty());
  KVASIR_EXPECT_OK(NewFolder::Check(out_, /*overwrite=*/false));
}

TEST_F(NewFolderTest, OverwriteReplacesOnlyACheckpoint) {
  // A folder that has a config.json but no weights is not a checkpoint.
  Put(out_ / "config.json");
  Put(out_ / "index.js");
  EXPECT_THAT(
      NewFolder::Check(out_, /*overwrite=*/true),
      StatusIs(
          absl::StatusCode::kAlreadyExists,
          HasSubstr("is not a checkpoint, so --overwrite does not replace")));
  // A folder with weights that also contains other folders is not a checkpoint.
  PutCheckpoint(out_, "old");
  Put(out_ / "src" / "main.js");
  EXPECT_THAT(NewFolder::Check(out_, /*overwrite=*/true),
              StatusIs(absl::StatusCode::kAlreadyExists,
                       HasSubstr("does not replace it")));
  EXPECT_TRUE(fs::exists(out_ / "src" / "main.js"));
  fs::remove_all(out_ / "src");
  KVASIR_EXPECT_OK(NewFolder::Check(out_, /*overwrite=*/true));

  // A link is never replaced, because this program does not make links to
  // checkpoints.
  fs::rename(out_, folder_ / "elsewhere");
  fs::create_directory_symlink("elsewhere", out_);
  EXPECT_THAT(NewFolder::Check(out_, /*overwrite=*/true),
              StatusIs(absl::StatusCode::kAlreadyExists,
                       HasSubstr("does not replace it")));
  EXPECT_TRUE(fs::exists(folder_ / "elsewhere" / "old"));
}

TEST_F(NewFolderTest,
       AFolderThatAppearsDuringTheRunIsReplacedOnlyWithOverwrite) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto folder,
                              NewFolder::Create(out_, /*overwrite=*/false));
  PutCheckpoint(out_, "old");
  PutCheckpoint(folder->path(), "new");
  EXPECT_THAT(folder->Keep(), StatusIs(absl::StatusCode::kAlreadyExists,
                                       HasSubstr("exists; give --overwrite")));
  EXPECT_TRUE(fs::exists(out_ / "old"));
}

TEST_F(NewFolderTest,
       AnOutputFolderThatIsOrContainsAnInputFolderIsNeverReplaced) {
  const std::array<fs::path, 2> inputs = {folder_ / "other",
                                          out_ / "base" / "model"};
  EXPECT_THAT(NewFolder::Check(out_, /*overwrite=*/true, inputs),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("holds the input")));
  // The output "oth" is accepted, although the name of the input "other" begins
  // with it.
  KVASIR_EXPECT_OK(NewFolder::Check(folder_ / "oth", true, inputs));
  PutCheckpoint(folder_ / "other", "old");
  EXPECT_THAT(
      NewFolder::Check(folder_ / "other/", /*overwrite=*/true, inputs),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("is an input")));
}

TEST_F(NewFolderTest,
       IfARunIsKilledAfterTheExchangeTheNextRunRemovesTheOldFolder) {
  PutCheckpoint(out_, "old");
  Put(out_ / kMarker);
  PutCheckpoint(partial_, "older");
  ExpectReplaced();
}

TEST_F(NewFolderTest,
       IfARunIsKilledBetweenTheTwoRenamesTheNextRunRestoresTheOldFolder) {
  PutCheckpoint(replaced_, "old");
  PutCheckpoint(partial_, "half");
  Put(partial_ / kMarker);
  EXPECT_THAT(NewFolder::Check(out_, /*overwrite=*/false),
              StatusIs(absl::StatusCode::kAlreadyExists,
                       HasSubstr("exists; give --overwrite")));
  EXPECT_EQ(Left(), std::vector<std::string>{"out"});
  EXPECT_TRUE(fs::exists(out_ / "old"));
  ExpectReplaced();
}

TEST_F(NewFolderTest, ATemporaryFolderThatNoEarlierRunLeftIsRefused) {
  PutCheckpoint(out_, "old");
  for (const fs::path& folder : {partial_, replaced_}) {
    PutCheckpoint(folder, "mine");
    EXPECT_THAT(NewFolder::Check(out_, /*overwrite=*/true),
                StatusIs(absl::StatusCode::kAlreadyExists,
                         HasSubstr("needed for a temporary folder")));
    EXPECT_TRUE(fs::exists(folder / "mine"));
    fs::remove_all(folder);
  }
}

}  // namespace
}  // namespace kvasir::compress
