// A server in a process of its own, whose CPU time can be told apart.
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"

namespace kvasir::cli {

// Owns: the child process, which ends with it, or when this process is gone. A
//   later one's child keeps an earlier one's alive: end the last first.
// Threads: one.
class ForkedServer {
 public:
  // Something that serves until it is destroyed, and where.
  struct Running {
    std::shared_ptr<void> server;
    std::string target;
  };
  // Runs `start` in a child, with what it writes on standard error dropped.
  // Call before this process has any thread: only the calling one lives on in a
  // child (FAILED_PRECONDITION). Errors of `start` are handed on.
  static absl::StatusOr<std::unique_ptr<ForkedServer>> Start(
      const std::string& name, std::function<absl::StatusOr<Running>()> start);
  ~ForkedServer();

  const std::string& target() const { return target_; }
  // Of all its threads, so far. INTERNAL where it is gone.
  absl::StatusOr<double> CpuSeconds() const;

 private:
  ForkedServer(std::string name, pid_t child, int lifeline, std::string target)
      : name_(std::move(name)),
        child_(child),
        lifeline_(lifeline),
        target_(std::move(target)) {}

  const std::string name_;
  const pid_t child_;
  const int lifeline_;  // the child ends when it is closed
  const std::string target_;
};

}  // namespace kvasir::cli
