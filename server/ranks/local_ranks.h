// The ranks of a group that this process starts on its host.
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

// The data that a rank receives by a pipe from the process that started it,
// because every user of the machine can read its flags.
struct JoinInfo {
  std::string leader;
  std::string secret;
  LocalShare local;
};

// Owns: the child processes, and a thread for each. No child outlives this
// object; the kernel ends it if the thread that started it ends.
// Threads: Start, Send, End and the destructor from one thread; the rest from
// any.
class LocalRanks {
 public:
  struct Child {
    int rank = 0;
    // arguments of this program: "rank", ...
    std::vector<std::string> arguments;
  };
  // Called from a separate thread for each child that does not end with exit
  // code 0: "rank 1 (pid 17) was killed by signal 9".
  using OnFailure = std::function<void(const absl::Status& why)>;

  // Starts this program once for each child, with --join-fd added to its
  // arguments. The variables KVASIR_* are removed, because their values are in
  // the arguments. UNAVAILABLE with the system's reason.
  static absl::StatusOr<std::unique_ptr<LocalRanks>> Start(
      const std::vector<Child>& children);
  // Ends the children.
  ~LocalRanks();

  // Sends `info` to the children, with each child's own place on the host. Call
  // it once and soon, because the children wait for it.
  absl::Status Send(const JoinInfo& info, OnFailure on_failure)
      ABSL_LOCKS_EXCLUDED(reporting_mutex_, mutex_);

  // From now on on_failure is not called; returns after a running call has
  // ended.
  void StopReporting() ABSL_LOCKS_EXCLUDED(reporting_mutex_, mutex_);

  // Waits for all children to end; false after `timeout`.
  bool WaitEnded(absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mutex_);
  // The failure of the child that failed last before End; OK if none failed.
  absl::Status failure() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Gives the remaining children a moment to end, then kills them. Failures are
  // not reported any more.
  void End() ABSL_LOCKS_EXCLUDED(mutex_);

  // For a child: receives its data, sets the process's name, and makes the
  // kernel kill it with its parent's thread. UNAVAILABLE if the parent is gone.
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
  void Watch(size_t index) ABSL_LOCKS_EXCLUDED(reporting_mutex_, mutex_);
  void Kill() ABSL_LOCKS_EXCLUDED(mutex_);

  base::Mutex reporting_mutex_;  // taken before mutex_
  OnFailure on_failure_ ABSL_GUARDED_BY(reporting_mutex_);
  mutable base::Mutex mutex_;
  base::CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  std::vector<Running> children_;  // `ended` under the mutex
};

}  // namespace kvasir::cli
