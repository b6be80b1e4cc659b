#include "bench/tool/ranks/rank_figures.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace kvasir::cli {
namespace {

nlohmann::ordered_json PerStep(int64_t total, int64_t steps) {
  if (total % steps == 0) return total / steps;
  return static_cast<double>(total) / static_cast<double>(steps);
}

}  // namespace

int ThreadsOfRank(int threads, int64_t ranks) {
  return static_cast<int>(std::max(int64_t{1}, threads / ranks));
}

std::string ThreadsNote(int threads, int64_t ranks) {
  const int each = ThreadsOfRank(threads, ranks);
  const int64_t all = each * ranks;
  if (all == threads) return "";
  return absl::StrCat("TP=1 has ", threads, " threads, ", ranks, " ranks have ",
                      each, " each: ", all, " in all, ",
                      all > threads ? "which take turns on the cores of TP=1's"
                                    : "and leave cores idle that TP=1 uses");
}

absl::Status CheckSameResults(absl::Span<const uint64_t> hash_by_rank) {
  for (size_t rank = 1; rank < hash_by_rank.size(); ++rank) {
    if (hash_by_rank[rank] == hash_by_rank[0]) continue;
    return absl::InternalError(
        absl::StrCat("ranks 0 and ", rank,
                     " sampled different tokens: the hash of the results is ",
                     absl::Hex(hash_by_rank[0]), " on rank 0 and ",
                     absl::Hex(hash_by_rank[rank]), " on rank ", rank));
  }
  return absl::OkStatus();
}

void RankTally::Add(const worker::CollectiveTotals& before,
                    const worker::CollectiveTotals& after, int64_t more,
                    double more_seconds) {
  steps += more;
  seconds += more_seconds;
  collectives.calls += after.calls - before.calls;
  collectives.sent_bytes += after.sent_bytes - before.sent_bytes;
  collectives.waited_seconds += after.waited_seconds - before.waited_seconds;
}

nlohmann::ordered_json RankTally::ToJson() const {
  return {{"collectives_per_step", PerStep(collectives.calls, steps)},
          {"sent_bytes_per_step", PerStep(collectives.sent_bytes, steps)},
          {"wait_share", collectives.waited_seconds / seconds}};
}

}  // namespace kvasir::cli
