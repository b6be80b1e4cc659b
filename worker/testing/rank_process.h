// For tests: ranks as processes, which are killed and stopped. A test's program
// runs itself, with "--rank" and the rank's arguments behind it.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

namespace kvasir::worker {

// How a rank ends.
inline constexpr int kDone = 0;
inline constexpr int kGroupDied = 3;
inline constexpr int kWrongSum = 4;

// A rank's process. Killed and reaped at the latest with this.
class RankProcess {
 public:
  explicit RankProcess(const std::vector<std::string>& arguments);
  ~RankProcess();
  RankProcess(const RankProcess&) = delete;
  RankProcess& operator=(const RankProcess&) = delete;

  // "" at the end.
  std::string ReadLine();
  std::string ReadLastLine();
  void Write(const std::string& line);
  void Signal(int signal);
  // How it ended, as of waitpid; after ReadLastLine it has.
  int Wait();

 private:
  pid_t pid_ = 0;
  std::FILE* in_ = nullptr;
  std::FILE* out_ = nullptr;
};

// Each gets its rank, then `arguments`; says its address, reads those of all,
// and says "connected".
std::vector<std::unique_ptr<RankProcess>> ConnectRankProcesses(
    int64_t size, const std::vector<std::string>& arguments);

// Its last line is UNAVAILABLE or ABORTED, with this text, and it has ended so.
void ExpectGroupDied(RankProcess* rank, const std::string& text);

}  // namespace kvasir::worker
