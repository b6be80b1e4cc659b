// Runs a server in a separate process, so that its CPU time can be measured.
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

namespace kvasir::cli {

// Owns: the child process, which ends with this object or with this process.
//   Destroy children in reverse order: a forked child inherits the lifelines
//   (pipes) of earlier children and so keeps them alive.
// Threads: used by one thread only.
class ForkedServer {
 public:
  // A server that runs until it is destroyed, and its address.
  struct Running {
    std::shared_ptr<void> server;
    std::string target;
  };
  // Forks a child that runs `start`; its standard error is discarded. Returns
  // the error of `start`, and FAILED_PRECONDITION if this process has several
  // threads, because only the calling thread would exist in the child.
  static absl::StatusOr<std::unique_ptr<ForkedServer>> Start(
      const std::string& name, std::function<absl::StatusOr<Running>()> start);
  // Runs the program `kvasir` from this program's folder, and waits until it is
  // ready. `arguments` are the subcommand and its flags, without --ready-file.
  // INTERNAL, with the end of its log, if it does not start.
  static absl::StatusOr<std::unique_ptr<ForkedServer>> StartKvasir(
      const std::string& name, std::vector<std::string> arguments);
  ~ForkedServer();
  ForkedServer(const ForkedServer&) = delete;
  ForkedServer& operator=(const ForkedServer&) = delete;

  const std::string& target() const { return target_; }
  // The CPU time that all threads of the server have used so far. INTERNAL if
  // the process is gone.
  absl::StatusOr<double> CpuSeconds() const;

 private:
  ForkedServer(std::string name, pid_t child)
      : name_(std::move(name)), child_(child) {}

  const std::string name_;
  const pid_t child_;
  int lifeline_ = -1;   // a pipe; a forked child ends when it is closed
  std::string folder_;  // the folder of the program's ready file and log
  std::string target_;
};

}  // namespace kvasir::cli
