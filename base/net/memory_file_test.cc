#include "base/net/memory_file.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

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
  struct stat file_stat = {};
  EXPECT_EQ(stat(path.c_str(), &file_stat), 0);
  return file_stat.st_mtime;
}

TEST(MemoryFileTest, OpeningThePathReadsTheLatestText) {
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

TEST(MemoryFileTest, NoOtherUserMayReadOrRunAMemoryFile) {
  const auto file = MemoryFile::Create("a key");
  KVASIR_ASSERT_OK(file.status());
  struct stat file_stat = {};
  ASSERT_EQ(stat((*file)->path().c_str(), &file_stat), 0);
  EXPECT_EQ(file_stat.st_mode & 0777, 0600u);
  EXPECT_EQ(file_stat.st_nlink, 0u) << "it is in no folder";
}

// gRPC compares only the whole seconds of the modification times to see whether
// a file has changed.
TEST(MemoryFileTest, EveryChangeGetsALaterSecondAsItsModificationTime) {
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

// Sets a resource limit of the process and restores the old limit
// when destroyed.
class Limit {
 public:
  Limit(__rlimit_resource which, rlim_t most) : which_(which) {
    getrlimit(which_, &before_);
    rlimit now = before_;
    now.rlim_cur = most;
    setrlimit(which_, &now);
  }
  ~Limit() { setrlimit(which_, &before_); }

 private:
  const __rlimit_resource which_;
  rlimit before_ = {};
};

// If only some of the files changed, a new key could be in use with an
// old certificate.
TEST(MemoryFileTest, SeveralFilesChangeTogetherOrNotAtAll) {
  // Open eight descriptors before the files. After they are closed, their
  // numbers are free for new descriptors even under the limit set below.
  std::vector<int> below;
  for (int i = 0; i < 8; ++i) below.push_back(open("/dev/null", O_RDONLY));
  auto one = MemoryFile::Create("one");
  auto two = MemoryFile::Create("two");
  for (const int each : below) close(each);
  KVASIR_ASSERT_OK(one.status());
  KVASIR_ASSERT_OK(two.status());
  const auto change = [&](const std::string& text_of_two) {
    return MemoryFile::ReplaceAll(
        {{one->get(), "new one"}, {two->get(), text_of_two}});
  };
  const auto texts = [&] {
    return Read((*one)->path()) + " " + Read((*two)->path());
  };
  {
    // The second text exceeds the limit for file sizes.
    const auto before = signal(SIGXFSZ, SIG_IGN);
    const Limit limit(RLIMIT_FSIZE, 100);
    EXPECT_THAT(change(std::string(1000, 'x')),
                StatusIs(absl::StatusCode::kUnavailable,
                         ::testing::HasSubstr("write")));
    signal(SIGXFSZ, before);
  }
  EXPECT_EQ(texts(), "one two");
  {
    // The second file's descriptor number is beyond the limit, so dup3 cannot
    // replace it.
    const std::string& path = (*two)->path();
    const Limit limit(RLIMIT_NOFILE,
                      std::stoul(path.substr(path.rfind('/') + 1)));
    EXPECT_THAT(change("new two"), StatusIs(absl::StatusCode::kUnavailable,
                                            ::testing::HasSubstr("dup3")));
  }
  EXPECT_EQ(texts(), "one two");
  KVASIR_EXPECT_OK(change("new two"));
  EXPECT_EQ(texts(), "new one new two");
}

TEST(MemoryFileTest, AReaderSeesTheOldOrTheNewTextAndNeverAMix) {
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
