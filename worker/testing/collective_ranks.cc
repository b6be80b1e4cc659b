#include "worker/testing/collective_ranks.h"

#include <cmath>
#include <random>
#include <thread>
#include <utility>

#include "base/status_macros.h"
#include "base/status_matchers.h"
#include "kernels/device/read_back.h"

namespace kvasir::worker {

void OnRanks(int64_t size, const std::function<void(int64_t rank)>& body) {
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < size; ++rank) {
    threads.emplace_back([&body, rank] { body(rank); });
  }
  for (std::thread& thread : threads) thread.join();
}

std::vector<std::unique_ptr<Collective>> MakeGlooRanks(int64_t size,
                                                       GlooOptions options) {
  if (options.interface.empty()) options.interface = "lo";
  std::vector<std::unique_ptr<GlooGroup>> groups;
  std::vector<std::string> addresses;
  for (int64_t rank = 0; rank < size; ++rank) {
    options.shard = {rank, size};
    auto group = GlooGroup::Begin(options);
    KVASIR_EXPECT_OK(group);
    if (!group.ok()) return {};
    addresses.push_back((*group)->address());
    groups.push_back(*std::move(group));
  }
  std::vector<std::unique_ptr<Collective>> ranks(groups.size());
  OnRanks(size, [&](int64_t rank) {
    const auto r = static_cast<size_t>(rank);
    auto connected = groups[r]->Connect(addresses);
    KVASIR_EXPECT_OK(connected);
    if (connected.ok()) ranks[r] = *std::move(connected);
  });
  for (const auto& rank : ranks) {
    if (rank == nullptr) return {};
  }
  return ranks;
}

HostRank::HostRank(Collective* collective)
    : HostRank(collective, /*device=*/nullptr) {}

HostRank::HostRank(Collective* collective, kernels::Device* device)
    : collective_(collective),
      pool_(1),
      cpu_(&pool_),
      device_(device != nullptr ? *device : cpu_),
      stream_(device_.MakeStream()),
      workspace_(kernels::DevicePtr<void>(), 0) {}

absl::Status HostRank::Run(void* host, size_t bytes, Call call) {
  kernels::Workspace counter = kernels::Workspace::Counting();
  KVASIR_RETURN_IF_ERROR(call(nullptr, counter));
  const auto allocate = [&](size_t wanted) {
    return device_.allocator().Allocate(
        wanted + kernels::Workspace::kAlignmentBytes,
        kernels::MemoryTag::kOther);
  };
  KVASIR_ASSIGN_OR_RETURN(const auto memory, allocate(counter.peak_bytes()));
  KVASIR_ASSIGN_OR_RETURN(const auto data, allocate(bytes));
  kernels::Workspace workspace(memory.data(), memory.bytes());
  if (bytes > 0) {
    KVASIR_RETURN_IF_ERROR(kernels::Upload(*stream_, data.data(), host, bytes));
  }
  KVASIR_RETURN_IF_ERROR(call(data.data(), workspace));
  KVASIR_RETURN_IF_ERROR(stream_->Synchronize());
  KVASIR_RETURN_IF_ERROR(collective_->status());
  return bytes == 0 ? absl::OkStatus()
                    : kernels::ReadBack(*stream_, host, data.data(), bytes);
}

absl::Status HostRank::AllReduceSum(std::vector<float>* data) {
  return Run(data->data(), data->size() * sizeof(float),
             [&](kernels::DevicePtr<void> at, kernels::Workspace& workspace) {
               return collective_->AllReduceSum(
                   *stream_, at.as<float>(), static_cast<int64_t>(data->size()),
                   kernels::DType::kF32, workspace);
             });
}

absl::Status HostRank::AllReduceSum(std::vector<kernels::Bf16>* data) {
  return Run(data->data(), data->size() * sizeof(kernels::Bf16),
             [&](kernels::DevicePtr<void> at, kernels::Workspace& workspace) {
               return collective_->AllReduceSum(
                   *stream_, at.as<float>(), static_cast<int64_t>(data->size()),
                   kernels::DType::kBf16, workspace);
             });
}

absl::Status HostRank::AllGather(std::vector<float>* data, int64_t num_rows,
                                 absl::Span<const int64_t> first_columns) {
  return Run(data->data(), data->size() * sizeof(float),
             [&](kernels::DevicePtr<void> at, kernels::Workspace& workspace) {
               return collective_->AllGather(*stream_, at.as<float>(), num_rows,
                                             first_columns, workspace);
             });
}

absl::Status HostRank::Broadcast(std::string* data) {
  return Run(data->data(), data->size(),
             [&](kernels::DevicePtr<void> at, kernels::Workspace& workspace) {
               return collective_->Broadcast(
                   *stream_, at, static_cast<int64_t>(data->size()), workspace);
             });
}

std::vector<float> RankNumbers(int64_t rank, int64_t count, uint64_t seed) {
  std::mt19937_64 random(seed * 1000003 + static_cast<uint64_t>(rank));
  std::vector<float> numbers;
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t bits = random();
    const float mantissa =
        1.0f + static_cast<float>(bits % 8388608) / 8388608.0f;
    const float value =
        std::ldexp(mantissa, static_cast<int>((bits >> 24) % 29) - 14);
    numbers.push_back((bits >> 60) % 2 == 0 ? value : -value);
  }
  return numbers;
}

std::vector<float> SumOfRanks(int64_t size, int64_t count, uint64_t seed) {
  std::vector<float> sum = RankNumbers(0, count, seed);
  for (int64_t rank = 1; rank < size; ++rank) {
    const std::vector<float> numbers = RankNumbers(rank, count, seed);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += numbers[i];
  }
  return sum;
}

}  // namespace kvasir::worker
