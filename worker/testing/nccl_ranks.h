// Test support for NCCL without a GPU: ranks that are threads and use the fake
// library in KVASIR_FAKE_NCCL_LIBRARY (worker/ranks/nccl/testing/fake_nccl.cc).
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

// A rank's device: the CUDA back end on a fake CUDA runtime. The host runs the
// kernels that collectives need. Must outlive the rank's collective.
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
// The number of communicators in the fake library. An aborted communicator
// counts until its enqueued work has ended.
int FakeNcclLive();
// The number of ncclCommAbort calls so far.
int FakeNcclAborts();

// Sets KVASIR_FAKE_NCCL to `faults` as long as this object exists. The faults
// apply to groups that connect in this time.
class FakeNcclFaults {
 public:
  explicit FakeNcclFaults(const std::string& faults);
  ~FakeNcclFaults();
  FakeNcclFaults(const FakeNcclFaults&) = delete;
  FakeNcclFaults& operator=(const FakeNcclFaults&) = delete;
};

// Connects a group and returns the result of each rank's Connect. The shard and
// libraries of `options` are ignored.
std::vector<absl::StatusOr<std::unique_ptr<Collective>>> ConnectNcclRanks(
    int64_t size, const NcclOptions& options);
// Connects a group that must connect. If it does not, the test fails and the
// result is empty.
std::vector<std::unique_ptr<Collective>> MakeNcclRanks(
    int64_t size, const NcclOptions& options = {});

// Destroys all ranks' collectives, each on a thread, because their destructors
// wait for each other.
void EndRanks(std::vector<std::unique_ptr<Collective>>* ranks);

}  // namespace kvasir::worker
