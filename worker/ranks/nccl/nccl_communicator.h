// Owns an NCCL communicator, and a thread that watches it for asynchronous
// errors and for calls that make no progress.
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
  const Nccl* library = nullptr;  // must outlive the communicator
  // Selects the rank's GPU for the calling thread, as cudaSetDevice does. Null
  // if there is nothing to select.
  std::function<absl::Status()> use_device;
  absl::Duration connect_timeout = absl::Seconds(60);
  absl::Duration call_timeout = absl::Seconds(30);
  absl::Duration poll_interval = absl::Milliseconds(100);
  std::function<void(const absl::Status&)> on_failure;
};

// Only one thread calls the library at a time. The exception is ncclCommAbort:
// NVIDIA allows it while another call does not return (when the launch queue is
// full because a collective hangs).
//
// Owns: the communicator; a thread that checks it every poll_interval and
//   aborts it after a failure; stream marks of the rank's device.
// Threads: one thread at a time may call Enqueue; any thread may call Fail and
//   status.
// Errors: after a failure every call returns that failure. UNAVAILABLE if a
//   call makes no progress or NCCL reports that a rank is gone.
class NcclCommunicator {
 public:
  // Call it on all ranks at about the same time. Returns when all ranks are
  // connected.
  static absl::StatusOr<std::unique_ptr<NcclCommunicator>> Connect(
      const NcclCommunicatorOptions& options, const nccl::UniqueId& id);
  // Waits some seconds for the other ranks' communicators to be destroyed too.
  // After a failure it waits for ncclCommAbort instead, which may wait for
  // other ranks on the same machine (NVIDIA's documentation).
  ~NcclCommunicator();

  // Calls `call` with the communicator and the stream's handle. `call` must
  // enqueue its work and return at once. The watcher then checks that the work
  // makes progress. Work that is captured into a graph differs in two ways. An
  // error of `call` does not kill the communicator. And the caller must call
  // Watch after each launch of the graph.
  absl::Status Enqueue(
      const char* name, kernels::LaunchStream& stream,
      absl::FunctionRef<nccl::Result(nccl::CommHandle comm, void* stream)>
          call);
  // Call it after a graph with captured calls was launched: from now on the
  // stream is watched until it has passed this point. All calls of the graph
  // are watched as one call, named `name`.
  absl::Status Watch(const char* name, kernels::LaunchStream& stream);

  // Makes the watcher thread abort the communicator soon. Only the first reason
  // is kept.
  void Fail(const absl::Status& reason);
  absl::Status status() const;

 private:
  using Clock = std::chrono::steady_clock;

  // A call that has not returned from the library, or whose work is still on
  // the stream.
  struct Call {
    const char* name = "";
    Clock::time_point since;
    std::unique_ptr<kernels::StreamMark> mark;
  };

  NcclCommunicator(const NcclCommunicatorOptions& options,
                   nccl::CommHandle comm);

  // Waits until the library has finished the background work of `call`, a
  // library function that has returned.
  absl::Status WaitUntilDone(const char* call, absl::Duration timeout);
  // Returns the communicator's asynchronous error, or kInProgress while the
  // library still works in the background.
  nccl::Result AsyncError() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Records a mark on the stream after call `name`. The mark shows the watcher
  // when the stream has passed the call.
  absl::Status Mark(const char* name, kernels::LaunchStream& stream);
  absl::Status StandsStill(const char* call, absl::Duration timeout) const;
  // Like Fail, but the first failure also calls options_.on_failure if in_use_.
  void FailAndReport(const absl::Status& reason);

  // The function that thread `watcher_` runs.
  void KeepWatching();
  // Both return the failure that they find, if any. LookAtLibrary looks for an
  // asynchronous error of the library, LookAtMarks for a call whose stream
  // makes no progress.
  absl::Status LookAtLibrary();
  absl::Status LookAtMarks();
  void AbortLibrary();

  const NcclCommunicatorOptions options_;
  const nccl::Functions& functions_;

  mutable base::Mutex mutex_;
  // Signalled when a call has returned from the library.
  base::CondVar returned_;
  base::CondVar wake_;  // wakes the watcher thread
  // Null after the communicator was aborted or destroyed.
  nccl::CommHandle comm_ ABSL_GUARDED_BY(mutex_);
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  // The library call that has not returned yet, if there is one.
  std::optional<Call> calling_ ABSL_GUARDED_BY(mutex_);
  // Calls whose work is on a stream and has not completed as far as the watcher
  // knows. Only the watcher removes calls. free_ has marks to reuse for later
  // calls.
  std::deque<Call> ahead_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<kernels::StreamMark>> free_
      ABSL_GUARDED_BY(mutex_);
  // True from the end of Connect until the destructor begins. Otherwise
  // on_failure is not called.
  bool in_use_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread watcher_;
};

}  // namespace kvasir::worker
