// Sums between the ranks of a tensor-parallel group.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "base/mutex.h"
#include "kernels/device/stream.h"
#include "kernels/device/workspace.h"
#include "plan/tp_shard.h"

namespace kvasir::worker {

// One rank's end of its group. All ranks make the same calls in the same order.
// Threads: one at a time.
// Errors: ABORTED when another rank gave up; the group is dead from then on.
class Collective {
 public:
  virtual ~Collective() = default;

  virtual plan::TpShard shard() const = 0;

  // Enqueues data[i] = sum over ranks of data[i], for `count` float32 numbers,
  // added in rank order: the same bits on every rank and in every run.
  virtual absl::Status AllReduceSum(kernels::Stream& stream,
                                    kernels::DevicePtr<float> data,
                                    int64_t count,
                                    kernels::Workspace& workspace) = 0;

  // Tells the other ranks that this one will make no further call.
  virtual void Abort(const absl::Status& reason) = 0;
};

// A group of one.
class SingleRank final : public Collective {
 public:
  plan::TpShard shard() const override { return {}; }
  absl::Status AllReduceSum(kernels::Stream&, kernels::DevicePtr<float>,
                            int64_t, kernels::Workspace&) override {
    return absl::OkStatus();
  }
  void Abort(const absl::Status&) override {}
};

// Ranks as threads of one process, on CPU streams.
// Owns: nothing of the ranks' memory; hands out ends that share it.
class InProcessGroup {
 public:
  static std::vector<std::unique_ptr<Collective>> Create(int64_t size);
};

}  // namespace kvasir::worker
