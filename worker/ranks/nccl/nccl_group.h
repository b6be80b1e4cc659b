// A tensor-parallel group of processes on GPUs, over NCCL.
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
  // The network interface over which ranks of several hosts meet, and exchange
  // data where there is nothing faster; empty: what NCCL's own environment
  // says, or its choice. NCCL's traffic is not encrypted.
  std::string interface;
  // libnccl.so.2; none: Nccl::DefaultFiles.
  std::vector<std::string> libraries;
  // AllReduceSum in rank order: all numbers go to all ranks, (size - 1) times
  // their bytes, where NCCL's own sum sends under twice them.
  bool deterministic = false;
  // Names the rank's GPU for the calling thread, as cudaSetDevice does. Null:
  // nothing is to be named (there is one GPU, or none).
  std::function<absl::Status()> use_device;
  // Until all ranks are connected.
  absl::Duration connect_timeout = absl::Seconds(60);
  // How long a stream stands at a call. What ranks are apart is in it, and what
  // the stream has to do before.
  absl::Duration call_timeout = absl::Seconds(30);
  // How often NCCL is asked for errors, and streams for where they are.
  absl::Duration poll_interval = absl::Milliseconds(100);
  // Called once, with what killed the group, by the thread that found it,
  // before that aborts anything; not for Abort, nor once the collective is
  // being destroyed. It must not wait.
  std::function<void(const absl::Status&)> on_failure;
};

// One rank on its way into a group, as GlooGroup: ranks tell each other their
// addresses by other means, then all of them connect.
//
// The collective enqueues on a GPU's stream and returns: calls end when the
// stream has come by, and what they fail with is heard by the next call, by
// status() and by on_failure. Nobody hears of a rank that is gone but by NCCL
// (which knows it of ranks that it reaches over a network) and by waiting for
// too long: whoever knows better, by heartbeats say, calls Abort. That returns
// at once; the destructor may wait, as NVIDIA says of ncclCommAbort, until
// other ranks of the machine have given up too: a process that must end does
// not destroy a collective that is dead.
//
// What is promised of bits: NCCL says that an all-reduce leaves identical
// copies; it says nothing of their order, which may be another one with another
// release, number of ranks, size or machine, and 16-bit numbers are rounded at
// each step. Deterministic groups do not rely on it.
//
// Owns: the communicator, a thread, marks of the device that it is called for.
//   The collective outlives the rank's device.
// Threads: as Collective. Begin sets environment variables: before there are
//   threads that read them.
// Errors: INVALID_ARGUMENT, NOT_FOUND for options (also without a library that
//   fits, with every place that was tried); UNIMPLEMENTED on a CPU's stream.
class NcclGroup {
 public:
  static absl::StatusOr<std::unique_ptr<NcclGroup>> Begin(
      const NcclOptions& options);

  // A line of printable ASCII. Who knows those of all ranks passes for one.
  const std::string& address() const { return address_; }

  // Of all ranks, in their order; on all ranks at about the same time.
  // INVALID_ARGUMENT when they are not of one group, or of two releases of
  // NCCL; UNAVAILABLE when not all ranks come in time.
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
