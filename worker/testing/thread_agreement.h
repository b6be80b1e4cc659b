// Test support: the agreement of ranks that are threads of one process.
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

// Agrees on the fewest pages and on the weights_id of all tiles. It outlives
// the ranks.
//
// Threads: any.
class ThreadAgreement {
 public:
  explicit ThreadAgreement(int64_t size);

  // RankOptions::agree for a rank. Waits until all ranks have made their
  // offers; DEADLINE_EXCEEDED if one does not within a minute.
  std::function<absl::StatusOr<RankAgreement>(const RankOffer&)> Of(
      int64_t rank);
  // Call it after all ranks have made their offers.
  std::vector<RankOffer> offers() const;

 private:
  absl::StatusOr<RankAgreement> Agree(size_t rank, const RankOffer& offer);

  mutable base::Mutex mutex_;
  base::CondVar offered_;
  std::vector<std::optional<RankOffer>> offers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvasir::worker
