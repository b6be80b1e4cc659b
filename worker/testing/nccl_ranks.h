// For tests of NCCL without a GPU: ranks as threads, over the fake library that
// KVASIR_FAKE_NCCL_LIBRARY names (worker/ranks/nccl/testing/fake_nccl.cc).
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

// A rank's device: the CUDA back end over a runtime without a GPU, where the
// host runs the kernels that collectives need. Outlives its collective.
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
// Communicators, with what they have enqueued, and aborts so far.
int FakeNcclLive();
int FakeNcclAborts();

// KVASIR_FAKE_NCCL, for groups that connect while it lives.
class FakeNcclFaults {
 public:
  explicit FakeNcclFaults(const std::string& faults);
  ~FakeNcclFaults();
  FakeNcclFaults(const FakeNcclFaults&) = delete;
  FakeNcclFaults& operator=(const FakeNcclFaults&) = delete;
};

// What each rank's Connect gives; `options` but for shard and libraries.
std::vector<absl::StatusOr<std::unique_ptr<Collective>>> ConnectNcclRanks(
    int64_t size, const NcclOptions& options);
// The same of a group that connects; else empty, and a failure of the test.
std::vector<std::unique_ptr<Collective>> MakeNcclRanks(
    int64_t size, const NcclOptions& options = {});

// All together: ranks wait for each other in the end.
void EndRanks(std::vector<std::unique_ptr<Collective>>* ranks);

}  // namespace kvasir::worker
