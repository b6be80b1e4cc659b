// Test support: what ranks that are threads of one process agree on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "worker/ranks/rank.h"

namespace kvasir::worker {

// The least pages of all, and the weights_id of all tiles. It outlives what
// asks it. Threads: any.
class ThreadAgreement {
 public:
  explicit ThreadAgreement(int64_t size);

  // RankOptions::agree of a rank: waits until all ranks have offered, and gives
  // DEADLINE_EXCEEDED where one does not in a minute.
  std::function<absl::StatusOr<RankAgreement>(const RankOffer&)> Of(
      int64_t rank);
  // Once all ranks have offered.
  std::vector<RankOffer> offers() const;

 private:
  absl::StatusOr<RankAgreement> Agree(size_t rank, const RankOffer& offer);

  mutable base::Mutex mutex_;
  base::CondVar offered_;
  std::vector<std::optional<RankOffer>> offers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvasir::worker
