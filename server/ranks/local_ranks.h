// Ranks of a group that are processes of this host, started by this one.
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "worker/load/membership.h"

namespace kvasir::cli {

// What a rank hears from the process that started it, over a pipe: flags are
// for everybody on the machine to read.
struct JoinInfo {
  std::string leader;
  std::string secret;
  LocalShare local;
};

// Owns: the children, and a thread for each. No child outlives this object or,
//   by the kernel's doing, the thread that started it.
// Threads: Start, Tell, End and the destructor from one; the rest from any.
class LocalRanks {
 public:
  struct Child {
    int rank = 0;
    std::vector<std::string> arguments;  // of this program: "rank", ...
  };
  // Called from a thread of its own for each child that ends of anything but
  // exit code 0: "rank 1 (pid 17) was killed by signal 9".
  using OnFailure = std::function<void(const absl::Status& why)>;

  // Starts this program once for each child, without variables KVASIR_*, whose
  // values are in the arguments; --join-fd is added. UNAVAILABLE with the
  // system's reason.
  static absl::StatusOr<std::unique_ptr<LocalRanks>> Start(
      const std::vector<Child>& children);
  // Ends them.
  ~LocalRanks();

  // Once, and soon: children wait for it. Each hears its own place on the host,
  // behind this process.
  absl::Status Tell(const JoinInfo& info, OnFailure on_failure)
      ABSL_LOCKS_EXCLUDED(telling_mutex_, mutex_);

  // Nobody hears of failures from now on; returns when nobody is being told.
  void StopTelling() ABSL_LOCKS_EXCLUDED(telling_mutex_, mutex_);

  // Whether all ended within that time.
  bool WaitEnded(absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mutex_);
  // Of the child that failed last, before End. OK: of none.
  absl::Status failure() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Those that are still there have a moment to end, then are killed; no
  // failure is told any more.
  void End() ABSL_LOCKS_EXCLUDED(mutex_);

  // Of a child: what it hears. Names this process, and makes the kernel kill it
  // with its parent's thread, too. UNAVAILABLE where the parent is gone.
  static absl::StatusOr<JoinInfo> ReadJoinInfo(int join_fd);

 private:
  struct Running {
    int rank = 0;
    pid_t pid = 0;
    int pipe = -1;
    bool ended = false;
    std::thread watcher;
  };

  LocalRanks() = default;
  void Watch(size_t index) ABSL_LOCKS_EXCLUDED(telling_mutex_, mutex_);
  void Kill() ABSL_LOCKS_EXCLUDED(mutex_);

  base::Mutex telling_mutex_;  // taken before mutex_
  OnFailure on_failure_ ABSL_GUARDED_BY(telling_mutex_);
  mutable base::Mutex mutex_;
  base::CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  std::vector<Running> children_;  // `ended` under the mutex
};

}  // namespace kvasir::cli
