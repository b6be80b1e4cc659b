#include "worker/ranks/collective.h"

#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/device/dispatch.h"

namespace kvasir::worker {
namespace {

// What the ranks of one process share.
class SharedGroup {
 public:
  explicit SharedGroup(int64_t size)
      : size_(size), data_(static_cast<size_t>(size), nullptr) {}

  int64_t size() const { return size_; }

  // Publishes this rank's data and returns when every rank has.
  absl::Status Arrive(int64_t rank, const float* data) {
    base::MutexLock lock(&mutex_);
    data_[static_cast<size_t>(rank)] = data;
    ++arrived_;
    if (arrived_ == size_) {
      arrived_ = 0;
      ++generation_;
      condition_.SignalAll();
      return aborted_;
    }
    const uint64_t generation = generation_;
    while (generation_ == generation && aborted_.ok()) {
      condition_.Wait(&mutex_);
    }
    return aborted_;
  }

  // Of another rank, between two calls of Arrive.
  const float* data(int64_t rank) {
    base::MutexLock lock(&mutex_);
    return data_[static_cast<size_t>(rank)];
  }

  void Abort(int64_t rank, const absl::Status& reason) {
    base::MutexLock lock(&mutex_);
    if (aborted_.ok()) {
      aborted_ = absl::AbortedError(absl::StrCat(
          "tensor-parallel rank ", rank, " gave up: ", reason.message()));
    }
    condition_.SignalAll();
  }

 private:
  const int64_t size_;

  base::Mutex mutex_;
  base::CondVar condition_;
  std::vector<const float*> data_ ABSL_GUARDED_BY(mutex_);
  int64_t arrived_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t generation_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status aborted_ ABSL_GUARDED_BY(mutex_);
};

// One rank's sum. The status is the host's.
template <template <typename> class Ptr>
struct SumParamsIn {
  Ptr<float> data = nullptr;  // [count]
  Ptr<float> sum = nullptr;   // [count], scratch
  int64_t count = 0;
  SharedGroup* group = nullptr;
  int64_t rank = 0;
  absl::Status* status = nullptr;

  template <typename Visit>
  void ForPointers(const Visit& visit) const {
    visit(data, sum);
  }
};
using SumParams = SumParamsIn<kernels::DevicePtr>;
using SumArgs = SumParamsIn<kernels::LaunchPtr>;

// The memory of every rank is open between the two arrivals of all.
absl::Status SumOfRanks(const SumArgs& args) {
  KVASIR_RETURN_IF_ERROR(args.group->Arrive(args.rank, args.data));
  const size_t bytes = static_cast<size_t>(args.count) * sizeof(float);
  std::memcpy(args.sum, args.group->data(0), bytes);
  for (int64_t rank = 1; rank < args.group->size(); ++rank) {
    const float* const other = args.group->data(rank);
    for (int64_t i = 0; i < args.count; ++i) args.sum[i] += other[i];
  }
  // Nobody writes before everybody has read.
  KVASIR_RETURN_IF_ERROR(args.group->Arrive(args.rank, args.data));
  std::memcpy(args.data, args.sum, bytes);
  return absl::OkStatus();
}

void AllReduceSumCpu(const SumArgs& args, kernels::CpuStream&) {
  *args.status = SumOfRanks(args);
}

constexpr kernels::OpKernels<SumParams> kAllReduceSum = {
    "all_reduce_sum", &AllReduceSumCpu, &AllReduceSumCpu};

class InProcessCollective final : public Collective {
 public:
  // shared_ptr: the last rank to go frees the group.
  InProcessCollective(std::shared_ptr<SharedGroup> group, int64_t rank)
      : group_(std::move(group)), rank_(rank) {}

  plan::TpShard shard() const override { return {rank_, group_->size()}; }

  absl::Status AllReduceSum(kernels::Stream& stream,
                            kernels::DevicePtr<float> data, int64_t count,
                            kernels::Workspace& workspace) override {
    kernels::Workspace::Scope scope(&workspace);
    const kernels::DevicePtr<float> sum = workspace.Take<float>(count);
    KVASIR_RETURN_IF_ERROR(workspace.status());
    if (workspace.counting()) {
      return kernels::CheckServed(kAllReduceSum, stream);
    }
    absl::Status status;
    KVASIR_RETURN_IF_ERROR(kernels::Launch(
        kAllReduceSum, stream,
        SumParams{data, sum, count, group_.get(), rank_, &status}));
    return status;
  }

  void Abort(const absl::Status& reason) override {
    group_->Abort(rank_, reason);
  }

 private:
  const std::shared_ptr<SharedGroup> group_;
  const int64_t rank_;
};

}  // namespace

std::vector<std::unique_ptr<Collective>> InProcessGroup::Create(int64_t size) {
  auto group = std::make_shared<SharedGroup>(size);
  std::vector<std::unique_ptr<Collective>> ranks;
  for (int64_t rank = 0; rank < size; ++rank) {
    ranks.push_back(std::make_unique<InProcessCollective>(group, rank));
  }
  return ranks;
}

}  // namespace kvasir::worker
