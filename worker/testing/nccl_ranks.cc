#include "worker/testing/nccl_ranks.h"

#include <dlfcn.h>

#include <cstdlib>
#include <utility>

#include "base/check.h"
#include "base/status_matchers.h"
#include "base/thread_pool.h"
#include "kernels/rowwise/rows.h"
#include "worker/testing/collective_ranks.h"

namespace kvasir::worker {
namespace {

// Enqueues an op that the host runs with the CPU's reference kernel.
template <auto kReference, typename Args>
void OnHost(const Args& args, kernels::Launcher& launcher) {
  static const int kFunction = 0;
  kernels::KernelLaunch launch;
  launch.name = "on_host";
  launch.function = &kFunction;
  launch.call = [](const void*, const void* parameters) {
    base::ThreadPool pool(1);
    kernels::CpuStream stream(&pool, kernels::CpuBackend::kReference);
    kReference(*static_cast<const Args*>(parameters), stream);
  };
  launch.args = &args;
  launch.args_bytes = sizeof(args);
  launcher.Enqueue(launch);
}

kernels::DeviceOps HostOps() {
  static const kernels::DeviceOp ops[] = {
      kernels::MakeDeviceOp<kernels::GatherRowsParams>(
          "gather_rows", &OnHost<&kernels::GatherRowsReference>),
      kernels::MakeDeviceOp<kernels::SumRowsParams>(
          "sum_rows", &OnHost<&kernels::SumRowsReference>),
  };
  return {ops, std::size(ops)};
}

int Ask(const char* function) {
  void* const library =
      dlopen(FakeNcclLibraries()[0].c_str(), RTLD_NOW | RTLD_LOCAL);
  KVASIR_CHECK(library != nullptr);
  auto* const found = reinterpret_cast<int (*)()>(dlsym(library, function));
  KVASIR_CHECK(found != nullptr);
  return found();
}

}  // namespace

HostGpu::HostGpu() {
  runtime_.OnRun([](const kernels::KernelLaunch& launch) {
    launch.call(launch.function, launch.args);
  });
  auto made = kernels::CudaDevice::Make({}, &runtime_, HostOps());
  KVASIR_CHECK(made.ok());
  device_ = *std::move(made);
}

std::vector<std::unique_ptr<HostGpu>> MakeHostGpus(int64_t size) {
  std::vector<std::unique_ptr<HostGpu>> gpus;
  for (int64_t i = 0; i < size; ++i) {
    gpus.push_back(std::make_unique<HostGpu>());
  }
  return gpus;
}

std::vector<std::string> FakeNcclLibraries() {
  const char* const file = std::getenv("KVASIR_FAKE_NCCL_LIBRARY");
  KVASIR_CHECK(file != nullptr);
  return {file};
}
int FakeNcclLive() { return Ask("KvasirFakeNcclLive"); }
int FakeNcclAborts() { return Ask("KvasirFakeNcclAborts"); }

FakeNcclFaults::FakeNcclFaults(const std::string& faults) {
  setenv("KVASIR_FAKE_NCCL", faults.c_str(), 1);
}
FakeNcclFaults::~FakeNcclFaults() { unsetenv("KVASIR_FAKE_NCCL"); }

std::vector<absl::StatusOr<std::unique_ptr<Collective>>> ConnectNcclRanks(
    int64_t size, const NcclOptions& options) {
  std::vector<std::unique_ptr<NcclGroup>> groups;
  std::vector<std::string> addresses;
  for (int64_t rank = 0; rank < size; ++rank) {
    NcclOptions own = options;
    own.shard = {rank, size};
    own.libraries = FakeNcclLibraries();
    auto group = NcclGroup::Begin(own);
    KVASIR_EXPECT_OK(group);
    if (!group.ok()) return {};
    addresses.push_back((*group)->address());
    groups.push_back(*std::move(group));
  }
  std::vector<absl::StatusOr<std::unique_ptr<Collective>>> ranks(groups.size());
  OnRanks(size, [&](int64_t rank) {
    const auto r = static_cast<size_t>(rank);
    ranks[r] = std::move(*groups[r]).Connect(addresses);
  });
  return ranks;
}

std::vector<std::unique_ptr<Collective>> MakeNcclRanks(
    int64_t size, const NcclOptions& options) {
  std::vector<std::unique_ptr<Collective>> ranks;
  for (auto& rank : ConnectNcclRanks(size, options)) {
    KVASIR_EXPECT_OK(rank);
    if (!rank.ok()) return {};
    ranks.push_back(*std::move(rank));
  }
  return ranks;
}

void EndRanks(std::vector<std::unique_ptr<Collective>>* ranks) {
  OnRanks(static_cast<int64_t>(ranks->size()),
          [&](int64_t rank) { (*ranks)[static_cast<size_t>(rank)] = nullptr; });
  ranks->clear();
}

}  // namespace kvasir::worker
