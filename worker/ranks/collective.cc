#include "worker/ranks/collective.h"

#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"

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

class InProcessCollective final : public Collective {
 public:
  // shared_ptr: the last rank to go frees the group.
  InProcessCollective(std::shared_ptr<SharedGroup> group, int64_t rank)
      : group_(std::move(group)), rank_(rank) {}

  plan::TpShard shard() const override { return {rank_, group_->size()}; }

  absl::Status AllReduceSum(kernels::Stream& stream, float* data, int64_t count,
                            kernels::Workspace& workspace) override {
    KVASIR_CHECK(stream.device() == kernels::DeviceKind::kCpu);
    kernels::Workspace::Scope scope(&workspace);
    float* const sum = workspace.Take<float>(count);
    KVASIR_RETURN_IF_ERROR(workspace.status());
    if (workspace.counting()) return absl::OkStatus();
    KVASIR_RETURN_IF_ERROR(group_->Arrive(rank_, data));
    const size_t bytes = static_cast<size_t>(count) * sizeof(float);
    std::memcpy(sum, group_->data(0), bytes);
    for (int64_t rank = 1; rank < group_->size(); ++rank) {
      const float* const other = group_->data(rank);
      for (int64_t i = 0; i < count; ++i) sum[i] += other[i];
    }
    // Nobody writes before everybody has read.
    KVASIR_RETURN_IF_ERROR(group_->Arrive(rank_, data));
    std::memcpy(data, sum, bytes);
    return absl::OkStatus();
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
