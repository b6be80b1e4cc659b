// A tensor-parallel group of GPU processes that communicate through NCCL.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "plan/tp_shard.h"
#include "worker/collective/collective.h"
#include "worker/ranks/nccl/nccl_address.h"
#include "worker/ranks/nccl/nccl_library.h"

namespace kvasir::worker {

struct NcclOptions {
  plan::TpShard shard;
  // The network interface over which ranks on different hosts connect, and
  // exchange data if there is no faster link. Empty: NCCL's environment
  // variables or NCCL itself choose it. NCCL's traffic is not encrypted.
  std::string interface;
  // Paths of libnccl.so.2 to try, in order. Empty: Nccl::DefaultFiles.
  std::vector<std::string> libraries;
  // True: AllReduceSum adds in rank order. That costs bandwidth: each rank
  // receives (size - 1) times the bytes of `data`. For NCCL's own sum, a rank
  // sends less than twice the bytes of `data`.
  bool deterministic = false;
  // Selects the rank's GPU for the calling thread, as cudaSetDevice does. Null
  // if there is nothing to select (one GPU, or none).
  std::function<absl::Status()> use_device;
  // How long Connect waits until all ranks are connected.
  absl::Duration connect_timeout = absl::Seconds(60);
  // The group fails if a stream makes no progress at a call for this long. That
  // time includes waiting for ranks that reach the call later, and earlier work
  // on the stream.
  absl::Duration call_timeout = absl::Seconds(30);
  // The interval at which NCCL is checked for errors, and streams for progress.
  absl::Duration poll_interval = absl::Milliseconds(100);
  // Called once with the error that killed the group, by the thread that found
  // it, before that thread aborts the communicator. Not called after Abort, nor
  // while the collective is destroyed. It must not block.
  std::function<void(const absl::Status&)> on_failure;
};

// One rank of a group that is not connected yet. It is used like GlooGroup:
// ranks exchange their addresses by other means, then all of them connect.
//
// A call of the collective enqueues work on a GPU's stream and returns. The
// work is done when the stream has passed it. If the work fails, the next call,
// status() and on_failure report the error. If a rank is gone, the others
// notice that through NCCL (if they reach the rank over a network) or by a
// timeout. A caller that knows it sooner, for example by heartbeats, should
// call Abort, which returns at once. The destructor calls ncclCommAbort after a
// failure, which may wait for other ranks on the same machine (NVIDIA's
// documentation). So a process that must end should exit without destroying a
// collective whose group is dead.
//
// Reproducibility: after an all-reduce of NCCL all ranks have identical bits.
// But the order of addition may change with NCCL's release, the number of
// ranks, the size or the machine. Also, 16-bit sums are rounded after each
// addition. Deterministic groups therefore do not use NCCL's sum.
//
// Owns: the communicator, a thread, and stream marks, which may outlive the
//   rank's device (kernels::StreamMark).
// Threads: see Collective. Begin sets environment variables, so call it before
//   there are threads that read them.
// Errors: INVALID_ARGUMENT or NOT_FOUND if an option is wrong. NOT_FOUND with
//   every place that was tried if there is no usable library. UNIMPLEMENTED if
//   a call's stream belongs to a CPU.
class NcclGroup {
 public:
  static absl::StatusOr<std::unique_ptr<NcclGroup>> Begin(
      const NcclOptions& options);

  // One line of printable ASCII. It is a secret: a process that knows the
  // addresses of all ranks can pose as a rank.
  const std::string& address() const { return address_; }

  // Call it on all ranks at about the same time, with the addresses of all
  // ranks in rank order. INVALID_ARGUMENT if the ranks do not belong to one
  // group or have different releases of NCCL. UNAVAILABLE if not all ranks
  // connect within connect_timeout.
  absl::StatusOr<std::unique_ptr<Collective>> Connect(
      absl::Span<const std::string> addresses) &&;

 private:
  NcclGroup(const NcclOptions& options, std::unique_ptr<Nccl> library,
            const NcclAddress& own);

  const NcclOptions options_;
  std::unique_ptr<Nccl> library_;
  const NcclAddress own_;
  const std::string address_;
};

}  // namespace kvasir::worker
