// What the ranks of a tensor-parallel group do together.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/device/device_ptr.h"
#include "kernels/device/dtype.h"
#include "kernels/device/stream.h"
#include "kernels/device/workspace.h"
#include "plan/tp_shard.h"

namespace kvasir::worker {

// Of one rank, since its group was made.
struct CollectiveTotals {
  int64_t calls = 0;       // that were done
  int64_t sent_bytes = 0;  // to other ranks, what goes around data included
  // That calls waited for other ranks; 0 over NCCL: there a device waits.
  double waited_seconds = 0;
};

// One rank's end of its group. All ranks make the same calls, of the same
// sizes, in the same order, and have the same bits after each. A rank that goes
// ends the call that another is still in: ranks tell each other that they are
// done before one goes. Threads: calls from one at a time; Abort, status and
// totals from any.
// Errors: INVALID_ARGUMENT for sizes that cannot be, before anything is sent.
//   UNAVAILABLE when another rank is gone, cut off, or stands still for too
//   long; ABORTED when a rank gave up, this one included; INTERNAL when ranks
//   make different calls (over NCCL that is a rank that stands still). After
//   any of these three the group is dead: the data is undefined, and calls
//   return what killed it.
class Collective {
 public:
  virtual ~Collective() = default;

  virtual plan::TpShard shard() const = 0;

  // Enqueues data[i] = sum over ranks of data[i], for `count` numbers of
  // `dtype`, whatever the pointer says. Added in float32, in rank order, where
  // the group is deterministic: the same bits in every run, too. Those on CPUs
  // always are.
  virtual absl::Status AllReduceSum(kernels::Stream& stream,
                                    kernels::DevicePtr<float> data,
                                    int64_t count, kernels::DType dtype,
                                    kernels::Workspace& workspace) = 0;

  // Enqueues that every rank has all columns of data [num_rows, columns], of
  // which rank r brings [first_columns[r], first_columns[r + 1]): size() + 1
  // numbers from 0 to columns. A rank may have none.
  virtual absl::Status AllGather(kernels::Stream& stream,
                                 kernels::DevicePtr<float> data,
                                 int64_t num_rows,
                                 absl::Span<const int64_t> first_columns,
                                 kernels::Workspace& workspace) = 0;

  // Enqueues that every rank has the data [bytes] of rank 0.
  virtual absl::Status Broadcast(kernels::Stream& stream,
                                 kernels::DevicePtr<void> data, int64_t bytes,
                                 kernels::Workspace& workspace) = 0;

  // Tells the other ranks that this one will make no further call. A call that
  // is waiting ends, and so does one that a stream is at. Only the first reason
  // is told. (NCCL has no words for it: there the others hear of it by whoever
  // aborts them, or once they have waited for too long.)
  virtual void Abort(const absl::Status& reason) = 0;

  // What killed the group. To be asked once a stream was synchronized, before
  // its results are used: calls that it came by may have failed since they
  // were enqueued.
  virtual absl::Status status() const = 0;

  virtual CollectiveTotals totals() const = 0;

  // Whether calls may be enqueued on a stream that captures
  // (kernels::LaunchStream). All ranks capture the same calls, and replay them
  // in turn with all others. totals() has them when they are replayed.
  virtual bool can_be_captured() const { return false; }
  // The calls that were captured since this was asked last.
  virtual CollectiveTotals TakeCaptured() { return {}; }
  // Such calls were enqueued on the stream once more.
  virtual absl::Status Replayed(kernels::Stream&, const CollectiveTotals&) {
    return absl::OkStatus();
  }
};

// A group of one.
class SingleRank final : public Collective {
 public:
  plan::TpShard shard() const override { return {}; }
  absl::Status AllReduceSum(kernels::Stream&, kernels::DevicePtr<float>,
                            int64_t, kernels::DType,
                            kernels::Workspace&) override {
    return absl::OkStatus();
  }
  absl::Status AllGather(kernels::Stream&, kernels::DevicePtr<float>, int64_t,
                         absl::Span<const int64_t>,
                         kernels::Workspace&) override {
    return absl::OkStatus();
  }
  absl::Status Broadcast(kernels::Stream&, kernels::DevicePtr<void>, int64_t,
                         kernels::Workspace&) override {
    return absl::OkStatus();
  }
  void Abort(const absl::Status&) override {}
  absl::Status status() const override { return absl::OkStatus(); }
  CollectiveTotals totals() const override { return {}; }
  bool can_be_captured() const override { return true; }
};

}  // namespace kvasir::worker
