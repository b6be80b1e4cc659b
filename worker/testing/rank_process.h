// Test support: ranks that are processes, which a test can kill and stop. The
// test's program starts itself with "--rank", followed by the rank's arguments.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

namespace kvasir::worker {

// Exit codes of a rank's process.
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

  // Reads a line of the process's output, or returns "" at its end.
  // ReadLastLine reads all lines and returns the last.
  std::string ReadLine();
  std::string ReadLastLine();
  void Write(const std::string& line);
  void Signal(int signal);
  // Waits for the process and returns the status of waitpid. Call it after
  // ReadLastLine, when the process has closed its output.
  int Wait();

 private:
  pid_t pid_ = 0;
  std::FILE* in_ = nullptr;
  std::FILE* out_ = nullptr;
};

// Starts `size` rank processes, each with its rank number and `arguments`.
// Sends the addresses of all ranks to each rank, and waits until each rank
// prints "connected".
std::vector<std::unique_ptr<RankProcess>> ConnectRankProcesses(
    int64_t size, const std::vector<std::string>& arguments);

// Expects that the rank's last line begins with UNAVAILABLE or ABORTED and
// contains `text`, and that the rank exits with kGroupDied.
void ExpectGroupDied(RankProcess* rank, const std::string& text);

}  // namespace kvasir::worker
