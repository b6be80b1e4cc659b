#include "base/net/memory_file.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>

#include "base/status_matchers.h"

namespace kvasir::base {
namespace {

std::string Read(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::time_t Changed(const std::string& path) {
  struct stat told = {};
  EXPECT_EQ(stat(path.c_str(), &told), 0);
  return told.st_mtime;
}

TEST(MemoryFileTest, WhoOpensThePathReadsTheLastText) {
  const auto file = MemoryFile::Create("first");
  KVASIR_ASSERT_OK(file.status());
  const std::string path = (*file)->path();
  EXPECT_EQ(Read(path), "first");
  const int opened = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  ASSERT_GE(opened, 0);
  KVASIR_EXPECT_OK((*file)->Replace("second, and longer"));
  EXPECT_EQ((*file)->path(), path);
  EXPECT_EQ(Read(path), "second, and longer");
  char old[16] = {};
  EXPECT_EQ(read(opened, old, sizeof old), 5);
  EXPECT_STREQ(old, "first");
  close(opened);
  KVASIR_EXPECT_OK((*file)->Replace(""));
  EXPECT_EQ(Read(path), "");
}

TEST(MemoryFileTest, NobodyElseMayReadOrRunIt) {
  const auto file = MemoryFile::Create("a key");
  KVASIR_ASSERT_OK(file.status());
  struct stat told = {};
  ASSERT_EQ(stat((*file)->path().c_str(), &told), 0);
  EXPECT_EQ(told.st_mode & 0777, 0600u);
  EXPECT_EQ(told.st_nlink, 0u) << "no folder has it";
}

// gRPC reads two files as one by looking whether their seconds have changed.
TEST(MemoryFileTest, EveryChangeHasASecondOfItsOwn) {
  const auto file = MemoryFile::Create("0");
  KVASIR_ASSERT_OK(file.status());
  std::time_t last = Changed((*file)->path());
  for (int i = 1; i < 5; ++i) {
    KVASIR_EXPECT_OK((*file)->Replace(std::to_string(i)));
    const std::time_t now = Changed((*file)->path());
    EXPECT_GT(now, last);
    last = now;
  }
}

TEST(MemoryFileTest, AReaderSeesOneTextOrTheOtherAndNeverHalf) {
  const std::string texts[] = {std::string(20000, 'a'),
                               std::string(30000, 'b')};
  const auto file = MemoryFile::Create(texts[0]);
  KVASIR_ASSERT_OK(file.status());
  std::atomic<bool> done{false};
  std::thread writer([&] {
    for (int i = 0; i < 500; ++i) {
      KVASIR_EXPECT_OK((*file)->Replace(texts[i % 2]));
    }
    done = true;
  });
  while (!done) {
    const std::string read = Read((*file)->path());
    EXPECT_TRUE(read == texts[0] || read == texts[1]) << read.size();
  }
  writer.join();
}

}  // namespace
}  // namespace kvasir::base
