#include "base/cli/process.h"

#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <string>

#include "base/status_matchers.h"
#include "base/temp_folder.h"
#include "gtest/gtest.h"

namespace kvasir::cli {
namespace {

namespace fs = std::filesystem;

int NumFolders(const base::TempFolder& parent) {
  int count = 0;
  for (const auto& entry : fs::directory_iterator(parent.path())) {
    count += entry.is_directory() ? 1 : 0;
  }
  return count;
}

// Regression test: a server that got SIGKILL once left its folder of sockets
// for ever.
TEST(PrivateFolderTest,
     CreatingAPrivateFolderRemovesTheFoldersOfEndedProcesses) {
  const base::TempFolder parent;
  const auto living = MakePrivateFolder(parent.path());
  KVASIR_ASSERT_OK(living);
  const pid_t child = fork();
  if (child == 0) {
    const auto folder = MakePrivateFolder(parent.path());
    _exit(folder.ok() ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_EQ(status, 0);
  EXPECT_EQ(NumFolders(parent), 2);

  const auto next = MakePrivateFolder(parent.path());
  KVASIR_ASSERT_OK(next);
  EXPECT_EQ(NumFolders(parent), 2);
  EXPECT_TRUE(fs::exists(*living)) << "its process still runs";
}

TEST(PrivateFolderTest, AFolderWithoutALockFileIsNotRemoved) {
  const base::TempFolder parent;
  fs::create_directory(parent.File("kvasir-abcdef"));
  fs::create_directory(parent.File("kvasir-other-name"));
  KVASIR_ASSERT_OK(MakePrivateFolder(parent.path()));
  EXPECT_EQ(NumFolders(parent), 3);
}

}  // namespace
}  // namespace kvasir::cli
