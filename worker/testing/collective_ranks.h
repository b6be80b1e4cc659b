// Test support for collectives: ranks that are threads, and collective calls on
// host vectors.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "base/thread_pool.h"
#include "kernels/device/device.h"
#include "kernels/device/device_ptr.h"
#include "kernels/device/dtype.h"
#include "kernels/device/stream.h"
#include "kernels/device/workspace.h"
#include "worker/collective/collective.h"
#include "worker/ranks/gloo/gloo_group.h"

namespace kvasir::worker {

// Runs `body` for each rank on a separate thread. Returns when all calls have
// returned.
void OnRanks(int64_t size, const std::function<void(int64_t rank)>& body);

// Connects a group of ranks over Gloo and returns their collectives.
// `options.shard` is ignored. Without an interface the group uses loopback. If
// it does not connect, the test fails and the result is empty.
std::vector<std::unique_ptr<Collective>> MakeGlooRanks(
    int64_t size, GlooOptions options = {});

// Makes one rank's collective calls on host vectors, on its own stream. A call
// is complete when it returns.
class HostRank {
 public:
  // A rank on the CPU.
  explicit HostRank(Collective* collective);
  HostRank(Collective* collective, kernels::Device* device);

  absl::Status AllReduceSum(std::vector<float>* data);
  absl::Status AllReduceSum(std::vector<kernels::Bf16>* data);
  absl::Status AllGather(std::vector<float>* data, int64_t num_rows,
                         absl::Span<const int64_t> first_columns);
  absl::Status Broadcast(std::string* data);

  Collective& collective() { return *collective_; }
  kernels::Stream& stream() { return *stream_; }
  // A workspace without memory, for calls that need none.
  kernels::Workspace& workspace() { return workspace_; }

 private:
  using Call = absl::FunctionRef<absl::Status(kernels::DevicePtr<void> data,
                                              kernels::Workspace& workspace)>;
  absl::Status Run(void* host, size_t bytes, Call call);

  Collective* const collective_;
  base::ThreadPool pool_;
  kernels::CpuDevice cpu_;
  kernels::Device& device_;
  const std::unique_ptr<kernels::Stream> stream_;
  kernels::Workspace workspace_;
};

// Returns the data that a rank passes to one call. The sum over all ranks has
// different bits if the ranks are added in another order.
std::vector<float> RankNumbers(int64_t rank, int64_t count, uint64_t seed);
// The sum of RankNumbers over ranks, in rank order.
std::vector<float> SumOfRanks(int64_t size, int64_t count, uint64_t seed);

}  // namespace kvasir::worker
