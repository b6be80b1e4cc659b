// A communicator of NCCL, and what watches it: errors that come later, ranks
// that stand still.
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
  // Names the rank's GPU for the calling thread, as cudaSetDevice does. Null
  // where there is nothing to name.
  std::function<absl::Status()> use_device;
  absl::Duration connect_timeout = absl::Seconds(60);
  absl::Duration call_timeout = absl::Seconds(30);
  absl::Duration poll_interval = absl::Milliseconds(100);
  std::function<void(const absl::Status&)> on_failure;
};

// The library is called by one thread at a time; only ncclCommAbort may come
// beside a call that does not return (a full queue of launches behind a
// collective that hangs), as NVIDIA allows.
//
// Owns: the communicator, a thread that looks at it each poll_interval and
//   aborts it, marks of the device that it was called for.
// Threads: Enqueue from one at a time; Fail and status from any.
// Errors: what the communicator died of, from every call. UNAVAILABLE where a
//   rank stands still or NCCL says that one is gone.
class NcclCommunicator {
 public:
  // Returns when all ranks are there; at about the same time on each.
  static absl::StatusOr<std::unique_ptr<NcclCommunicator>> Connect(
      const NcclCommunicatorOptions& options, const nccl::UniqueId& id);
  // Waits for the other ranks to come here too, for some seconds, unless it is
  // dead: then for ncclCommAbort, of which NVIDIA says that it may wait for
  // ranks of the same machine.
  ~NcclCommunicator();

  // `call` enqueues on the stream whose handle it gets, and returns at once. On
  // a stream that captures what it is refused kills nothing, and nobody waits
  // for what is behind it: that is for who replays it.
  absl::Status Enqueue(
      const char* name, kernels::LaunchStream& stream,
      absl::FunctionRef<nccl::Result(nccl::CommHandle comm, void* stream)>
          call);
  // Watches the stream up to here, where captured calls were replayed: all of
  // them as one.
  absl::Status Watch(const char* name, kernels::LaunchStream& stream);

  // Has the communicator aborted, soon; the first reason is kept.
  void Fail(const absl::Status& reason);
  absl::Status status() const;

 private:
  using Clock = std::chrono::steady_clock;

  // A call of the library, or what is behind it on the stream.
  struct Call {
    const char* name = "";
    Clock::time_point since;
    std::unique_ptr<kernels::StreamMark> mark;
  };

  NcclCommunicator(const NcclCommunicatorOptions& options,
                   nccl::CommHandle comm);

  // Until the library has done what it goes on with behind a call.
  absl::Status WaitUntilDone(const char* call, absl::Duration timeout);
  // Of the communicator, or of what the library goes on with.
  nccl::Result AsyncError() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Marks the stream behind a call.
  absl::Status Mark(const char* name, kernels::LaunchStream& stream);
  absl::Status StandsStill(const char* call) const;
  // As Fail, and tells on_failure first.
  void FailAndTell(const absl::Status& reason);

  // The body of `watcher_`.
  void KeepWatching();
  // What it finds.
  absl::Status LookAtLibrary();
  absl::Status LookAtMarks();
  void AbortLibrary();

  const NcclCommunicatorOptions options_;
  const nccl::Functions& functions_;

  mutable base::Mutex mutex_;
  base::CondVar returned_;  // a call of the library
  base::CondVar wake_;      // the watcher
  // Null once it is aborted or destroyed.
  nccl::CommHandle comm_ ABSL_GUARDED_BY(mutex_);
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  // What a thread is in the library with.
  std::optional<Call> calling_ ABSL_GUARDED_BY(mutex_);
  // That a stream has not come by as far as the watcher knows, which alone
  // takes them out; and marks for the next.
  std::deque<Call> ahead_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<kernels::StreamMark>> free_
      ABSL_GUARDED_BY(mutex_);
  // Between Connect and the destructor, which both tell themselves.
  bool in_use_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread watcher_;
};

}  // namespace kvasir::worker
