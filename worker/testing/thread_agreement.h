// Test support: lets ranks that are threads of one process agree on the number
// of their pages and on their weights_id (RankOptions::agree).
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

// The ranks agree on the smallest offered number of pages, and on the
// weights_id computed from the tiles of all ranks. Must outlive the ranks.
//
// Threads: any thread may call any method.
class ThreadAgreement {
 public:
  explicit ThreadAgreement(int64_t size);

  // Returns the function for RankOptions::agree of a rank. The returned
  // function waits until all ranks have made their offers. It returns
  // DEADLINE_EXCEEDED if that takes more than a minute.
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
