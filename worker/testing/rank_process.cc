#include "worker/testing/rank_process.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "absl/strings/str_cat.h"

extern char** environ;

namespace kvasir::worker {

using ::testing::HasSubstr;

RankProcess::RankProcess(const std::vector<std::string>& arguments) {
  int to[2], from[2];
  EXPECT_EQ(pipe2(to, O_CLOEXEC), 0);
  EXPECT_EQ(pipe2(from, O_CLOEXEC), 0);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, to[0], STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, from[1], STDOUT_FILENO);
  std::vector<std::string> texts = {"/proc/self/exe", "--rank"};
  texts.insert(texts.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  argv.reserve(texts.size() + 1);
  for (std::string& text : texts) argv.push_back(text.data());
  argv.push_back(nullptr);
  EXPECT_EQ(
      posix_spawn(&pid_, argv[0], &actions, nullptr, argv.data(), environ), 0);
  posix_spawn_file_actions_destroy(&actions);
  close(to[0]);
  close(from[1]);
  in_ = fdopen(to[1], "w");
  out_ = fdopen(from[0], "r");
}

RankProcess::~RankProcess() {
  if (pid_ > 0) {
    Signal(SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  std::fclose(in_);
  std::fclose(out_);
}

std::string RankProcess::ReadLine() {
  char line[4096];
  if (std::fgets(line, sizeof(line), out_) == nullptr) return "";
  std::string text = line;
  text.pop_back();
  return text;
}

std::string RankProcess::ReadLastLine() {
  std::string last;
  for (std::string line; !(line = ReadLine()).empty();) last = line;
  return last;
}

void RankProcess::Write(const std::string& line) {
  std::fprintf(in_, "%s\n", line.c_str());
  std::fflush(in_);
}

void RankProcess::Signal(int signal) { kill(pid_, signal); }

int RankProcess::Wait() {
  int status = 0;
  EXPECT_EQ(waitpid(pid_, &status, 0), pid_);
  pid_ = 0;
  return status;
}

std::vector<std::unique_ptr<RankProcess>> ConnectRankProcesses(
    int64_t size, const std::vector<std::string>& arguments) {
  std::vector<std::unique_ptr<RankProcess>> ranks;
  for (int64_t rank = 0; rank < size; ++rank) {
    std::vector<std::string> own = {absl::StrCat(rank)};
    own.insert(own.end(), arguments.begin(), arguments.end());
    ranks.push_back(std::make_unique<RankProcess>(own));
  }
  std::vector<std::string> addresses;
  addresses.reserve(ranks.size());
  for (const auto& rank : ranks) addresses.push_back(rank->ReadLine());
  for (const auto& rank : ranks) {
    for (const std::string& address : addresses) rank->Write(address);
  }
  for (const auto& rank : ranks) EXPECT_EQ(rank->ReadLine(), "connected");
  return ranks;
}

void ExpectGroupDied(RankProcess* rank, const std::string& text) {
  const std::string last = rank->ReadLastLine();
  EXPECT_TRUE(last.rfind("UNAVAILABLE", 0) == 0 ||
              last.rfind("ABORTED", 0) == 0)
      << last;
  EXPECT_THAT(last, HasSubstr(text));
  const int status = rank->Wait();
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == kGroupDied)
      << "status " << status;
}

}  // namespace kvasir::worker
