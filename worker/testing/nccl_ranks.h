// Test support for NCCL without a GPU: ranks as threads over the fake library
// that KVASIR_FAKE_NCCL_LIBRARY names (worker/ranks/nccl/testing/fake_nccl.cc).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/testing/fake_runtime.h"
#include "worker/collective/collective.h"
#include "worker/ranks/nccl/nccl_group.h"

namespace kvasir::worker {

// A rank's device: the CUDA back end over a runtime without a GPU. The host
// runs the kernels that collectives need. It outlives its collective.
class HostGpu {
 public:
  HostGpu();
  kernels::Device* device() { return device_.get(); }
  kernels::cuda::FakeRuntime& runtime() { return runtime_; }

 private:
  kernels::cuda::FakeRuntime runtime_;
  std::unique_ptr<kernels::CudaDevice> device_;
};
std::vector<std::unique_ptr<HostGpu>> MakeHostGpus(int64_t size);

std::vector<std::string> FakeNcclLibraries();
// The number of communicators that exist. An aborted one counts until its
// enqueued work has ended.
int FakeNcclLive();
// The number of aborts so far.
int FakeNcclAborts();

// Sets KVASIR_FAKE_NCCL for groups that connect while it lives.
class FakeNcclFaults {
 public:
  explicit FakeNcclFaults(const std::string& faults);
  ~FakeNcclFaults();
  FakeNcclFaults(const FakeNcclFaults&) = delete;
  FakeNcclFaults& operator=(const FakeNcclFaults&) = delete;
};

// The result of each rank's Connect. `options` are used except for shard and
// libraries.
std::vector<absl::StatusOr<std::unique_ptr<Collective>>> ConnectNcclRanks(
    int64_t size, const NcclOptions& options);
// Connects a group that must connect. If it does not, the test fails and the
// result is empty.
std::vector<std::unique_ptr<Collective>> MakeNcclRanks(
    int64_t size, const NcclOptions& options = {});

// Ends all ranks together, because they wait for each other at the end.
void EndRanks(std::vector<std::unique_ptr<Collective>>* ranks);

}  // namespace kvasir::worker
