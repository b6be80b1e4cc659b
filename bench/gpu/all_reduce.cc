#include "bench/gpu/all_reduce.h"

#include <thread>
#include <utility>

#include "base/status_macros.h"
#include "bench/paired.h"
#include "kernels/device/dtype.h"
#include "kernels/device/stream.h"
#include "kernels/device/workspace.h"
#include "worker/ranks/nccl/nccl_group.h"

namespace kvasir::bench {
namespace {

// Runs all rounds on one rank and returns its times.
absl::StatusOr<std::vector<double>> TimeRank(
    const AllReduceOptions& options, kernels::Device& device,
    kernels::LaunchStream& stream, std::unique_ptr<worker::NcclGroup> group,
    const std::vector<std::string>& addresses) {
  KVASIR_ASSIGN_OR_RETURN(const auto ranks,
                          std::move(*group).Connect(addresses));
  KVASIR_ASSIGN_OR_RETURN(
      const kernels::DeviceBuffer data,
      device.allocator().Allocate(static_cast<size_t>(options.bytes),
                                  kernels::MemoryTag::kOther));
  kernels::Workspace none(nullptr, 0);
  std::vector<double> seconds;
  for (int64_t round = -1; round < options.rounds; ++round) {
    absl::Status status;
    const double took = SecondsOf([&] {
      for (int64_t call = 0; call < options.calls && status.ok(); ++call) {
        status = ranks->AllReduceSum(
            stream, data.as<float>(),
            options.bytes / kernels::DTypeBytes(kernels::DType::kBf16),
            kernels::DType::kBf16, none);
      }
      if (status.ok()) status = stream.Synchronize();
    });
    KVASIR_RETURN_IF_ERROR(status);
    KVASIR_RETURN_IF_ERROR(ranks->status());
    if (round >= 0) {
      seconds.push_back(took / static_cast<double>(options.calls));
    }
  }
  return seconds;
}

}  // namespace

absl::StatusOr<std::vector<double>> TimeAllReduces(
    const AllReduceOptions& options,
    absl::Span<const std::unique_ptr<kernels::Device>> devices) {
  const auto size = static_cast<int64_t>(devices.size());
  std::vector<std::unique_ptr<kernels::Stream>> streams;
  std::vector<std::unique_ptr<worker::NcclGroup>> groups;
  std::vector<std::string> addresses;
  for (int64_t rank = 0; rank < size; ++rank) {
    streams.push_back(devices[static_cast<size_t>(rank)]->MakeStream());
    auto& stream = static_cast<kernels::LaunchStream&>(*streams.back());
    KVASIR_ASSIGN_OR_RETURN(
        auto group,
        worker::NcclGroup::Begin({.shard = {rank, size},
                                  .libraries = options.libraries,
                                  .use_device = [&stream] {
                                    return stream.LibraryHandle().status();
                                  }}));
    addresses.push_back(group->address());
    groups.push_back(std::move(group));
  }
  std::vector<absl::StatusOr<std::vector<double>>> results(devices.size());
  std::vector<std::thread> threads;
  for (size_t r = 0; r < devices.size(); ++r) {
    threads.emplace_back([&, r] {
      results[r] = TimeRank(options, *devices[r],
                            static_cast<kernels::LaunchStream&>(*streams[r]),
                            std::move(groups[r]), addresses);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& result : results) KVASIR_RETURN_IF_ERROR(result.status());
  return results[0];
}

}  // namespace kvasir::bench
