// Starts and watches the other ranks of this host, which are child processes.
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

// The data that a rank receives through a pipe from the process that started
// it. It is not passed in flags, because all users of the machine could read
// the secret there.
struct JoinInfo {
  std::string leader;
  std::string secret;
  LocalShare local;
};

// Owns: the child processes, and one thread for each child. The destructor
//   ends the children. The kernel also kills them if the thread that started
//   them ends.
// Threads: one thread calls Start, Send, End and the destructor; any thread may
//   call the other methods.
class LocalRanks {
 public:
  struct Child {
    int rank = 0;
    // the arguments with which this program is started: "rank", ...
    std::vector<std::string> arguments;
  };
  // Called for each child that does not end with exit code 0, with an error
  // like "rank 1 (pid 17) was killed by signal 9". Each child has its own
  // thread for this call.
  using OnFailure = std::function<void(const absl::Status& why)>;

  // Starts this program once for each child, with --join-fd added to the
  // child's arguments. The children do not get the environment variables
  // KVASIR_*, because the arguments have their values. UNAVAILABLE if a child
  // cannot be started.
  static absl::StatusOr<std::unique_ptr<LocalRanks>> Start(
      const std::vector<Child>& children);
  // Ends the children.
  ~LocalRanks();

  // Sends `info` to the children, each with its own LocalShare. Call it once,
  // soon after Start, because the children wait for it.
  absl::Status Send(const JoinInfo& info, OnFailure on_failure)
      ABSL_LOCKS_EXCLUDED(reporting_mutex_, mutex_);

  // After this, on_failure is not called any more. Waits for a running call
  // to end.
  void StopReporting() ABSL_LOCKS_EXCLUDED(reporting_mutex_, mutex_);

  // Waits at most `timeout` for all children to end. Returns true if all
  // have ended.
  bool WaitEnded(absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mutex_);
  // The error of the last child that failed before End; OK if there was none.
  absl::Status failure() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Waits two seconds for the remaining children to end, and then kills them.
  // Their failures are not reported.
  void End() ABSL_LOCKS_EXCLUDED(mutex_);

  // Call this in a child. It receives the JoinInfo, sets the process's name,
  // and asks the kernel to kill this process when the parent's thread ends.
  // UNAVAILABLE if the parent is gone or sent no valid data.
  static absl::StatusOr<JoinInfo> ReadJoinInfo(int join_fd);
  // Call this in a child that ends because the leader is lost. It kills the
  // parent if the parent is stopped (SIGSTOP). Otherwise the parent would
  // not notice that this rank is gone, and its clients would wait until
  // their deadlines.
  static void KillStoppedParent();

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
  std::vector<Running> children_;  // mutex_ guards the field `ended`
};

}  // namespace kvasir::cli
