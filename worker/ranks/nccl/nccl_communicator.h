// An NCCL communicator, and a thread that watches it for late errors and for
// ranks that stand still.
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "kernels/device/stream.h"
#include "plan/tp_shard.h"
#include "worker/ranks/nccl/nccl_library.h"

namespace kvasir::worker {

struct NcclCommunicatorOptions {
  plan::TpShard shard;
  const Nccl* library = nullptr;  // outlives the communicator
  // Selects the rank's GPU for the calling thread, as cudaSetDevice does. Null
  // if there is nothing to select.
  std::function<absl::Status()> use_device;
  absl::Duration connect_timeout = absl::Seconds(60);
  absl::Duration call_timeout = absl::Seconds(30);
  absl::Duration poll_interval = absl::Milliseconds(100);
  std::function<void(const absl::Status&)> on_failure;
};

// Only one thread calls the library at a time. The exception is ncclCommAbort,
// which NVIDIA allows beside a call that does not return (when the launch queue
// is full after a collective that hangs).
//
// Owns: the communicator; a thread that checks it every poll_interval and
//   aborts it; stream marks of its device.
// Threads: Enqueue from one at a time; Fail and status from any.
// Errors: after a failure every call returns the failure. UNAVAILABLE if a rank
//   stands still or NCCL reports that one is gone.
class NcclCommunicator {
 public:
  // Call it on all ranks at about the same time. Returns when all ranks are
  // there.
  static absl::StatusOr<std::unique_ptr<NcclCommunicator>> Connect(
      const NcclCommunicatorOptions& options, const nccl::UniqueId& id);
  // Waits some seconds for the other ranks to be destroyed too. If the
  // communicator is dead, it waits for ncclCommAbort instead, which may wait
  // for other ranks of the same machine, as NVIDIA says.
  ~NcclCommunicator();

  // Calls `call` with the communicator and the stream's handle; it must enqueue
  // and return at once. While a stream captures, an error of `call` does not
  // kill the communicator, and the call is not watched: the caller that replays
  // it watches it.
  absl::Status Enqueue(
      const char* name, kernels::LaunchStream& stream,
      absl::FunctionRef<nccl::Result(nccl::CommHandle comm, void* stream)>
          call);
  // Watches the stream up to this point, after captured calls were replayed.
  // All of them count as one call.
  absl::Status Watch(const char* name, kernels::LaunchStream& stream);

  // Lets the watcher abort the communicator soon. Only the first reason is
  // kept.
  void Fail(const absl::Status& reason);
  absl::Status status() const;

 private:
  using Clock = std::chrono::steady_clock;

  // A call that is inside the library, or whose work is on the stream.
  struct Call {
    const char* name = "";
    Clock::time_point since;
    std::unique_ptr<kernels::StreamMark> mark;
  };

  NcclCommunicator(const NcclCommunicatorOptions& options,
                   nccl::CommHandle comm);

  // Waits until the library has finished the work that it continues after a
  // call returned.
  absl::Status WaitUntilDone(const char* call, absl::Duration timeout);
  // Error of the communicator, or of work that the library continues in the
  // background.
  nccl::Result AsyncError() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Marks the stream after a call.
  absl::Status Mark(const char* name, kernels::LaunchStream& stream);
  absl::Status StandsStill(const char* call) const;
  // Like Fail, but calls on_failure first.
  void FailAndReport(const absl::Status& reason);

  // The body of `watcher_`.
  void KeepWatching();
  // LookAtLibrary and LookAtMarks return the failure that they find.
  absl::Status LookAtLibrary();
  absl::Status LookAtMarks();
  void AbortLibrary();

  const NcclCommunicatorOptions options_;
  const nccl::Functions& functions_;

  mutable base::Mutex mutex_;
  base::CondVar returned_;  // a call returned from the library
  base::CondVar wake_;      // wakes the watcher
  // Null after it was aborted or destroyed.
  nccl::CommHandle comm_ ABSL_GUARDED_BY(mutex_);
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  // The call that a thread is in at present.
  std::optional<Call> calling_ ABSL_GUARDED_BY(mutex_);
  // Calls whose work is on a stream, as far as the watcher knows; only the
  // watcher removes them. free_ has marks for the next ones.
  std::deque<Call> ahead_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<kernels::StreamMark>> free_
      ABSL_GUARDED_BY(mutex_);
  // True between Connect and the destructor. These two report errors
  // themselves.
  bool in_use_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread watcher_;
};

}  // namespace kvasir::worker
