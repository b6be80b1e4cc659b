// The interface for communication between the ranks of a tensor-parallel group.
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

// Counters of one rank's collective calls since the group was made.
struct CollectiveTotals {
  int64_t calls = 0;  // finished calls
  // Bytes sent to other ranks, including Gloo's overhead. An estimate with
  // NCCL, and 0 if the ranks are threads of one process.
  int64_t sent_bytes = 0;
  // Time that this rank's calls waited for other ranks. Always 0 with NCCL,
  // where the GPU waits instead of the calling thread.
  double waited_seconds = 0;
};

// Through this object, one rank communicates with the other ranks of its group.
// A collective call sums, gathers or copies data over all ranks. All ranks must
// make the same calls, with the same sizes, in the same order. After each call
// `data` has the same bits on all ranks. If a rank destroys its object while
// another rank is in a call, that call fails.
//
// Threads: one thread at a time may make calls; any thread may call Abort,
//   status and totals.
// Errors: INVALID_ARGUMENT for impossible sizes, before anything is sent.
//   UNAVAILABLE if another rank is gone, cut off, or does not reach the call in
//   time. ABORTED if any rank has called Abort. INTERNAL if ranks make
//   different calls (NCCL cannot detect this, so the call times out). After
//   UNAVAILABLE, ABORTED or INTERNAL the group is dead: the data is undefined,
//   and all later calls return the same error.
class Collective {
 public:
  virtual ~Collective() = default;

  virtual plan::TpShard shard() const = 0;

  // Enqueues data[i] = sum over all ranks of data[i], for `count` elements.
  // Their type is `dtype`, whatever the pointer's type is. A deterministic
  // group adds in float32 and in rank order, so that every run gives the same
  // bits. Groups on CPUs are always deterministic.
  virtual absl::Status AllReduceSum(kernels::Stream& stream,
                                    kernels::DevicePtr<float> data,
                                    int64_t count, kernels::DType dtype,
                                    kernels::Workspace& workspace) = 0;

  // Enqueues a gather of columns, after which every rank has all columns of
  // data [num_rows, columns]. Rank r provides columns [first_columns[r],
  // first_columns[r + 1]), possibly none. `first_columns` ascends from 0 and
  // has one element per rank, followed by the number of columns.
  virtual absl::Status AllGather(kernels::Stream& stream,
                                 kernels::DevicePtr<float> data,
                                 int64_t num_rows,
                                 absl::Span<const int64_t> first_columns,
                                 kernels::Workspace& workspace) = 0;

  // Enqueues a copy of `bytes` bytes from `data` of rank 0 to `data` of every
  // other rank.
  virtual absl::Status Broadcast(kernels::Stream& stream,
                                 kernels::DevicePtr<void> data, int64_t bytes,
                                 kernels::Workspace& workspace) = 0;

  // Announces that this rank makes no further call. Except with NCCL, waiting
  // calls, and calls that a stream is executing, then fail on all ranks, and
  // other ranks receive only the reason of the first Abort. NCCL sends nothing:
  // another rank's calls end when it calls Abort, or when they time out.
  virtual void Abort(const absl::Status& reason) = 0;

  // The error that killed the group, or OK. Check it after synchronizing the
  // stream and before using results, because a call may fail after it was
  // enqueued.
  virtual absl::Status status() const = 0;

  virtual CollectiveTotals totals() const = 0;

  // Whether calls may be captured into a graph (kernels::LaunchStream).
  // All ranks must capture the same calls, and must replay them at the
  // same position among all calls. totals() counts captured calls when
  // they are replayed.
  virtual bool can_be_captured() const { return false; }
  // Returns the totals of the calls that were captured since TakeCaptured was
  // last called.
  virtual CollectiveTotals TakeCaptured() { return {}; }
  // Adds the totals of a graph's captured calls to totals(). Call this after
  // each launch of the graph on the stream.
  virtual absl::Status Replayed(kernels::Stream&, const CollectiveTotals&) {
    return absl::OkStatus();
  }
};

// The collective of a group with one rank: its calls do nothing.
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
