// Test support: ranks as processes that can be killed and stopped. The test's
// program runs itself with "--rank", followed by the rank's arguments.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

namespace kvasir::worker {

// Exit codes of a rank.
inline constexpr int kDone = 0;
inline constexpr int kGroupDied = 3;
inline constexpr int kWrongSum = 4;

// A rank's process. The destructor kills and reaps it.
class RankProcess {
 public:
  explicit RankProcess(const std::vector<std::string>& arguments);
  ~RankProcess();
  RankProcess(const RankProcess&) = delete;
  RankProcess& operator=(const RankProcess&) = delete;

  // Returns "" at the end.
  std::string ReadLine();
  std::string ReadLastLine();
  void Write(const std::string& line);
  void Signal(int signal);
  // The status of waitpid. After ReadLastLine the process has ended.
  int Wait();

 private:
  pid_t pid_ = 0;
  std::FILE* in_ = nullptr;
  std::FILE* out_ = nullptr;
};

// Starts the ranks, each with its rank followed by `arguments`. Exchanges their
// addresses and waits until each says "connected".
std::vector<std::unique_ptr<RankProcess>> ConnectRankProcesses(
    int64_t size, const std::vector<std::string>& arguments);

// Expects that the rank's last line is UNAVAILABLE or ABORTED with this text,
// and that it exits with kGroupDied.
void ExpectGroupDied(RankProcess* rank, const std::string& text);

}  // namespace kvasir::worker
