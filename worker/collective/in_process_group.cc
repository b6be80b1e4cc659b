#include "worker/collective/in_process_group.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "worker/collective/cpu_collective.h"

namespace kvasir::worker {
namespace {

// A rank's call, with the memory that the other ranks may read during the call.
struct Offer {
  CollectiveKind kind = CollectiveKind::kAllReduceSum;
  int64_t bytes = 0;
  const void* data = nullptr;
  absl::Span<const int64_t> first_columns;  // set only for AllGather
};

// The state that the ranks of a group share.
class SharedGroup {
 public:
  explicit SharedGroup(int64_t size)
      : size_(size), offers_(static_cast<size_t>(size)) {}

  int64_t size() const { return size_; }

  // Waits until every rank has arrived. Then every rank may read the memory
  // that the others offer, and no rank may write it, until all ranks have
  // called Leave.
  absl::Status Arrive(int64_t rank, const Offer& offer) {
    base::MutexLock lock(&mutex_);
    if (!failure_.ok()) return failure_;
    offers_[static_cast<size_t>(rank)] = offer;
    const uint64_t meeting = meetings_;
    if (++here_ == size_) {
      Meet();
    }
    while (meetings_ == meeting && failure_.ok()) condition_.Wait(&mutex_);
    // If all ranks have arrived, return OK even if the group has failed
    // meanwhile: the other ranks wait in Leave until this rank calls Leave,
    // too.
    return meetings_ == meeting ? failure_ : absl::OkStatus();
  }

  void Leave() {
    base::MutexLock lock(&mutex_);
    const uint64_t meeting = meetings_;
    if (++here_ == size_) {
      Meet();
    }
    while (meetings_ == meeting) condition_.Wait(&mutex_);
  }

  // Returns what a rank offers. Valid between Arrive and Leave.
  const Offer& offer(int64_t rank) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    return offers_[static_cast<size_t>(rank)];
  }

  void Fail(const absl::Status& failure) {
    base::MutexLock lock(&mutex_);
    if (failure_.ok()) failure_ = failure;
    condition_.SignalAll();
  }

 private:
  void Meet() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    here_ = 0;
    ++meetings_;
    condition_.SignalAll();
  }

  const int64_t size_;

  base::Mutex mutex_;
  base::CondVar condition_;
  std::vector<Offer> offers_ ABSL_GUARDED_BY(mutex_);
  int64_t here_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t meetings_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
};

class InProcessCollective final : public HostCollective {
 public:
  // The ranks share `group`, so the last rank to be destroyed frees it.
  InProcessCollective(std::shared_ptr<SharedGroup> group, int64_t rank)
      : group_(std::move(group)), rank_(rank) {}

  plan::TpShard shard() const override { return {rank_, group_->size()}; }

  absl::Status AllReduceSum(absl::Span<float> data) override {
    const size_t bytes = data.size() * sizeof(float);
    sum_.resize(data.size());
    KVASIR_RETURN_IF_ERROR(
        Together({CollectiveKind::kAllReduceSum, static_cast<int64_t>(bytes),
                  data.data()},
                 [&] {
                   std::memcpy(sum_.data(), group_->offer(0).data, bytes);
                   for (int64_t rank = 1; rank < group_->size(); ++rank) {
                     const auto* const other =
                         static_cast<const float*>(group_->offer(rank).data);
                     for (size_t i = 0; i < sum_.size(); ++i)
                       sum_[i] += other[i];
                   }
                 }));
    std::memcpy(data.data(), sum_.data(), bytes);
    return absl::OkStatus();
  }

  absl::Status AllGather(float* data, int64_t num_rows,
                         absl::Span<const int64_t> first_columns) override {
    const int64_t columns = first_columns.back();
    return Together({CollectiveKind::kAllGather,
                     num_rows * columns * static_cast<int64_t>(sizeof(float)),
                     data, first_columns},
                    [&] {
                      for (int64_t rank = 0; rank < group_->size(); ++rank) {
                        if (rank == rank_) continue;
                        const auto* const other =
                            static_cast<const float*>(group_->offer(rank).data);
                        const auto r = static_cast<size_t>(rank);
                        for (int64_t row = 0; row < num_rows; ++row) {
                          const int64_t at = row * columns + first_columns[r];
                          std::copy_n(other + at,
                                      first_columns[r + 1] - first_columns[r],
                                      data + at);
                        }
                      }
                    });
  }

  absl::Status Broadcast(absl::Span<char> data) override {
    return Together({CollectiveKind::kBroadcast,
                     static_cast<int64_t>(data.size()), data.data()},
                    [&] {
                      if (rank_ == 0) return;
                      std::memcpy(data.data(), group_->offer(0).data,
                                  data.size());
                    });
  }

  void Abort(const absl::Status& reason) override {
    group_->Fail(RankGaveUp(rank_, reason));
  }

  int64_t sent_bytes() const override { return 0; }
  double waited_seconds() const override {
    return std::chrono::duration<double>(
               Clock::duration(waited_.load(std::memory_order_relaxed)))
        .count();
  }

 private:
  using Clock = std::chrono::steady_clock;

  void CountWait(Clock::time_point begin) {
    waited_.fetch_add((Clock::now() - begin).count(),
                      std::memory_order_relaxed);
  }

  // Runs `body` between Arrive and Leave, while the memory of every rank may be
  // read.
  template <typename Body>
  absl::Status Together(const Offer& offer, const Body& body) {
    Clock::time_point begin = Clock::now();
    absl::Status status = group_->Arrive(rank_, offer);
    CountWait(begin);
    if (!status.ok()) return status;
    for (int64_t rank = 0; rank < group_->size() && status.ok(); ++rank) {
      const Offer& other = group_->offer(rank);
      if (other.kind != offer.kind || other.bytes != offer.bytes ||
          other.first_columns != offer.first_columns) {
        status = absl::InternalError(absl::StrCat(
            "tensor-parallel ranks make different calls: rank ", rank,
            " calls ", DescribeCall(other.kind, other.bytes), ", rank ", rank_,
            " calls ", DescribeCall(offer.kind, offer.bytes)));
      }
    }
    if (status.ok()) body();
    begin = Clock::now();
    group_->Leave();
    CountWait(begin);
    if (!status.ok()) group_->Fail(status);
    return status;
  }

  const std::shared_ptr<SharedGroup> group_;
  const int64_t rank_;
  std::vector<float> sum_;
  std::atomic<Clock::rep> waited_{0};
};

}  // namespace

std::vector<std::unique_ptr<Collective>> InProcessGroup::Create(int64_t size) {
  auto group = std::make_shared<SharedGroup>(size);
  std::vector<std::unique_ptr<Collective>> ranks;
  for (int64_t rank = 0; rank < size; ++rank) {
    ranks.push_back(
        MakeCpuCollective(std::make_unique<InProcessCollective>(group, rank)));
  }
  return ranks;
}

}  // namespace kvasir::worker
